"""The batch plan of an attempt: stored, configured, measured or default, and a smaller one after out of memory."""

import json

import pytest

from snaketune.artifacts.manifest import describe_files, write_manifest
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.training.autotune import batch_plan
from snaketune.training.autotune.batch_plan import (
    BatchPlan,
    choose_plan,
    out_of_memory_error,
    record_out_of_memory,
    save_plan,
    smaller_plan,
)
from snaketune.training.autotune.search import best_of
from snaketune.training.launch import oom_retry
from tests.stages.demo_jobs import job_of


def trial(rows: int, speed: float, memory: float, checkpointing: bool = False, fits: bool = True) -> dict:
    plan = {"micro_batch_rows": rows, "gradient_checkpointing": checkpointing, "fits": fits}
    return plan | ({"tokens_per_second": speed, "peak_bytes": memory} if fits else {})


CURVE = [trial(1, 100, 1), trial(2, 180, 2), trial(4, 300, 4), trial(8, 303, 8), trial(16, 0, 0, fits=False)]


def measured(folder, trials) -> str:
    """The manifest of a curve."""
    payload = folder / "calibrate/curve"
    payload.mkdir(parents=True)
    fitting = [one for one in trials if one["fits"]]
    curve = {"device": "cpu", "trials": trials, "best": best_of(fitting) if fitting else None}
    (payload / "curve.json").write_text(json.dumps(curve))
    manifest = folder / "calibrate/manifest.json"
    write_manifest(manifest, {"stage": "calibrate", "payload": describe_files(payload), "records": {}})
    return str(manifest)


def test_a_configured_plan_is_used_and_its_slowdown_reported(tmp_path, capsys):
    operation = Execution(micro_batch_rows=2, calibration=measured(tmp_path, CURVE))
    assert choose_plan(operation, 16, 1, tmp_path) == BatchPlan(micro_batch_rows=2, gradient_checkpointing=False)
    assert "with micro-batches of 2 rows is 40% lower than with micro-batches of 4 rows" in capsys.readouterr().out
    choose_plan(operation.model_copy(update={"micro_batch_rows": 8}), 16, 1, tmp_path)
    assert "lower than" not in capsys.readouterr().out


def test_of_equally_fast_plans_the_one_with_less_memory_is_used(tmp_path):
    plan = choose_plan(Execution(calibration=measured(tmp_path, CURVE)), 16, 1, tmp_path)
    assert plan == BatchPlan(micro_batch_rows=4, gradient_checkpointing=False)


def test_without_measurements_the_plan_is_the_calibrations_default(tmp_path):
    default = {"micro_batch_rows": 4, "gradient_checkpointing": True}
    manifest, payload = measured(tmp_path, []), tmp_path / "calibrate/curve"
    curve = {"device": "cpu", "trials": [], "best": None, "default": default}
    payload.joinpath("curve.json").write_text(json.dumps(curve))
    described = {"stage": "calibrate", "records": {}, "payload": describe_files(payload)}
    write_manifest(tmp_path / "calibrate/manifest.json", described)
    assert choose_plan(Execution(calibration=manifest), 16, 1, tmp_path) == BatchPlan(**default)


def test_gradient_checkpointing_is_used_if_it_is_faster(tmp_path):
    curve = measured(tmp_path, [trial(1, 100, 9), trial(2, 0, 0, fits=False), trial(4, 250, 8, checkpointing=True)])
    plan = BatchPlan(micro_batch_rows=4, gradient_checkpointing=True)
    assert choose_plan(Execution(calibration=curve), 8, 1, tmp_path) == plan


def test_without_a_curve_the_default_is_used_and_reported(tmp_path, capsys, monkeypatch):
    (tmp_path / "cpu").mkdir()
    assert choose_plan(Execution(), 12, 1, tmp_path / "cpu").micro_batch_rows == 2
    monkeypatch.setattr(batch_plan, "visible_gpus", lambda: ("0",))
    assert choose_plan(Execution(), 12, 1, tmp_path).micro_batch_rows == 6
    assert choose_plan(Execution(calibration=str(tmp_path / "none.json")), 12, 4, tmp_path).micro_batch_rows == 3
    assert "no calibration for this run: using 6, unmeasured" in capsys.readouterr().out


def test_a_retry_uses_the_plan_of_the_attempt_before(tmp_path):
    auto = Execution()
    plan = BatchPlan(micro_batch_rows=2, gradient_checkpointing=True)
    save_plan(tmp_path, auto, plan)
    assert choose_plan(auto, 12, 1, tmp_path) == plan
    # Half the rows for each of two; five can't have two each.
    assert choose_plan(auto, 12, 2, tmp_path) == plan
    assert choose_plan(auto, 15, 5, tmp_path) == BatchPlan(micro_batch_rows=1, gradient_checkpointing=False)


def test_an_edited_config_replaces_the_stored_plan(tmp_path):
    save_plan(tmp_path, Execution(micro_batch_rows=8), BatchPlan(micro_batch_rows=2, gradient_checkpointing=False))
    assert choose_plan(Execution(micro_batch_rows=8), 8, 1, tmp_path).micro_batch_rows == 2
    assert choose_plan(Execution(micro_batch_rows=4), 8, 1, tmp_path).micro_batch_rows == 4


def test_the_smallest_plan_is_one_row_with_gradient_checkpointing():
    seen, now = [], BatchPlan(micro_batch_rows=6, gradient_checkpointing=False)
    while now:
        seen.append((now.micro_batch_rows, now.gradient_checkpointing))
        now = smaller_plan(now, Execution(), 12, 2)
    assert seen == [(6, False), (3, False), (1, False), (1, True)]
    forbids = Execution(gradient_checkpointing=False)
    assert smaller_plan(BatchPlan(micro_batch_rows=1, gradient_checkpointing=False), forbids, 12, 2) is None


def test_after_out_of_memory_the_next_attempt_uses_a_smaller_plan(tmp_path):
    operation = Execution(micro_batch_rows=8)
    plan = choose_plan(operation, 8, 1, tmp_path)
    assert out_of_memory_error(plan, operation, 8, 1, tmp_path) is None
    record_out_of_memory(tmp_path, 31, RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nMuch more"))
    error = out_of_memory_error(plan, operation, 8, 1, tmp_path)
    assert str(error) == (
        "out of memory in step 31 with micro-batches of 8 rows (CUDA out of memory. Tried to allocate 2 GiB.). The next "
        "attempt (run again, or use `--retries 3`) resumes from the last checkpoint with micro-batches of 4 rows and the same "
        "8 rows per step"
    )
    assert choose_plan(operation, 8, 1, tmp_path).micro_batch_rows == 4
    # The record is removed once it was reported.
    assert out_of_memory_error(plan, operation, 8, 1, tmp_path) is None


def test_out_of_memory_before_the_first_step_keeps_the_plan(tmp_path):
    plan = choose_plan(Execution(), 8, 1, tmp_path)
    record_out_of_memory(tmp_path, None, MemoryError())
    assert "the model itself doesn't fit" in str(out_of_memory_error(plan, Execution(), 8, 1, tmp_path))
    assert choose_plan(Execution(), 8, 1, tmp_path) == plan


def test_without_a_smaller_plan_the_error_names_other_remedies(tmp_path):
    operation, least = (
        Execution(gradient_checkpointing=False),
        BatchPlan(micro_batch_rows=1, gradient_checkpointing=False),
    )
    record_out_of_memory(tmp_path, 1, MemoryError())
    message = str(out_of_memory_error(least, operation, 8, 1, tmp_path))
    assert "no smaller batch plan; set training.gradient_checkpointing: auto, or lower packing.length" in message


def test_a_stale_out_of_memory_record_is_ignored(tmp_path, monkeypatch):
    """The process of this attempt dies of something else."""
    from snaketune.config.training_runs import Learning
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.specs import SftSpec

    def dies(job, work):
        raise SnaketuneError("exit status 1")

    work = WorkFolder(tmp_path)
    work.start()
    record_out_of_memory(work.state, 3, MemoryError())
    monkeypatch.setattr(oom_retry.processes, "launch", dies)
    spec = SftSpec.model_construct(training=Learning(learning_rate=1, batch_rows=4))
    with pytest.raises(SnaketuneError, match="exit status 1"):
        oom_retry.launch(job_of("sft", tmp_path, spec), work)


@pytest.mark.parametrize("damage", ["curve", "manifest", "device"])
def test_an_unusable_curve_is_ignored(tmp_path, capsys, damage):
    """Also for a choice by hand, which needs none."""
    manifest = measured(tmp_path, CURVE)
    payload = tmp_path / "calibrate/curve/curve.json"
    if damage == "manifest":
        (tmp_path / "calibrate/manifest.json").write_text("{")
    elif damage == "curve":
        payload.write_text(payload.read_text().replace("300", "900"))
    else:
        curve = json.loads(payload.read_text())
        payload.write_text(json.dumps(curve | {"device": "an H100"}))
        described = {"stage": "calibrate", "payload": describe_files(payload.parent), "records": {}}
        write_manifest(tmp_path / "calibrate/manifest.json", described)
    assert choose_plan(Execution(micro_batch_rows=2, calibration=manifest), 16, 1, tmp_path).micro_batch_rows == 2
    assert choose_plan(Execution(calibration=manifest), 16, 1, tmp_path).micro_batch_rows == 2
    log = capsys.readouterr().out
    assert ("measured on an H100, this device is cpu" if damage == "device" else "can't be read") in log


def test_an_empty_stored_plan_is_ignored(tmp_path):
    (tmp_path / "batch_plan.json").touch()
    assert choose_plan(Execution(micro_batch_rows=2), 8, 1, tmp_path).micro_batch_rows == 2
