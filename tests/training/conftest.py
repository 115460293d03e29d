"""Fixtures: a small tokenizer, trained once; reference passes in small steps; deepspeed, even if it isn't installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import memory

from snaketune.artifacts.manifest import Artifact
from snaketune.engine import throughput
from snaketune.engine.model import logprobs, selftest
from snaketune.engine.model.device_speed import Peak, probe
from snaketune.training import pipeline
from snaketune.training.autotune import machine_check
from snaketune.training.reference import kept_units
from tests.models.conftest import CPU
from tests.tokenization.small_tokenizers import tokenizer_artifact
from tests.workflow.conftest import made_once

from . import checked_once

ROOT = Path(__file__).parents[2]
# Packages that deepspeed needs and snaketune doesn't.
PEAK = Peak(flops_per_second=1e11, source="measured matrix product, float32, 1 thread")
WITH = ("hjson", "py-cpuinfo", "ninja", "msgpack", "einops")


@pytest.fixture(scope="session")
def probed(tmp_path_factory) -> dict[str, float]:
    return probe(CPU.device, tmp_path_factory.mktemp("probe"))


@pytest.fixture(autouse=True)
def machine_measured_once(monkeypatch, probed):
    """For hundreds of trainings; `tests/models` measures machines, models and their memory."""
    monkeypatch.setattr(pipeline, "probe", lambda device, state: probed)
    # Without units for bfloat16, its matrix products alone take eight seconds.
    monkeypatch.setattr(throughput, "peak_of", lambda compute: PEAK)
    # Each training searches for garbage twice.
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: 0))
    monkeypatch.setattr(machine_check, "trace_model", checked_once.trace_model)


@pytest.fixture(autouse=True)
def models_tested_once(monkeypatch):
    """`tests/models` tests the self-test."""
    monkeypatch.setattr(selftest, "check_kernel", checked_once.check_kernel)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def with_deepspeed(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that has deepspeed: installed, or from PyPI into a folder of the tests."""
    if importlib.util.find_spec("deepspeed"):
        return dict(os.environ)
    wanted = re.search(r'"(deepspeed==[\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]

    def install(folder: Path) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(folder),
        ]
        subprocess.run([*pip, wanted, *WITH], check=True)

    folder = made_once(tmp_path_factory, "deepspeed", install)
    return os.environ | {"PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(folder)))}


@pytest.fixture
def small_steps(monkeypatch):
    """Reference passes of one row per batch, stored immediately."""
    monkeypatch.setattr(logprobs, "FORWARD_TOKENS_ELSEWHERE", 1)
    monkeypatch.setattr(kept_units, "SECONDS_BETWEEN_FILES", 0.0)
