"""A training that doesn't fit its machine is refused before anything is loaded; a possible problem is a warning."""

import os
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig

from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora, Quantization
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Training
from snaketune.engine.features import Options
from snaketune.engine.model import machine
from snaketune.engine.model.device_speed import Peak
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.machine import Machine, bitsandbytes_error, inspect_machine
from snaketune.engine.model.parameters import parameter_count
from snaketune.errors import SnaketuneError
from snaketune.models import traced_model
from snaketune.models.memory import Estimate
from snaketune.stages.findings import Finding, report_findings
from snaketune.stages.host.gpus import gpu_findings
from snaketune.stages.specs import CalibrateSpec, RefLogpsSpec, SftSpec
from snaketune.training import pipeline
from snaketune.training.autotune import machine_check
from snaketune.training.autotune.machine_check import check_machine, duration_findings, memory_findings, sharing_mode
from tests.models.conftest import CPU, tiny_model

from .pipeline_runs import pack, train
from .pipeline_runs import spec as spec_of

GPU = Compute(device=torch.device("cuda", 0), dtype=torch.bfloat16, kernel="varlen")
H100 = {"device": GPU.device, "gpu": "NVIDIA H100 80GB HBM3", "memory": 85 * 10**9, "free": 84 * 10**9}
MACHINE = Machine(**H100, threads=1, cores=2)
# The size of Llama 2 7B in fewer layers.
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
    """Execution settings that refuse the CPU unless `allow_cpu` is given."""
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
def test_gpu_settings_are_refused_without_a_gpu_unless_the_cpu_is_allowed(spec, operation, expected):
    findings = gpu_findings(spec, Execution(**operation))
    assert keys(findings) == expected
    assert all(finding.certain and "operation.allow_cpu: true" in finding.do for finding in findings)
    assert gpu_findings(spec, Execution(**operation, allow_cpu=True)) == []


def test_a_calibration_and_a_reference_need_what_their_run_needs():
    run = sft(Lora(), Quantization())
    calibration = CalibrateSpec.model_construct(run=run)
    reference = RefLogpsSpec.model_construct(quantization=Quantization())
    assert (
        keys(gpu_findings(calibration, Execution())) == keys(gpu_findings(reference, Execution())) == ["quantization"]
    )


def test_certain_findings_stop_in_one_error_and_others_are_printed(capsys):
    sure, doubt = (Finding(key=str(n), problem="f", do="d", certain=certain) for n, certain in ((1, True), (2, False)))
    report_findings([doubt])
    assert capsys.readouterr().out == "note: 2: f; d\n"
    report_findings([doubt], log=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(SnaketuneError, match=r"1: f; d\n +1: f; d"):
        report_findings([sure, doubt, sure])


def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch, rows):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    findings = check_machine(sft(), executed(sft().training), CPU, None, rows).findings
    assert [(finding.key, finding.certain) for finding in findings] == [("operation.gpus", True)]
    assert f"torch {torch.__version__}" in findings[0].problem
    for operation in ({"allow_cpu": True}, {"gpus": 0}):
        assert not check_machine(sft(), executed(sft().training, **operation), CPU, None, rows).findings


def stub_gpu(monkeypatch, name: str = "NVIDIA A10", memory: int = 24 * 10**9) -> None:
    """Patch torch to report a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (memory - 10**9, memory))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))


def test_seven_billion_parameters_in_full_do_not_fit_a_card_of_24_gb(monkeypatch, rows):
    stub_gpu(monkeypatch)
    operation = executed(sft().training)
    (finding,) = check_machine(sft(), operation, GPU, SEVEN, rows).findings
    gb = NUMBERS / 1e9
    # Weights and gradients of 4 bytes, states of 8.
    assert f"needs {16 * gb:.1f} GB without any activations (weights {4 * gb:.2f} GB, " in finding.problem
    assert f"optimizer states {8 * gb:.2f} GB" in finding.problem
    assert "NVIDIA A10 has 24.0 GB" in finding.problem
    assert finding.certain
    for way in ("`lora`", "quantization", "paged_adamw_8bit", "fsdp"):
        assert way in finding.do
    adapted = sft(Lora(), optimizer="adamw_torch")
    looked = check_machine(adapted, operation, GPU, SEVEN, rows)
    assert (looked.findings, str(looked.machine)) == ((), "cuda:0 (A10, 22GB)")
    shared = check_machine(sft(), executed(sft().training, gpus=8, launch="fsdp"), GPU, SEVEN, rows)
    assert not any(finding.certain for finding in shared.findings)


@pytest.mark.parametrize(
    ("launch", "sharing"),
    [
        ({}, "ddp"), ({"gpus": 2}, "ddp"), ({"launch": "fsdp"}, "fsdp"), ({"launch": "deepspeed"}, "zero2"),
        ({"launch": "deepspeed", "zero_stage": 3}, "zero3"),
    ],
)  # fmt: skip
def test_processes_share_as_they_are_launched(launch, sharing):
    assert sharing_mode(Execution(**launch)) == sharing


def taken(least: int, computing: int | None) -> Estimate:
    return Estimate(already_used=0, weights=least, gradients=0, states=0, paged=0, step=computing)


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
def test_too_little_memory_is_refused_and_possibly_too_little_a_warning(estimate, here, certain):
    assert [finding.certain for finding in memory_findings(estimate, MACHINE, sft(), 1, here)] == certain


def test_trainings_of_days_on_a_cpu_are_refused_by_its_measured_peak(monkeypatch, rows):
    slow = Peak(flops_per_second=1e11, source="measured matrix product, float32, 2 threads")
    assert list(duration_findings(2 * 86400 * 0.5e11, 1, slow)) == []
    assert list(duration_findings(4 * 86400 * 0.5e11, 2, slow)) == []
    (finding,) = duration_findings(30 * 86400 * 0.5e11, 1, slow)
    assert "would take 30 days at best" in finding.problem
    assert "100 GFLOP/s of a measured matrix product, float32, 2 threads" in finding.problem
    # Seven billion parameters, 616 tokens, ten thousand epochs; of few, nothing is measured.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**12, available=10**12))
    monkeypatch.setattr(machine, "host_memory_limit", lambda: 10**12)
    monkeypatch.setattr(machine_check, "peak_of", lambda compute: slow)
    long = sft(epochs=10_000)
    assert keys(check_machine(long, executed(long.training), CPU, SEVEN, rows).findings) == ["operation"]
    assert not check_machine(long, executed(long.training, allow_cpu=True), CPU, SEVEN, rows).findings
    monkeypatch.setattr(machine_check, "peak_of", lambda compute: pytest.fail("measured"))
    assert not check_machine(sft(), executed(long.training), CPU, SEVEN, rows).findings


def test_bitsandbytes_without_a_gpu_build_is_recognized(monkeypatch, rows):
    """Its own classes, as `get_native_library` and what catches its failure make them."""
    from bitsandbytes import cextension

    missing = "No compatible CUDA binary found at /x/libbitsandbytes_cuda140.so\nmore"
    broken = cextension.ErrorHandlerMockBNBNativeLibrary(missing)
    whole = cextension.BNBNativeLibrary.__new__(cextension.CudaBNBNativeLibrary)
    assert bitsandbytes_error(torch.device("cpu")) == ""
    for library, message in (
        (broken, "(No compatible CUDA binary found at /x/libbitsandbytes_cuda140.so)"),
        (whole, ""),
    ):
        monkeypatch.setattr(cextension, "lib", library)
        assert bitsandbytes_error(GPU.device).endswith(message)
    monkeypatch.setattr(cextension, "lib", cextension.BNBNativeLibrary(None))
    assert bitsandbytes_error(GPU.device).endswith("runs without its GPU build")
    monkeypatch.setattr(cextension, "lib", broken)
    stub_gpu(monkeypatch)
    for spec, key in (
        (sft(Lora(), Quantization()), "quantization"),
        (sft(optimizer="adamw_8bit"), "training.optimizer"),
    ):
        assert keys(check_machine(spec, executed(spec.training), GPU, None, rows).findings) == [key]
    assert check_machine(sft(), executed(sft().training), GPU, None, rows).findings == ()


def test_bitsandbytes_that_cannot_be_imported_is_reported(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.cextension", None)
    assert bitsandbytes_error(torch.device("cpu")).startswith("it can't be imported (ModuleNotFoundError: ")


def test_flash_attention_that_fails_to_load_is_a_warning():
    machine = Machine(
        **H100, threads=1, cores=1, broken_kernels=(("flash_attention_2", "ImportError: undefined symbol: x"),)
    )
    (finding,) = machine_check.library_findings(sft(), GPU, machine)
    assert not finding.certain
    assert "fails to load (ImportError: undefined symbol: x); attention uses varlen instead" in str(finding)


def test_4_bit_weights_on_mps_are_always_refused(monkeypatch, rows):
    mps = Compute(device=torch.device("mps"), dtype=torch.float32, kernel="sdpa")
    spec = sft(Lora(), Quantization())
    findings = check_machine(spec, executed(spec.training, allow_cpu=True), mps, None, rows).findings
    assert [str(finding).split(";")[0] for finding in findings] == [
        "quantization: 4-bit weights can't be trained on mps"
    ]


def test_a_refused_training_loads_nothing(tmp_path, monkeypatch, rows):
    def load():
        pytest.fail("weights were read")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**10, available=10**10))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0, free=0))
    needs = r"training: needs \d+\.\d GB without any activations .* and this machine has 10\.0 GB"
    with pytest.raises(SnaketuneError, match=needs):
        train(tmp_path / "work", rows, spec_of(), load, config=SEVEN)


def test_the_first_log_line_and_the_peak_memory_with_the_expected_one(tmp_path, rows, capsys, monkeypatch):
    # Activations too, which other trainings here don't trace.
    monkeypatch.setattr(machine_check, "trace_model", traced_model.trace_model)
    model = tiny_model("llama")
    outcome = train(tmp_path / "work", rows, spec_of(gradient_checkpointing=True), lambda: model, config=model.config)
    log = capsys.readouterr().out
    (line,) = [line for line in log.splitlines() if line.startswith("model: ")]
    cores = len(os.sched_getaffinity(0))
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    parameters = f"{parameter_count(model) / 1000:.1f}k"
    assert line.startswith(f"model: {parameters} parameters on cpu ({threads} of {cores} core")
    assert ", float32, sdpa, not compiled, micro-batch 2 x 2, activations recomputed, " in line
    assert line.endswith(" GB expected")
    expected_gb = outcome.run["expected_memory_gb"]
    (printed,) = re.findall(
        rf"^peak memory: {outcome.run['peak_memory_gb']:.2f} GB, ([\d.]+) GB expected$", log, re.MULTILINE
    )
    # Both are rounded, to two and to three decimals.
    assert abs(float(printed) - expected_gb) < 0.0056
    # For such a small model, nearly all memory is that of the process itself.
    assert expected_gb == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.3)


def line_of(trained: int, offloads: bool = False, **arguments) -> str:
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "world_size": 1} | arguments
    args = SimpleNamespace(gradient_checkpointing=False, **settings)
    loaded = pipeline.LoadedModel(about={"kernel": "varlen"}, run={}, parameters=23_100_000, trainable=trained)
    made = SimpleNamespace(compute=GPU, options=Options(offload=offloads), args=args, compiled=True)
    estimated = taken(30_500_000_000, 30_500_000_000)
    return pipeline.describe_training(
        made, loaded, machine_check.MachineCheck(machine=MACHINE, planned=None, estimate=estimated, findings=())
    )


def test_the_line_of_a_gpu():
    assert line_of(23_100_000) == (
        "model: 23.1M parameters on cuda:0 (H100 80GB HBM3), bfloat16, varlen, compiled, micro-batch 16 x 2, 61.0 GB expected"
    )
    assert "23.1M parameters, 512k of them trained, on cuda:0" in line_of(512_000)
    assert ", micro-batch 16 x 2, activations offloaded, 61.0 GB" in line_of(23_100_000, offloads=True)
    assert "micro-batch 16 x 2 in each of 4 processes, " in line_of(23_100_000, world_size=4)


def test_unknown_memory_is_reported_as_such():
    unknown = machine_check.MachineCheck(machine=MACHINE, planned=None, estimate=None, findings=())
    assert unknown.expected == "memory unknown (this model can't be built from its config without weights)"
    certain = machine_check.MachineCheck(machine=MACHINE, planned=None, estimate=taken(10**9, None), findings=())
    assert certain.expected == "at least 1.00 GB"


def test_properties_of_the_machine():
    machine = inspect_machine(CPU)
    assert (machine.gpu, machine.broken_kernels) == ("", ())
    assert 0 < machine.free <= machine.memory
    assert machine.threads == torch.get_num_threads()


def test_a_shared_gpu_is_reported(monkeypatch, rows):
    """70 of 85 GB are free, and this process has reserved 2 and CUDA's own share."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 85 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    machine = inspect_machine(GPU)
    assert machine.used_by_others == pytest.approx(13e9, abs=2e9)
    monkeypatch.setattr(machine_check, "inspect_machine", lambda compute: machine)
    spec = sft()
    [finding] = check_machine(spec, executed(spec.training), GPU, None, rows).findings
    assert not finding.certain
    assert "other processes use 11.4 of the 85.0 GB of NVIDIA H100 80GB HBM3" in str(finding)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (82 * 10**9, 85 * 10**9))
    assert inspect_machine(GPU).used_by_others == 0
