"""The launched process of a training: it runs the code and reads the files that the fingerprint is of, or nothing."""

import json
import resource
import sys

import pytest

from snaketune.artifacts.attempt import Attempt, stamps_of
from snaketune.artifacts.code import code_digest
from snaketune.errors import SnaketuneError
from snaketune.training.launch import run_worker

MODULE = "snaketune.training.ref_logps"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Run `train` as a launched process does, in an attempt with this code."""

    def run(train, code: str):
        base = tmp_path / "base"
        base.write_text("weights")
        Attempt(stage="sft", code=code, stamps=stamps_of([base]), threads=1).save(tmp_path)
        (tmp_path / "job.json").write_text(json.dumps({"module": MODULE}), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
        run_worker(train)

    return run


def test_it_trains_with_the_code_of_the_fingerprint(worker):
    trained: list = []
    worker(trained.append, code_digest(MODULE))
    assert trained == [{"module": MODULE}]


def test_it_trains_with_no_other_code(worker):
    trained: list = []
    with pytest.raises(SystemExit, match="error: the code of the sft stage changed since this run was planned"):
        worker(trained.append, "0" * 16)
    assert not trained


def test_a_full_disk_is_told_and_no_traceback(worker, tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    def train(job):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save_file({"weights": zeros(9999)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(SystemExit, match=r"error: the results can't be written: .*Make room"):
        worker(train, code_digest(MODULE))


def test_any_other_error_keeps_its_traceback(worker):
    def train(job):
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        worker(train, code_digest(MODULE))


def test_before_the_first_step_the_files_are_compared_once_more(tmp_path):
    """With the base read, and no checkpoint written: what a resumed training goes on with came of the right files."""
    from snaketune.training.trainer import fit

    class Stops(Exception):
        pass

    class Trainer:
        """As much of one as there is before the first step."""

        class accelerator:
            @staticmethod
            def wait_for_everyone():
                pass

        def remove_callback(self, callback):
            pass

        add_callback = remove_callback

        def is_world_process_zero(self):
            return True

        def train(self, **_):
            raise Stops

    base = tmp_path / "base"
    base.write_text("weights")
    Attempt(stage="sft", code="c", stamps=stamps_of([base])).save(tmp_path)
    with pytest.raises(Stops):
        fit(Trainer(), tmp_path / "checkpoints")
    base.write_text("others")
    with pytest.raises(SnaketuneError, match="base changed while the sft stage read it"):
        fit(Trainer(), tmp_path / "checkpoints")
