"""CUDA without a GPU: fake tensors on a CUDA device, and a CPU stand-in for torch's varlen kernel."""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from snaketune.engine.model import kernels, packing_support, varlen_sinks
from snaketune.engine.model.devices import Compute
from tests.cuda import standin

# Fixtures for each test here too.
from tests.training.conftest import machine_measured_once, probed  # noqa: F401

GPU = torch.device("cuda", 0)
# A GPU's data type and kernel, computed on the CPU by the stand-in.
VARLEN = Compute(device=torch.device("cpu"), dtype=torch.bfloat16, kernel="varlen")


@pytest.fixture
def calls(monkeypatch):
    """Replace torch's kernel by the stand-in; return the recorded arguments of its calls."""
    monkeypatch.setattr(kernels, "varlen_attn", standin.varlen_attn)
    monkeypatch.setattr(varlen_sinks, "varlen_forward", standin.varlen_forward_of_sinks)
    monkeypatch.setattr(varlen_sinks, "varlen_backward", standin.varlen_backward_of_sinks)
    monkeypatch.setattr(kernels, "ENABLE_GQA", {"enable_gqa": True})
    monkeypatch.setattr(packing_support, "usable_kernels", lambda device, dtype: ["varlen", "sdpa"])
    standin.CALLS.clear()
    return standin.CALLS


@pytest.fixture
def fresh():
    """Reset torch.compile before and after a test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def guard(tmp_path_factory) -> None:
    """A library that makes torch accept fake CUDA tensors without a GPU; compiled once with g++."""
    if torch.cuda.is_available():
        return
    compiler = shutil.which("g++")
    assert compiler, "these tests need g++ (Debian: apt-get install g++), as torch.compile does"
    torch_folder = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    command = [
        *(compiler, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"),
        *(str(Path(__file__).with_name("guard.cpp")), "-lc10", f"-Wl,-rpath,{torch_folder}/lib", "-o", str(library)),
    ]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library)).pretend_cuda()


@pytest.fixture
def fake_cuda(guard, monkeypatch):
    """A FakeTensorMode, with CUDA's autocast to bfloat16 and random states, which a CPU build of torch lacks."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake_cuda(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake ones on a CUDA device; tied ones stay tied."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    fake = mode.fake_tensor_converter.from_meta_and_device(mode, tensor.detach().to("meta"), GPU)
                    trained = isinstance(tensor, torch.nn.Parameter)
                    moved[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if trained else fake
                own[name] = moved[tensor]
