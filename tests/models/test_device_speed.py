"""Peaks are from the table if it has the GPU, else measured; peaks and the probe are measured without side effects."""

from types import SimpleNamespace

import pytest
import torch

from snaketune.engine.model import device_speed
from snaketune.engine.model.device_speed import PEAKS, TERA, known_peak, measured_peak, peak_of, probe
from snaketune.engine.model.devices import Compute
from tests.models.conftest import CPU

# torch's names of GPUs.
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307.4,
}
OTHERS = [
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "Orin",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_common_gpus_are_known_by_torchs_names(name):
    assert known_peak(name, "bfloat16") == known_peak(name, "float16") == NAMES[name] * TERA


@pytest.mark.parametrize("name", OTHERS)
def test_a_gpu_with_a_similar_name_is_unknown(name):
    assert known_peak(name, "bfloat16") is None


def test_gpus_without_bfloat16_have_no_peak_in_it():
    for name, half in (("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("Tesla V100-PCIE-32GB", 112)):
        assert known_peak(name, "bfloat16") is None
        assert known_peak(name, "float16") == half * TERA


def test_wider_data_types_are_never_faster():
    """All figures of a row are dense, or all are doubled: 16 bits are twice as fast as TF32 everywhere."""
    for names, (half, tf32, single) in PEAKS.items():
        assert not tf32 or 1.95 < half / tf32 < 2.05, names
        assert (tf32 or half) >= single, names


def test_a_known_gpu_uses_its_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(device_speed, "measured_peak", lambda *_: pytest.fail("measured"))
    card = Compute(device=torch.device("cuda"), dtype=torch.bfloat16, kernel="varlen")
    assert peak_of(card).flops_per_second == 362e12
    assert peak_of(card).source == "data sheet of NVIDIA L40S, dense bfloat16"
    single = Compute(device=torch.device("cuda"), dtype=torch.float32, kernel="sdpa")
    assert peak_of(single).flops_per_second == 91.6e12
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert peak_of(single).flops_per_second == 183e12


def test_unknown_devices_are_measured_without_drawing_random_numbers():
    measured_peak.cache_clear()
    before = torch.random.get_rng_state()
    peak = peak_of(CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    threads = torch.get_num_threads()
    assert peak.source == f"measured matrix product, float32, {threads} thread{'s' if threads > 1 else ''}"
    assert peak.flops_per_second > 1e8
    assert peak_of(CPU) is peak


def test_a_probe_uses_one_thread_and_changes_nothing(tmp_path):
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        actual = probe(torch.device("cpu"), tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert all(value > 0 for value in actual.values())
    assert torch.equal(torch.random.get_rng_state(), state) and not list(tmp_path.iterdir())
