"""The commands of AGENTS.md run as they stand there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from snaketune.__main__ import main
from tests.workflow.command_line import snakemake

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")


@pytest.mark.workflow
def test_its_commands_run(tmp_path, monkeypatch):
    for name in ("Snakefile", "workflow", "resources", "envs", "profiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    commands = [
        line.strip() for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
    ]
    commands = [command for command in commands if command]
    assert len(commands) == 4
    for command in commands:
        program, *words = shlex.split(command)
        if program == "snakemake":
            status, output = snakemake(words, tmp_path)
            assert status == 0, output
            assert "sft" in output
        else:
            assert words[:2] == ["-m", "snaketune"]
            assert main(words[2:]) == 0, command


def test_files_that_it_names_exist():
    for path in re.findall(r"`((?:config|docs|resources)/[\w./-]*)`", TEXT):
        assert (ROOT / path).exists(), path
