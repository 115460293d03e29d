"""Throughput in the log and in run.json: correct numbers, over all processes, of training time only."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl

from snaketune.config.lora import Lora
from snaketune.engine import throughput
from snaketune.engine.model.device_speed import measured_peak
from snaketune.engine.model.flops import count_flops
from snaketune.engine.model.machine import peak_memory
from snaketune.engine.sft import SftTrainer
from snaketune.engine.throughput import LogCallback, ThroughputMeter
from tests.models.conftest import CPU, VOCABULARY, tiny_model

from .pipeline_runs import pack, spec, train

DOCUMENTS = np.zeros(2, np.int64), np.array([10, 18])


class Clock:
    """A clock that is advanced by the test."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def meter() -> ThroughputMeter:
    return ThroughputMeter(tiny_model("llama"), CPU, 1)


def step(meter: ThroughputMeter, clock: Clock, *, waits: float = 0.0, computes: float = 2.0) -> None:
    def batches():
        clock.now += waits
        yield "batch"

    assert list(meter.batches(batches())) == ["batch"]
    meter.count(*DOCUMENTS, supervised=20, projected=20)
    clock.now += computes


def test_rates_include_the_wait_for_data_between_two_lines(meter, clock):
    step(meter, clock, computes=50.0)
    assert meter.read()["warming_up"]
    # Logging and saving don't count.
    clock.now += 7.0
    step(meter, clock, waits=0.5)
    meter.stop()
    clock.now += 9.0
    step(meter, clock, waits=0.5)
    rates = meter.read()
    assert "warming_up" not in rates
    assert rates["tokens_per_second"] == 56 / 5
    assert rates["supervised_tokens_per_second"] == 40 / 5
    flops = 2 * meter.flops.batch(*DOCUMENTS)
    assert rates["mfu"] == pytest.approx(flops / 5 / meter.peak.flops_per_second, abs=1e-5)
    about = meter.about([rates])
    assert about["steps_of_this_process"] == 3
    # Waits of the first step, and of the others; an exhausted source takes no time.
    assert (about["waited_for_first_batch_s"], about["waited_for_data_s"]) == (0.0, 1.0)


def test_without_batches_nothing_is_read(meter):
    assert meter.read() == {}


def test_sums_are_over_all_processes_and_memory_is_the_most_of_one(clock):
    meter = ThroughputMeter(tiny_model("llama"), CPU, 2)
    step(meter, clock)

    def gather(own):
        other = own.clone()
        # The slowest process, for which the others wait; with more memory and a device of twice the peak.
        other[0, -3:-1] = torch.tensor([4.0, 5e9])
        other[0, -1] *= 2
        return torch.cat([own, other])

    rates = meter.read(gather)
    assert rates["tokens_per_second"] == 2 * 28 / 4
    assert rates["memory_gb"] == 5.0
    assert rates["supervised_tokens_per_second"] == 2 * 20 / 4
    # The peak is that of both devices.
    assert rates["mfu"] == pytest.approx(
        2 * meter.flops.batch(*DOCUMENTS) / 4 / 3 / meter.peak.flops_per_second, abs=1e-5
    )
    assert " on each of 2 GPUs (" in str(meter)
    assert meter.about([rates])["peak_memory_gb_of_processes"][1] == 5.0


def test_medians_leave_out_the_first_line_of_every_process(meter):
    names = ("tokens_per_second", "supervised_tokens_per_second", "mfu", "mfu_computed")

    def entry(rate, **more):
        return dict.fromkeys(names, rate) | {"memory_gb": rate} | more

    # Resumed at the fourth; an older version logged less at the second.
    history = [
        entry(0.1, warming_up=True),
        {"loss": 1.0},
        entry(0.5),
        entry(0.2, warming_up=True),
        entry(0.6),
        entry(0.7),
    ]
    about = meter.about(history)
    assert about["tokens_per_second_median"] == about["mfu_median"] == 0.6
    assert about["peak_memory_gb"] == 0.7
    assert meter.about(history[:1])["mfu_median"] == 0.1
    plain = 6 * sum(p.numel() for p in tiny_model("llama").parameters())
    assert about["mfu_plain_median"] == round(0.6 * plain / meter.peak.flops_per_second, 7)


def test_a_training_logs_the_definition_of_mfu_and_its_throughput(tmp_path, capsys):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack"), spec())
    log = capsys.readouterr().out
    model = tiny_model("llama")
    multiplied = sum(p.numel() for p in model.parameters()) - VOCABULARY * 32
    assert f"MFU: 6 x {multiplied / 1e3:.3g}k parameters + attention over what is visible, of " in log
    assert log.count("MFU: ") == 1
    first, *lines = re.findall(r"^step \d+/18  .*$", log, re.MULTILINE)
    assert len(lines) == 17
    assert first.endswith("  warming up")
    rates = r"[\d,]+ tokens/s \([\d,]+ supervised\)  MFU [\de.+-]+%  \d+\.\d\d GB"
    for line in lines:
        assert re.fullmatch(rf"step \d+/18  loss \S+  grad norm \S+  learning rate \S+  {rates}  \d+ s left", line), (
            line
        )
    run = outcome.run
    # Two of 28 tokens per row are the first of a document, and have no label.
    for entry in run["history"]:
        assert entry["supervised_tokens_per_second"] == pytest.approx(entry["tokens_per_second"] * 26 / 28, rel=1e-3)
    assert 0 < run["mfu_computed_median"] < run["mfu_median"]
    assert run["flops"] == count_flops(model).about()
    assert run["peak_flops_source"].startswith("measured matrix product, float32")
    assert (run["peak_memory_is"], run["steps_of_this_process"]) == ("resident in the process", 18)
    assert 0.05 < run["peak_memory_gb"] < 100
    assert 0 <= run["waited_for_data_s"] < 60
    json.dumps(run)


def test_adapters_name_what_is_frozen(tmp_path, capsys):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=4), spec(Lora(rank=2), epochs=1))
    assert re.search(r"MFU: 4 x [\d.]+k frozen \+ 6 x [\d.]+k parameters \+ attention", capsys.readouterr().out)
    assert outcome.run["flops"]["trained"] == outcome.about["trainable_parameters"]


def test_measuring_the_peak_changes_no_weight(tmp_path, monkeypatch):
    """A training with the peak measured equals one with the peak cached."""
    rows, made = pack(tmp_path / "pack", rows=8), spec(Lora(rank=2, dropout=0.5), epochs=1)
    measured_peak.cache_clear()
    for name in ("measured", "known"):
        train(tmp_path / name, rows, made)
    one, two = (load_file(tmp_path / name / "payload.partial/model.safetensors") for name in ("measured", "known"))
    assert not [name for name in one if not torch.equal(one[name], two[name])]


def test_the_remaining_time_is_estimated_from_the_steps_after_the_first(monkeypatch, capsys, clock):
    class State:
        is_world_process_zero, max_steps, global_step = True, 100, 41

    callback = LogCallback()
    monkeypatch.setattr("snaketune.engine.throughput.time.monotonic", clock.monotonic)
    clock.now += 500.0
    callback.on_step_end(None, State, TrainerControl(should_log=True))
    callback.on_log(None, State, None, logs={"loss": 1.0})
    clock.now += 30.0
    State.global_step = 51
    callback.on_step_end(None, State, TrainerControl(should_log=True))
    callback.on_log(None, State, None, logs={"loss": 1.0})
    assert capsys.readouterr().out.splitlines() == ["step 41/100  loss 1", "step 51/100  loss 1  2 min left"]


def test_slow_steps_between_two_log_lines_are_not_silent(monkeypatch, capsys, clock):
    class State:
        is_world_process_zero, max_steps, global_step = True, 100, 0

    monkeypatch.setattr("snaketune.engine.throughput.time.monotonic", clock.monotonic)
    callback = LogCallback()
    for _ in range(3):
        State.global_step += 1
        for ends in (callback.on_substep_end, callback.on_step_end):
            clock.now += 20.0
            ends(None, State, TrainerControl())
    assert capsys.readouterr().out.splitlines() == [
        "1 of 100 steps done",
        "2 of 100 steps done  65 min left",
        "3 of 100 steps done  65 min left",
    ]


def test_memory_is_that_of_this_process():
    held = np.ones(200 * 2**20, np.uint8)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert peak_memory(CPU.device) >= pages * os.sysconf("SC_PAGESIZE") >= held.nbytes


def test_the_trainer_counts_no_flops_of_its_own():
    assert SftTrainer.floating_point_ops(None, {}) == 0
