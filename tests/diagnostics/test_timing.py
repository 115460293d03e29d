"""Timings that end before they begin, or out of memory; those that run are in test_launchers and the workflow's tests."""

import json
from types import SimpleNamespace

import pytest

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning
from snaketune.diagnostics import timed_training, timing
from snaketune.errors import SnaketuneError
from snaketune.stages.findings import Finding
from snaketune.stages.specs import SftSpec, TimingSpec
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY
from snaketune.training.launch import processes
from tests.config.test_doctor import RUN
from tests.packing.chain import started
from tests.stages.demo_jobs import job_of


def test_a_training_that_is_known_beforehand_not_to_fit_is_a_finding(tmp_path, monkeypatch):
    tokenizer = SimpleNamespace(files=list)
    prepared = SimpleNamespace(trainer_class=None, rows=[], run=None, config=None, new_config=None)
    monkeypatch.setattr(timed_training, "prepare_sft", lambda *_: prepared)
    result = [
        Finding(key="training", problem="needs 900.0 GB before there is a single activation", do="use a smaller one")
    ]
    monkeypatch.setattr(timed_training, "examine_machine", lambda *_: SimpleNamespace(findings=result))
    spec = TimingSpec(
        run=SftSpec(base=RUN.base, training=Learning(learning_rate=1e-3, batch_rows=8), lora=None, quantization=None),
        micro_batch_rows=1, gradient_checkpointing=False, launch="single", zero_stage=None, load_in_memory="auto",
        processes=1, steps=20, repeat=1, profile=False,
    )  # fmt: skip
    work = started(tmp_path / "work")
    operation = Execution(micro_batch_rows=1, gradient_checkpointing=False)
    timed_training.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)
    measured = json.loads((work.payload / "measured.json").read_text(encoding="utf-8"))
    assert measured == {"fits": False, "why": "needs 900.0 GB before there is a single activation"}
    # Whatever else is certain stops it, as it would stop the training.
    result[:] = [Finding(key="training.optimizer", problem="bitsandbytes has no GPU build", do="take another one")]
    with pytest.raises(SnaketuneError, match="no GPU build"):
        timed_training.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)


@pytest.mark.parametrize("of_memory", [True, False])
def test_running_out_of_memory_is_a_measurement_and_any_other_failure_is_not(tmp_path, monkeypatch, of_memory):
    work = started(tmp_path / "work")

    def fails(job, work):
        assert (job.operation.micro_batch_rows, job.operation.gradient_checkpointing) == (2, False)
        if of_memory:
            (work.state / OUT_OF_MEMORY).touch()
        raise SnaketuneError("ended early")

    monkeypatch.setattr(processes, "launch", fails)
    spec = SimpleNamespace(run=SimpleNamespace(training=SimpleNamespace(batch_rows=4)))
    job = job_of("timing", tmp_path, spec, operation=Execution(micro_batch_rows=2))
    if of_memory:
        assert timing.launch(job, work).counts == {"steps": 0}
        measured = json.loads((work.payload / "measured.json").read_text(encoding="utf-8"))
        assert measured == {"fits": False, "why": "out of memory with micro-batches of 2 rows"}
    else:
        with pytest.raises(SnaketuneError, match="ended early"):
            timing.launch(job, work)
