"""A probe tells machines apart, and leaves a training as it was."""

import torch

from snaketune.models.probe import probe


def test_a_probe_is_of_one_thread_and_changes_nothing(tmp_path):
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        found = probe(torch.device("cpu"), tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert all(value > 0 for value in found.values())
    assert torch.equal(torch.random.get_rng_state(), state) and not list(tmp_path.iterdir())
