"""An input that another Snakemake removed, since it makes the result once more."""

import os
import threading
import time

from snaketune.stages.loaded_job import SECONDS_UNTIL_REMADE, wait_for_remade


def test_a_result_removed_a_moment_ago_is_waited_for(tmp_path, capfd):
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    manifest.unlink()
    threading.Timer(0.6, manifest.write_text, ["{}"]).start()
    wait_for_remade(manifest)
    assert manifest.exists()
    assert capfd.readouterr().out.count("another Snakemake may be making it again") == 1


def test_one_that_has_been_missing_for_longer_is_not(tmp_path):
    before = time.time() - 2 * SECONDS_UNTIL_REMADE
    os.utime(tmp_path, (before, before))
    started = time.monotonic()
    wait_for_remade(tmp_path / "manifest.json")
    wait_for_remade(tmp_path / "never/manifest.json")
    assert time.monotonic() - started < SECONDS_UNTIL_REMADE / 2
