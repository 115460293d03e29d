"""SLURM's commands, for the tests of this folder."""

import pytest

from .slurm_commands import SlurmCommands


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return SlurmCommands(tmp_path, monkeypatch)
