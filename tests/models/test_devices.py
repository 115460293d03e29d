"""Device, data type and kernel of a process."""

import os
import sys

import pytest
import torch
from transformers import LlamaConfig

from snaketune.engine.model import attention
from snaketune.engine.model.devices import Compute, deterministic_algorithms, resolve_compute, use_threads
from snaketune.engine.model.machine import inspect_machine, processor
from snaketune.errors import SnaketuneError

from .conftest import CPU


@pytest.mark.parametrize(
    ("precision", "has_matrix_units", "dtype", "of_training"),
    [
        ("auto", True, "float32", "medium"),
        ("auto", False, "float32", "highest"),
        ("float32", True, "float32", "highest"),
        ("bfloat16", True, "bfloat16", "highest"),
    ],
)
def test_a_cpu_computes_in_float32_by_default_and_trains_in_bfloat16_where_it_has_units_for_it(
    monkeypatch, precision, has_matrix_units, dtype, of_training
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": has_matrix_units})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    compute, trained = resolve_compute(precision), resolve_compute(precision, training=True)
    assert compute.device.type == "cpu"
    assert trained.about().get("matmul_precision", "highest") == of_training == trained.matmul_precision
    assert compute.about() == {"dtype": dtype, "kernel": "sdpa"}
    with pytest.raises(ValueError), trained.training_precision():
        assert torch.get_float32_matmul_precision() == of_training
        raise ValueError
    assert torch.get_float32_matmul_precision() == "highest"


def gpu(monkeypatch, capability: int, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)


@pytest.mark.parametrize(
    ("capability", "installed", "precision", "kernel"),
    [
        (9, {"2", "4"}, "auto", "flash_attention_4"),
        (9, {"2"}, "auto", "flash_attention_2"),
        (8, {"2", "4"}, "auto", "flash_attention_2"),
        (8, set(), "auto", "varlen"),
        (9, {"2", "4"}, "float32", "sdpa"),
    ],
)
def test_the_fastest_usable_kernel_is_chosen(monkeypatch, capability, installed, precision, kernel):
    gpu(monkeypatch, capability, has_bf16=True)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: "2" in installed)
    monkeypatch.setattr(attention, "is_flash_attn_4_available", lambda: "4" in installed)
    monkeypatch.setattr(attention, "load_error", lambda kernel: "")
    compute = resolve_compute(precision)
    assert (compute.device, compute.kernel) == (torch.device("cuda", 0), kernel)
    assert compute.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Install fake flash-attn packages with these module contents."""

    def install(code: str, cute: str | None = None) -> None:
        folder = tmp_path / "flash_attn"
        folder.mkdir()
        (folder / "__init__.py").write_text(code)
        if cute is not None:
            (folder / "cute.py").write_text(cute)
        monkeypatch.syspath_prepend(tmp_path)

    attention.load_error.cache_clear()
    yield install
    attention.load_error.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


UNDEFINED = (
    "raise ImportError('flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
    "_ZN3c105ErrorC2ENS_14SourceLocationE\\nmore')"
)
WHOLE = "flash_attn_varlen_func = print"


@pytest.mark.parametrize(
    ("code", "cute", "kernel", "broken_names"),
    [
        (UNDEFINED, None, "varlen", ["flash_attention_2"]),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", None, "varlen", ["flash_attention_2"]),
        ("# An older one.", None, "varlen", ["flash_attention_2"]),
        (WHOLE, UNDEFINED, "flash_attention_2", ["flash_attention_4"]),
        (WHOLE, WHOLE, "flash_attention_4", []),
    ],
)
def test_a_kernel_that_fails_to_load_is_reported_and_the_next_one_is_used(
    monkeypatch, packages, code, cute, kernel, broken_names
):
    packages(code, cute)
    gpu(monkeypatch, 9, has_bf16=True)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(attention, "is_flash_attn_4_available", lambda: cute is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 85 * 10**9))
    compute = resolve_compute("auto")
    assert compute.kernel == kernel
    broken = inspect_machine(compute).broken_kernels
    assert [name for name, _ in broken] == broken_names
    if UNDEFINED in (code, cute):
        assert broken[0][1].startswith("ImportError: flash_attn_2_cuda") and broken[0][1].endswith("LocationE")


def test_a_gpu_without_bfloat16_uses_float32_and_refuses_bfloat16(monkeypatch):
    gpu(monkeypatch, 7, has_bf16=False)
    assert resolve_compute("auto").about() == {"dtype": "float32", "kernel": "sdpa"}
    with pytest.raises(
        SnaketuneError,
        match=r"training\.precision: bfloat16 needs a GPU of compute capability 8\.0 or higher, and Tesla T4 has 7\.5; "
        "expected `float32`, or `auto`",
    ):
        resolve_compute("bfloat16")


def test_frozen_weights_are_in_the_compute_data_type_and_trained_ones_in_float32():
    half = Compute(device=torch.device("cpu"), dtype=torch.bfloat16, kernel="sdpa")
    assert half.weights_dtype(frozen=True) == torch.bfloat16
    assert half.weights_dtype(frozen=False) == CPU.weights_dtype(frozen=True) == torch.float32


def test_autocast_runs_matmuls_in_the_compute_data_type():
    weights = torch.ones(2, 2)
    with Compute(device=torch.device("cpu"), dtype=torch.bfloat16, kernel="sdpa").autocast():
        assert (weights @ weights).dtype == torch.bfloat16
    with CPU.autocast():
        assert (weights @ weights).dtype == torch.float32


def test_small_models_use_one_thread():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        use_threads(LlamaConfig(hidden_size=256), CPU)
        assert torch.get_num_threads() == 2
        use_threads(LlamaConfig(hidden_size=128), CPU)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_deterministic_algorithms_are_on_inside_the_context_only(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_an_operation_without_a_deterministic_kernel_is_reported_with_the_key():
    with (
        pytest.raises(
            SnaketuneError,
            match=r"^training\.deterministic: put_ does not have a deterministic implementation; expected `false`",
        ),
        deterministic_algorithms(True),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="another"), deterministic_algorithms(True):
        raise RuntimeError("another")
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_processor_is_named_as_by_linux(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: other\n")
    assert processor(table) == "AMD EPYC 9654 96-Core Processor"
    # Linux on ARM doesn't name it, and other systems have no such file.
    unnamed = tmp_path / "unnamed"
    unnamed.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert processor(unnamed) == "" == processor(tmp_path / "none")
