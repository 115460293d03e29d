"""A speed probe measures a machine and doesn't affect a training."""

import torch

from snaketune.models.speed_probe import probe, processor


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


def test_the_processor_is_named_as_by_linux(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: other\n")
    assert processor(table) == "AMD EPYC 9654 96-Core Processor"
    # Linux on ARM doesn't name it, and other systems have no such file.
    table.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert processor(table) == "" == processor(tmp_path / "none")
