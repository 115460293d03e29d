"""A training that can't go well on its machine is refused before anything is loaded, with what to do; a doubt is told."""

import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Lora, Pretrained, Quantization, Training
from snaketune.errors import SnaketuneError
from snaketune.models import machine
from snaketune.models.devices import Compute
from snaketune.models.load_model import parameter_count
from snaketune.models.machine import Machine, bitsandbytes_trouble, look
from snaketune.models.memory import Estimate
from snaketune.models.peak_flops import Peak
from snaketune.stages.gpu_needs import Finding, needs_of_gpu, tell
from snaketune.stages.specs import CalibrateSpec, RefLogpsSpec, SftSpec
from snaketune.training.autotune import machine_check
from snaketune.training.autotune.machine_check import examine, sharing_of, too_slow, too_small
from snaketune.training.loop import pipeline
from tests.models.conftest import CPU, tiny_model

from .pipeline_runs import pack, train
from .pipeline_runs import spec as spec_of

GPU = Compute(device=torch.device("cuda", 0), dtype=torch.bfloat16, kernel="varlen")
H100 = {"device": GPU.device, "card": "NVIDIA H100 80GB HBM3", "memory": 85 * 10**9, "free": 84 * 10**9}
MACHINE = Machine(**H100, threads=1, cores=2)
# As large as Llama 2 7B, in fewer layers.
SEVEN = AutoConfig.for_model(
    "llama", vocab_size=32000, hidden_size=8192, intermediate_size=53248, num_hidden_layers=4, num_attention_heads=64,
    num_key_value_heads=64, tie_word_embeddings=False,
)  # fmt: skip
NUMBERS = 2 * 32000 * 8192 + 4 * (4 * 8192**2 + 3 * 8192 * 53248 + 2 * 8192) + 8192


def sft(lora=None, quantization=None, **training) -> SftSpec:
    settings = {"learning_rate": 1e-4, "batch_rows": 4, "micro_batch_rows": 2} | training
    base = Pretrained(path="some/model")
    return SftSpec(base=base, training=Training(**settings), lora=lora, quantization=quantization)


def executed(training: Training, **operation) -> Execution:
    """Without leave to use the CPU, unless that is said."""
    return Execution(micro_batch_rows=training.micro_batch_rows, gradient_checkpointing=False, **operation)


def keys(findings) -> list[str]:
    return [finding.key for finding in findings]


@pytest.fixture
def rows(tmp_path):
    return pack(tmp_path / "pack")


NEEDY = [
    (sft(Lora(), Quantization()), {}, ["quantization"]),
    (sft(optimizer="adamw_8bit"), {}, ["training.optimizer"]),
    (sft(optimizer="paged_lion_32bit"), {}, ["training.optimizer"]),
    (sft(), {"gpus": 2}, ["operation.gpus"]),
    (sft(), {"nodes": 2}, ["operation.nodes"]),
    (sft(optimizer="lion_32bit"), {}, []),
    (sft(Lora()), {"gpus": 0}, []),
]


@pytest.mark.parametrize(("spec", "operation", "expected"), NEEDY)
def test_what_needs_a_gpu_is_refused_without_one_unless_the_cpu_is_allowed(spec, operation, expected):
    found = needs_of_gpu(spec, Execution(**operation))
    assert keys(found) == expected
    assert all(finding.certain and "operation.allow_cpu: true" in finding.do for finding in found)
    assert needs_of_gpu(spec, Execution(**operation, allow_cpu=True)) == []


def test_a_calibration_and_a_reference_need_what_their_run_needs():
    run = sft(Lora(), Quantization())
    calibration = CalibrateSpec.model_construct(run=run)
    reference = RefLogpsSpec.model_construct(quantization=Quantization())
    assert (
        keys(needs_of_gpu(calibration, Execution())) == keys(needs_of_gpu(reference, Execution())) == ["quantization"]
    )


def test_all_that_is_certain_stops_in_one_message_and_a_doubt_is_printed(capsys):
    sure, doubt = (Finding(key=str(n), found="f", do="d", certain=certain) for n, certain in ((1, True), (2, False)))
    tell([doubt])
    assert capsys.readouterr().out == "note: 2: f; d\n"
    tell([doubt], aloud=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(SnaketuneError, match=r"1: f; d\n +1: f; d"):
        tell([sure, doubt, sure])


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(monkeypatch, rows):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = examine(sft(), executed(sft().training), CPU, None, rows).findings
    assert [(finding.key, finding.certain) for finding in found] == [("operation.gpus", True)]
    assert f"torch {torch.__version__}" in found[0].found
    for operation in ({"allow_cpu": True}, {"gpus": 0}):
        assert not examine(sft(), executed(sft().training, **operation), CPU, None, rows).findings


def stub_gpu(monkeypatch, name: str = "NVIDIA A10", memory: int = 24 * 10**9) -> None:
    """What torch says of a card that is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (memory - 10**9, memory))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))


def test_seven_billion_parameters_in_full_do_not_fit_a_card_of_24_gb(monkeypatch, rows):
    stub_gpu(monkeypatch)
    operation = executed(sft().training)
    (found,) = examine(sft(), operation, GPU, SEVEN, rows).findings
    gb = NUMBERS / 1e9
    # Weights and gradients of 4 bytes, states of 8.
    assert f"needs {16 * gb:.1f} GB before there is a single activation (weights {4 * gb:.2f} GB, " in found.found
    assert f"optimizer states {8 * gb:.2f} GB" in found.found
    assert "NVIDIA A10 has 24.0 GB" in found.found
    assert found.certain
    for way in ("`lora`", "quantization", "paged_adamw_8bit", "fsdp"):
        assert way in found.do
    adapted = sft(Lora(), optimizer="adamw_torch")
    looked = examine(adapted, operation, GPU, SEVEN, rows)
    assert (looked.findings, str(looked.machine)) == ((), "cuda:0 (A10, 22GB)")
    monkeypatch.setenv("WORLD_SIZE", "8")
    shared = examine(sft(), executed(sft().training, gpus=8, launch="fsdp"), GPU, SEVEN, rows)
    assert not any(finding.certain for finding in shared.findings)


@pytest.mark.parametrize(
    ("launch", "sharing"),
    [
        ({}, "ddp"), ({"gpus": 2}, "ddp"), ({"launch": "fsdp"}, "fsdp"), ({"launch": "deepspeed"}, "zero2"),
        ({"launch": "deepspeed", "zero_stage": 3}, "zero3"),
    ],
)  # fmt: skip
def test_processes_share_as_they_are_launched(launch, sharing):
    assert sharing_of(Execution(**launch)) == sharing


def taken(least: int, computing: int | None) -> Estimate:
    return Estimate(there=0, weights=least, gradients=0, states=0, paged=0, computing=computing)


@pytest.mark.parametrize(
    ("estimate", "here", "certain"),
    [
        (taken(40 * 10**9, 40 * 10**9), 1, []),
        (taken(40 * 10**9, 45 * 10**9), 1, [False]),
        (taken(86 * 10**9, 10**9), 1, [True]),
        (taken(86 * 10**9, None), 1, [True]),
        (taken(40 * 10**9, None), 1, []),
        (taken(43 * 10**9, 0), 2, [True]),
    ],
)
def test_what_cannot_fit_is_refused_and_what_may_not_is_told(estimate, here, certain):
    assert [finding.certain for finding in too_small(estimate, MACHINE, sft(), 1, here)] == certain


def test_days_on_a_cpu_are_refused_by_what_this_cpu_was_measured_to_do(monkeypatch, rows):
    slow = Peak(flops_per_second=1e11, source="measured matrix product, float32, 2 threads")
    assert too_slow(2 * 86400 * 0.5e11, 1, slow) == []
    assert too_slow(4 * 86400 * 0.5e11, 2, slow) == []
    (found,) = too_slow(30 * 86400 * 0.5e11, 1, slow)
    assert "would take 30 days at best" in found.found
    assert "100 GFLOP/s of a measured matrix product, float32, 2 threads" in found.found
    # Seven billion parameters, 616 tokens, ten thousand epochs; of few, nothing is measured.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**12, available=10**12))
    monkeypatch.setattr(machine, "host_limit", lambda: 10**12)
    monkeypatch.setattr(machine_check, "peak_of", lambda compute: slow)
    long = sft(epochs=10_000)
    assert keys(examine(long, executed(long.training), CPU, SEVEN, rows).findings) == ["operation"]
    assert not examine(long, executed(long.training, allow_cpu=True), CPU, SEVEN, rows).findings
    monkeypatch.setattr(machine_check, "peak_of", lambda compute: pytest.fail("measured"))
    assert not examine(sft(), executed(long.training), CPU, SEVEN, rows).findings


def test_bitsandbytes_without_its_gpu_build_says_so_itself(monkeypatch, rows):
    """Its own classes, as `get_native_library` and what catches its failure make them."""
    from bitsandbytes import cextension

    missing = "No compatible CUDA binary found at /x/libbitsandbytes_cuda140.so\nmore"
    broken = cextension.ErrorHandlerMockBNBNativeLibrary(missing)
    whole = cextension.BNBNativeLibrary.__new__(cextension.CudaBNBNativeLibrary)
    assert bitsandbytes_trouble(torch.device("cpu")) == ""
    for library, says in ((broken, "(No compatible CUDA binary found at /x/libbitsandbytes_cuda140.so)"), (whole, "")):
        monkeypatch.setattr(cextension, "lib", library)
        assert bitsandbytes_trouble(GPU.device).endswith(says)
    monkeypatch.setattr(cextension, "lib", cextension.BNBNativeLibrary(None))
    assert bitsandbytes_trouble(GPU.device).endswith("runs without its GPU build")
    monkeypatch.setattr(cextension, "lib", broken)
    stub_gpu(monkeypatch)
    for spec, key in (
        (sft(Lora(), Quantization()), "quantization"),
        (sft(optimizer="adamw_8bit"), "training.optimizer"),
    ):
        assert keys(examine(spec, executed(spec.training), GPU, None, rows).findings) == [key]
    assert examine(sft(), executed(sft().training), GPU, None, rows).findings == ()


def test_bitsandbytes_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.cextension", None)
    assert bitsandbytes_trouble(torch.device("cpu")).startswith("it can't be imported (ModuleNotFoundError: ")


def test_flash_attention_that_does_not_load_is_a_note():
    machine = Machine(
        **H100, threads=1, cores=1, unloadable=(("flash_attention_2", "ImportError: undefined symbol: x"),)
    )
    (found,) = machine_check.unloadable(machine, GPU)
    assert not found.certain
    assert "doesn't load (ImportError: undefined symbol: x); attention runs on varlen" in str(found)


def test_4_bits_on_apples_gpu_are_refused_whatever_is_allowed(monkeypatch, rows):
    mps = Compute(device=torch.device("mps"), dtype=torch.float32, kernel="sdpa")
    spec = sft(Lora(), Quantization())
    found = examine(spec, executed(spec.training, allow_cpu=True), mps, None, rows).findings
    assert [str(finding).split(";")[0] for finding in found] == ["quantization: 4-bit weights can't be trained on mps"]


def test_nothing_is_loaded_for_a_training_that_is_refused(tmp_path, monkeypatch, rows):
    def load():
        pytest.fail("weights were read")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**10, available=10**10))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0, free=0))
    with pytest.raises(SnaketuneError, match=r"training: needs \d+\.\d GB before .* and this machine has 10\.0 GB"):
        train(tmp_path / "work", rows, spec_of(), load, config=SEVEN)


def test_the_line_says_what_is_trained_on_what_and_its_peak_stands_beside_what_was_expected(tmp_path, rows, capsys):
    model = tiny_model("llama")
    outcome = train(tmp_path / "work", rows, spec_of(gradient_checkpointing=True), lambda: model, config=model.config)
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("model: ")]
    cores = len(os.sched_getaffinity(0))
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    parameters = f"{parameter_count(model) / 1000:.1f}k"
    assert line.startswith(f"model: {parameters} parameters on cpu ({threads} of {cores} core")
    assert ", float32, sdpa, not compiled, micro-batch 2 x 2, activations recomputed, " in line
    assert line.endswith(" GB expected")
    told = outcome.run["expected_memory_gb"]
    assert f"peak memory: {outcome.run['peak_memory_gb']:.2f} GB, {told:.2f} GB expected" in said
    # Of such a small model it is the process itself.
    assert told == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.3)


def line_of(trained: int, **arguments) -> str:
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "world_size": 1} | arguments
    args = SimpleNamespace(gradient_checkpointing=False, **settings)
    trainer = SimpleNamespace(run=SimpleNamespace(compute=GPU), args=args, compiled=True)
    made = pipeline.ReadyTrainer(
        trainer=trainer, about={"kernel": "varlen"}, facts={}, parameters=23_100_000, trainable=trained
    )
    estimated = taken(30_500_000_000, 30_500_000_000)
    return pipeline.describe_training(
        made, machine_check.Fitness(machine=MACHINE, planned=None, estimate=estimated, findings=())
    )


def test_the_line_of_a_gpu():
    assert line_of(23_100_000) == (
        "model: 23.1M parameters on cuda:0 (H100 80GB HBM3), bfloat16, varlen, compiled, micro-batch 16 x 2, 61.0 GB expected"
    )
    assert "23.1M parameters, 512k of them trained, on cuda:0" in line_of(512_000)
    assert "micro-batch 16 x 2 in each of 4 processes, " in line_of(23_100_000, world_size=4)


def test_a_model_that_cannot_be_followed_is_said_to_be_one():
    unknown = machine_check.Fitness(machine=MACHINE, planned=None, estimate=None, findings=())
    assert unknown.expected == "memory unknown (this model's config can't be followed without its weights)"
    certain = machine_check.Fitness(machine=MACHINE, planned=None, estimate=taken(10**9, None), findings=())
    assert certain.expected == "at least 1.00 GB"


def test_the_machine_is_looked_at_and_left_alone():
    machine = look(CPU)
    assert (machine.card, machine.unloadable) == ("", ())
    assert 0 < machine.free <= machine.memory
    assert machine.threads == torch.get_num_threads()


def test_a_gpu_that_others_compute_on_too_is_told(monkeypatch, rows):
    """70 of 85 GB are free, and this process has reserved 2 and CUDA's own share."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 85 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    machine = look(GPU)
    assert machine.others == pytest.approx(13e9, abs=2e9)
    monkeypatch.setattr(machine_check, "look", lambda compute: machine)
    spec = sft()
    [finding] = examine(spec, executed(spec.training), GPU, None, rows).findings
    assert not finding.certain
    assert "other processes hold 11.4 of the 85.0 GB of NVIDIA H100 80GB HBM3" in str(finding)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (82 * 10**9, 85 * 10**9))
    assert look(GPU).others == 0
