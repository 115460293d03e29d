"""Programs in the place of SLURM's."""

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

    def say(self, program: str, text: str) -> None:
        """Let the program print a text, whatever its options."""
        (self.folder / f"{program}.txt").write_text(text, encoding="utf-8")
        self.answer(program, f"cat {self.folder}/{program}.txt")

    def fail(self, *programs: str) -> None:
        for program in programs:
            self.answer(program, "exit 1")
