"""What results and unfinished work still use stays when old work is freed."""

import shlex
from pathlib import Path

from snaketune.artifacts.manifest import write_manifest
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.row_store import RowStore


def test_results_that_the_report_compares_with_are_retained(tmp_path: Path):
    results = tmp_path / "results"
    for stage, fingerprint in (("dpo", "aa"), ("eval", "bb"), ("dpo", "cc")):
        (results / ".work" / stage / fingerprint).mkdir(parents=True)
    (results / "report").mkdir()
    manifest = {"fingerprint": "dd", "compared": ["aa", "bb"], "payload": {}, "records": {}}
    write_manifest(results / "report/manifest.json", manifest)
    clean(results / ".work", remove=True)
    assert {path.name for path in (results / ".work").glob("*/*")} == {"aa", "bb"}


def test_results_that_the_config_does_not_name_are_listed_with_the_command_that_removes_them(tmp_path: Path, capsys):
    manifests = [tmp_path / f"results/sft/{name}/manifest.json" for name in ("new", "it's old")]
    manifests.append(tmp_path / "results/smoke/results/sft/new/manifest.json")
    for manifest in manifests:
        manifest.parent.mkdir(parents=True)
        write_manifest(manifest, {"fingerprint": manifest.parent.name, "payload": {}, "records": {}})
    clean(tmp_path / "results/.work", remove=True, named={manifests[0]})
    assert all(manifest.is_file() for manifest in manifests)
    printed = capsys.readouterr().out
    assert shlex.quote(str(manifests[1].parent)) + " && snakemake clean_work" in printed and "/new" not in printed


def test_rows_of_published_results_and_of_unfinished_work_are_retained(tmp_path: Path):
    results = tmp_path / "results"
    published, unfinished, old = (RowStore(results / ".work", {"weights": name}) for name in "abc")
    for store in (published, unfinished, old):
        store.add({bytes(16): b"value"})
    mark = results / ".work/ref_pass/ee/state/rows" / unfinished.key
    mark.parent.mkdir(parents=True)
    mark.touch()
    (results / "ref_logps/x").mkdir(parents=True)
    manifest = {"fingerprint": "dd", "rows": [published.key], "payload": {}, "records": {}}
    write_manifest(results / "ref_logps/x/manifest.json", manifest)
    clean(results / ".work", remove=True)
    assert {path.name for path in (results / ".work").glob(".rows/*")} == {published.key, unfinished.key}
    assert mark.is_file()
