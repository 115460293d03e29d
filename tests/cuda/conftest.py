"""CUDA played on the CPU: tensors that say they are on a GPU and hold nothing, and a stand-in for torch's kernel."""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from snaketune.models import kernels, packing_support
from snaketune.models.devices import Compute
from tests.cuda import standin

GPU = torch.device("cuda", 0)
# As a GPU computes, on the CPU by the stand-in.
VARLEN = Compute(device=torch.device("cpu"), dtype=torch.bfloat16, kernel="varlen")


@pytest.fixture
def calls(monkeypatch):
    """The stand-in in the place of torch's kernel; what each call of it was given."""
    monkeypatch.setattr(kernels, "varlen_attn", standin.varlen_attn)
    monkeypatch.setattr(kernels, "ENABLE_GQA", {"enable_gqa": True})
    monkeypatch.setattr(packing_support, "usable_kernels", lambda device, dtype: ["varlen", "sdpa"])
    standin.CALLS.clear()
    return standin.CALLS


@pytest.fixture
def fresh():
    """Nothing is compiled yet, and what a test compiles is forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def guard(tmp_path_factory) -> None:
    """What lets FakeTensorMode have tensors on a GPU that isn't there; compiled once, by g++."""
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
    """A FakeTensorMode to enter, with autocast to bfloat16 and random states that a CPU build doesn't have for CUDA."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake_cuda(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Put parameters and buffers on the GPU that isn't there, tied ones once."""
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
