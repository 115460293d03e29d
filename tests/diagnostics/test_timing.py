"""Timings that end before they begin; those that run are in test_launchers and the workflow's tests."""

import json
from types import SimpleNamespace

import pytest

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning
from snaketune.diagnostics import timed_training, timing
from snaketune.errors import SnaketuneError
from snaketune.stages.findings import Finding
from snaketune.stages.specs import SftSpec, TimingSpec
from tests.config.test_doctor import RUN
from tests.packing.chain import started


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
    timing.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)
    measured = json.loads((work.payload / "measured.json").read_text(encoding="utf-8"))
    assert measured == {"fits": False, "why": "needs 900.0 GB before there is a single activation"}
    # Whatever else is certain stops it, as it would stop the training.
    result[:] = [Finding(key="training.optimizer", problem="bitsandbytes has no GPU build", do="take another one")]
    with pytest.raises(SnaketuneError, match="no GPU build"):
        timing.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)
