"""The time of a result is that of all attempts to build it."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.cache import attempt
from snaketune.stages.outcome import Outcome

from .test_build_once import run


def test_the_time_that_a_result_took_is_that_of_all_attempts(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(attempt, "monotonic", lambda: now[0])

    def takes(seconds: float, fails: bool):
        def build(work):
            now[0] += seconds
            if fails:
                raise SnaketuneError("no")
            (work.payload / "rows.txt").write_text("rows")
            return Outcome()

        return build

    for seconds in (5.0, 7.5):
        with pytest.raises(SnaketuneError):
            run(tmp_path, build=takes(seconds, fails=True))
        now[0] += 1000
    manifest = run(tmp_path, build=takes(20.0, fails=False))
    facts = json.loads((manifest.parent / "run.json").read_text())
    assert (facts["attempts"], facts["seconds"]) == ([5.0, 7.5, 20.0], 32.5)


def test_discarded_work_counts_no_time(tmp_path, monkeypatch):
    """It is thrown away, and with it what it took."""

    def discards(work):
        work.discard()
        raise SnaketuneError("no")

    with pytest.raises(SnaketuneError, match="no"):
        run(tmp_path, build=discards)
    assert len(json.loads((run(tmp_path).parent / "run.json").read_text())["attempts"]) == 1


@pytest.mark.parametrize("damaged", ["", '{"a": 1}', "5"])
def test_times_that_are_no_numbers_fail_nothing(tmp_path, damaged):
    def fails(work):
        raise SnaketuneError("no")

    with pytest.raises(SnaketuneError):
        run(tmp_path, build=fails)
    (retained,) = tmp_path.glob(f"results/.work/demo/*/state/{attempt.TIMES}")
    retained.write_text(damaged)
    assert len(json.loads((run(tmp_path).parent / "run.json").read_text())["attempts"]) == 1


def _is_killed(folder: Path) -> None:
    def build(work):
        for _ in range(2000):
            if (work.state / attempt.TIMES).exists():
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    attempt.SECONDS_BETWEEN = 0.05
    run(folder, build=build)


def test_the_time_of_an_attempt_that_was_killed_counts(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_is_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    facts = json.loads((run(tmp_path).parent / "run.json").read_text())
    assert len(facts["attempts"]) == 2 and facts["attempts"][0] > 0
    assert facts["seconds"] == pytest.approx(sum(facts["attempts"]))
