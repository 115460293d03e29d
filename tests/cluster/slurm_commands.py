"""Commands of SLURM that print what a test says."""

import os
from pathlib import Path

import pytest


class SlurmCommands:
    """Programs in a folder that is first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder / "slurm"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def answer(self, program: str, script: str) -> None:
        """Args: script: of sh, which gets the options of the program."""
        path = self.folder / program
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
