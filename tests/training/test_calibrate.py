"""Calibration on real steps of tiny models with simulated memory limits; trainings that run out of memory and resume."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from snaketune.config.lora import Lora
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning
from snaketune.engine.trainer import PackedTrainer
from snaketune.errors import SnaketuneError
from snaketune.models import traced_model
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.plan.training_jobs import calibrated_learning
from snaketune.stages.specs import CalibrateSpec, DpoSpec, SftSpec
from snaketune.training import calibrate
from snaketune.training.autotune import calibration, machine_check, timed_steps
from snaketune.training.autotune.batch_plan import CURVE, record_killed, record_out_of_memory
from snaketune.training.autotune.search import TRIALS
from snaketune.training.launch import oom_retry, processes, worker
from tests.packing import chain
from tests.stages.demo_jobs import job_of
from tests.tokenization.small_tokenizers import messages

from .sft_runs import packed_rows, raw_rows, sft_spec

FORKED = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timed_steps, "SECONDS", 0.0)
    monkeypatch.setattr(calibration, "SECONDS", 0.0)


@pytest.fixture
def holds(monkeypatch):
    """Simulate a device with memory for a number of rows; with more, raise torch's own error, unless activations are
    recomputed."""

    def hold(rows: int) -> None:
        compute_loss = PackedTrainer.compute_loss

        def limited(self, model, inputs, *others, **keywords):
            if inputs["input_ids"].shape[1] > rows * self.rows.row_length and not self.args.gradient_checkpointing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
            return compute_loss(self, model, inputs, *others, **keywords)

        monkeypatch.setattr(PackedTrainer, "compute_loss", limited)

    return hold


def spec_of(run: SftSpec | DpoSpec, base, checkpointing="auto", batch_rows: int = 8) -> CalibrateSpec:
    learning = calibrated_learning(run.training.model_copy(update={"batch_rows": batch_rows}))
    made = run.model_copy(update={"training": learning})
    return CalibrateSpec(
        base=base, run=made, gradient_checkpointing=checkpointing, processes=1, launch="single", zero_stage=None
    )


def calibrated(folder, spec: CalibrateSpec, pack, tokenizer, **operation) -> dict:
    work = WorkFolder(folder)
    work.start()
    calibration.build(spec, work, operation=Execution(**operation), pack=pack, tokenizer=tokenizer, base=[])
    return json.loads((work.payload / CURVE).read_text())


def seen(curve: dict) -> list[tuple[int, bool, bool]]:
    return [(one["micro_batch_rows"], one["gradient_checkpointing"], one["fits"]) for one in curve["trials"]]


def many_rows(folder, tokenizer, monkeypatch):
    rows = [{"id": str(i), "messages": messages(f"cat {i}?", f"ton {i}"), "tools": None} for i in range(90)]
    monkeypatch.setattr("tests.training.sft_runs.ROWS", rows)
    return packed_rows(folder, tokenizer)


def test_the_curve_is_complete(tmp_path, tokenizer, holds, monkeypatch):
    holds(5)
    rows = many_rows(tmp_path / "rows", tokenizer, monkeypatch)
    # So that every doubling counts as a gain.
    monkeypatch.setattr("snaketune.training.autotune.search.GAIN", -1.0)
    spec = sft_spec(tmp_path, None)
    curve = calibrated(tmp_path / "work", spec_of(spec, spec.base, batch_rows=12), rows, tokenizer)
    stored = [trial for trial in seen(curve) if not trial[1]]
    assert stored == [(1, False, True), (3, False, True), (6, False, False)]
    assert [trial for trial in seen(curve) if trial[1]] == [(rows, True, True) for rows in (1, 3, 6, 12)]
    for one in curve["trials"]:
        assert one["accumulation"] * one["micro_batch_rows"] == 12
        assert one["fits"] == (one.get("tokens_per_second", 0) > 0 and 5e7 < one["peak_bytes"] < 5e10)
        assert one["fits"] or one["why"].startswith("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert curve["best"] in curve["trials"]
    assert curve["best"]["fits"]
    # No record remains that would end a training.
    assert not (tmp_path / "work/state/out_of_memory.json").exists()


@pytest.mark.parametrize("kind", ["lora", "raw", "sigmoid", "orpo"])
def test_every_kind_of_training_has_a_curve(tmp_path, tokenizer, kind):
    run = sft_spec(tmp_path, Lora(rank=2) if kind == "lora" else None)
    base = run.base
    rows = raw_rows(tmp_path / "raw") if kind == "raw" else packed_rows(tmp_path / "rows", tokenizer)
    if kind in ("sigmoid", "orpo"):
        pairs = [
            {"id": str(i), "prompt": messages(f"cat {i}?"), "chosen": messages("", f"ton {i}")[1:],
             "rejected": messages("", f"hat {i} sing")[1:]}
            for i in range(8)
        ]  # fmt: skip
        corpus = chain.corpus(tmp_path / "pairs", "preference", pairs, held_out=0)
        rows = chain.pack(tmp_path / "pack", corpus, tokenizer, "preference", length=64)
        run = DpoSpec(
            loss=kind, training=Learning(learning_rate=1.0), lora=None,
            quantization=None, trust_remote_code=False,
        )  # fmt: skip
    curve = calibrated(tmp_path / "work", spec_of(run, base, batch_rows=4), rows, tokenizer)
    assert seen(curve)[0] == (1, False, True)


def test_it_takes_a_small_share_of_the_trainings_that_wait_for_it(tmp_path, tokenizer, monkeypatch, capsys):
    # Activations too, which other trainings here don't trace.
    monkeypatch.setattr(machine_check, "trace_model", traced_model.trace_model)
    run, rows = sft_spec(tmp_path, None), packed_rows(tmp_path / "rows", tokenizer)
    spec = spec_of(run, run.base)
    # A trial takes more than 3% of these few rows; on a CPU two rows are the default, where they fit in memory.
    curve = calibrated(tmp_path / "few", spec, rows, tokenizer, calibrated_epochs=1.0)
    assert curve["trials"] == [] and curve["best"] is None
    assert curve["default"] == {"micro_batch_rows": 2, "gradient_checkpointing": False}
    assert "would take more than 3% of the training: micro-batches of 2 rows" in capsys.readouterr().out
    monkeypatch.setattr(calibration, "MEMORY_SHARE", 0.0)
    curve = calibrated(tmp_path / "full", spec, rows, tokenizer, calibrated_epochs=1.0)
    assert curve["default"] == {"micro_batch_rows": 1, "gradient_checkpointing": True}
    # Many epochs are worth several trials.
    monkeypatch.setattr(calibration, "_elapsed_s", lambda: 0.0)
    assert len(calibrated(tmp_path / "many", spec, rows, tokenizer, calibrated_epochs=1e6)["trials"]) > 1
    # At the machine's peak, so many epochs take less time than this process has.
    monkeypatch.setattr(calibration, "_elapsed_s", lambda: 1e9)
    assert calibrated(tmp_path / "late", spec, rows, tokenizer, calibrated_epochs=1e6)["trials"] == []


def test_the_time_of_a_calibration_is_that_of_its_process():
    assert 0 < calibration._elapsed_s() <= time.time() - psutil.Process().create_time()


@pytest.mark.parametrize(
    ("elapsed", "micro_batch_s", "wanted"), [(0.0, 1.0, True), (17.0, 1.0, True), (19.0, 1.0, False), (0.0, 2.9, False)]
)
def test_another_trial_runs_if_all_of_them_stay_a_small_share(elapsed, micro_batch_s, wanted, monkeypatch):
    """Of 1,000 steps of a second, 30 s; the last trial took 6 s, and one of twice the rows has six micro-batches more."""
    monkeypatch.setattr(calibration, "_elapsed_s", lambda: elapsed)
    runner = object.__new__(calibration.TrialRunner)
    runner.items = 500
    runner.spec = SimpleNamespace(processes=1, run=SimpleNamespace(training=SimpleNamespace(batch_rows=1)))
    fastest = {"fits": True, "step_s": 1.0, "trial_s": 6.0}
    last = {"fits": True, "step_s": 2.0, "trial_s": 6 * micro_batch_s, "micro_batch_s": micro_batch_s}
    runner.run = SimpleNamespace(operation=Execution(calibrated_epochs=2.0))
    assert runner.is_worthwhile([fastest, last]) == wanted
    # What runs out of memory is followed by smaller plans, and without epochs the user wants the curve.
    assert runner.is_worthwhile([{"fits": False}])
    runner.run = SimpleNamespace(operation=Execution(calibrated_epochs=0.0))
    assert runner.is_worthwhile([last])


def test_what_a_host_has_no_memory_for_is_not_tried(tmp_path, tokenizer, monkeypatch):
    def expected(runner, plan):
        return 2 * host if plan.micro_batch_rows > 1 else host // 2

    host = 10**10
    monkeypatch.setattr(calibration, "host_memory_limit", lambda: host)
    monkeypatch.setattr(calibration.TrialRunner, "_expected_memory", expected)
    run = sft_spec(tmp_path, None)
    curve = calibrated(
        tmp_path / "work", spec_of(run, run.base, False), packed_rows(tmp_path / "rows", tokenizer), tokenizer
    )
    assert seen(curve) == [(1, False, True), (2, False, False)]
    assert curve["trials"][1]["why"] == "would need 20.0 GB, more than is free"


def test_if_nothing_fits_the_error_names_remedies(tmp_path, tokenizer, holds, monkeypatch):
    def never(self, *others, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(PackedTrainer, "compute_loss", never)
    run, rows = sft_spec(tmp_path, None), packed_rows(tmp_path / "rows", tokenizer)
    with pytest.raises(
        SnaketuneError, match=r"not even micro-batches of 1 row, .* fit in memory: CUDA out of memory.*lower"
    ):
        calibrated(tmp_path / "work", spec_of(run, run.base), rows, tokenizer)


def forked(monkeypatch) -> None:
    """Launch processes as forks of this one, with the patches of the test."""

    def run(command, variables, step):
        process = FORKED.Process(target=worker.main, args=tuple(map(Path, command[-2:])))
        process.start()
        process.join()
        return process.exitcode

    monkeypatch.setattr(processes, "run_processes", run)


def test_a_training_out_of_memory_resumes_with_a_smaller_plan_and_learns_the_same(
    tmp_path, tokenizer, monkeypatch, capfd
):
    forked(monkeypatch)
    rows, spec = many_rows(tmp_path / "rows", tokenizer, monkeypatch), sft_spec(tmp_path, None)
    inputs = {"artifacts": {"pack": [rows], "tokenizer": [tokenizer]}, "files": {"base": []}}
    operation = Execution(micro_batch_rows=4, log_steps=1, checkpoint_steps=2)

    def attempt(folder):
        work = WorkFolder(folder)
        work.payload.mkdir(parents=True, exist_ok=True)
        work.state.mkdir(exist_ok=True)
        job = job_of("sft", folder, spec, operation=operation, **inputs)
        monkeypatch.setattr(worker, "read_job", lambda path: job)
        return oom_retry.launch(job, work)

    undisturbed = attempt(tmp_path / "undisturbed").run["history"]
    assert len(undisturbed) > 3
    compute_loss = PackedTrainer.compute_loss

    def ends(self, model, inputs, *others, **keywords):
        if self.state.global_step >= 3 and self.args.per_device_train_batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute_loss(self, model, inputs, *others, **keywords)

    monkeypatch.setattr(PackedTrainer, "compute_loss", ends)
    for rows_before, rows_after in ((4, 2), (2, 1)):
        with pytest.raises(SnaketuneError, match=rf"step 4 with micro-batches of {rows_before} .* of {rows_after} row"):
            attempt(tmp_path / "disturbed")
    outcome = attempt(tmp_path / "disturbed")
    assert "resuming from" in capfd.readouterr().out
    assert outcome.run["micro_batch_rows"] == 1
    assert [entry["step"] for entry in outcome.run["history"]] == [entry["step"] for entry in undisturbed]
    for one, other in zip(outcome.run["history"], undisturbed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["learning_rate"] == other["learning_rate"]


def test_a_relaunched_calibration_continues_after_the_trial_that_ended_the_last_one(tmp_path, tokenizer, monkeypatch):
    """The kernel kills the process in its second trial."""
    run, rows = sft_spec(tmp_path, None), packed_rows(tmp_path / "rows", tokenizer)
    spec = spec_of(run, run.base, batch_rows=4)
    time_steps, measured, work = timed_steps.time_steps, [], WorkFolder(tmp_path / "work")

    class Killed(BaseException):
        pass

    def counting(trainer, work):
        measured.append((trainer.args.per_device_train_batch_size, trainer.args.gradient_checkpointing))
        if len(measured) == 2:
            raise Killed
        return time_steps(trainer, work)

    def launched(job, work):
        try:
            return calibration.build(spec, work, operation=job.operation, pack=rows, tokenizer=tokenizer, base=[])
        except Killed:
            record_killed(work.state, "oom_kill rose")
            raise SnaketuneError("killed by signal 9") from None

    monkeypatch.setattr(calibration, "time_steps", counting)
    monkeypatch.setattr("snaketune.training.autotune.search.GAIN", -1.0)
    monkeypatch.setattr(processes, "launch", launched)
    work.start()
    calibrate.launch(job_of("calibrate", tmp_path), work)
    curve = json.loads((work.payload / CURVE).read_text())
    assert measured == [(1, False), (2, False), (1, True), (2, True), (4, True)]
    assert seen(curve)[:2] == [(1, False, True), (2, False, False)]
    assert curve["trials"][1]["why"] == "out of memory"


@pytest.mark.parametrize(("in_trial", "of_memory"), [(True, False), (False, True)])
def test_a_calibration_that_ends_otherwise_is_not_relaunched(tmp_path, monkeypatch, in_trial, of_memory):
    """Killed by someone else, or out of memory before its first trial. What it measured is measured again."""
    work, launches = WorkFolder(tmp_path), []
    work.start()
    (work.state / TRIALS).write_text('[{"micro_batch_rows": 1, "gradient_checkpointing": false, "fits": true}]')

    def dies(job, work):
        launches.append((work.state / TRIALS).exists())
        if in_trial:
            (work.state / TRIALS).write_text(
                '[{"micro_batch_rows": 8, "gradient_checkpointing": false, "fits": false}]'
            )
        if of_memory:
            record_out_of_memory(work.state, None, MemoryError())
        raise SnaketuneError("ended early")

    monkeypatch.setattr(processes, "launch", dies)
    with pytest.raises(SnaketuneError, match="ended early"):
        calibrate.launch(job_of("calibrate", tmp_path), work)
    assert launches == [False]


@pytest.mark.parametrize(("epochs", "launched"), [(1.0, False), (1e6, True), (0.0, True)])
def test_a_training_too_short_for_a_trial_on_a_cpu_starts_no_process(
    tmp_path, tokenizer, monkeypatch, epochs, launched
):
    monkeypatch.setattr(processes, "launch", lambda *_, **__: "launched")
    work, pack = WorkFolder(tmp_path / "work"), packed_rows(tmp_path / "rows", tokenizer)
    work.start()
    operation = Execution(calibrated_epochs=epochs)
    done = calibrate.launch(job_of("calibrate", tmp_path, operation=operation, artifacts={"pack": [pack]}), work)
    assert (done == "launched") == launched
    if not launched:
        assert json.loads((work.payload / CURVE).read_text()) == {"device": "cpu", "trials": [], "best": None}


CAPPED = """
import resource
import torch
from snaketune.engine.model.machine import host_memory_limit, is_out_of_memory
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    torch.empty(2**30)
except RuntimeError as error:
    print(is_out_of_memory(error), is_out_of_memory(ValueError("other")))
"""


def test_torchs_error_on_a_host_without_memory_is_recognized():
    completed = subprocess.run([sys.executable, "-c", CAPPED], capture_output=True, text=True)
    assert completed.stdout.split() == ["True", "False"], completed.stderr


def test_tokens_are_those_of_full_micro_batches(tmp_path, tokenizer, monkeypatch):
    """Five rows in micro-batches of four: every other one has one row, and is faster."""
    run = sft_spec(tmp_path, None)
    timings = []
    time_steps = timed_steps.time_steps

    def timed(trainer, work):
        timings.append((trainer.args.per_device_train_batch_size, time_steps(trainer, work)))
        return timings[-1][1]

    monkeypatch.setattr(calibration, "time_steps", timed)
    monkeypatch.setattr("snaketune.training.autotune.search.GAIN", -1.0)
    rows = packed_rows(tmp_path / "rows", tokenizer)
    calibrated(tmp_path / "work", spec_of(run, run.base, batch_rows=4), rows, tokenizer)
    tokens = {rows: timing["tokens"] for rows, timing in timings}
    assert tokens[2] == pytest.approx(2 * tokens[1], rel=0.2)
    assert tokens[4] == pytest.approx(4 * tokens[1], rel=0.2)
