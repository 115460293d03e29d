"""The packages of environments and image: each channel has the pinned versions, which are those of the lock file."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from envs import check_pins
from packaging.requirements import Requirement

from snaketune.stages.cache.code_digest import PACKAGE_FOLDER
from snaketune.stages.table import STAGES

from .conftest import ROOT

# conda-forge's name where it isn't PyPI's.
PYPI_NAMES = {"pytorch": "torch", "python-xxhash": "xxhash"}
ENVIRONMENTS = sorted((ROOT / "envs").glob("*.yaml"))


def write_channel(folder: Path, **instead: str) -> Path:
    """The index of a channel that has just what the environments pin; some packages in another version instead."""
    pins = dict(pin.split("=") for file in ENVIRONMENTS for pin in check_pins.conda_pins(file)) | instead
    python = pins.pop("python")
    noarch = {"jinja2", "ftfy", "datasets"}
    for subdir in check_pins.SUBDIRS:
        built = [] if subdir == "noarch" else [f"python_abi {python}.* *_cp{python.replace('.', '')}"]
        listed = {
            f"{name}-{version}-0.conda": {"name": name, "version": version, "depends": ["python >=3.11", *built]}
            for name, version in pins.items()
            if (name in noarch) == (subdir == "noarch")
        }
        if subdir != "noarch":
            listed["python.conda"] = {"name": "python", "version": f"{python}.14", "depends": []}
        (folder / subdir).mkdir(parents=True)
        index = {"packages": {}, "packages.conda": listed}
        (folder / subdir / "repodata.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def check(index: Path | str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, ROOT / "envs/check_pins.py", index], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_channel_that_lacks_a_pin_is_detected(tmp_path):
    assert check(write_channel(tmp_path / "whole")) == (0, "")
    status, said = check(write_channel(tmp_path / "other", trl="1.15.0"))
    assert status == 1
    assert re.fullmatch(r"envs/train.yaml: trl=[\d.]+ is not in \S+/other\n", said)


def test_a_build_for_another_python_is_none(tmp_path):
    index = write_channel(tmp_path / "channel")
    file = index / "linux-64/repodata.json"
    file.write_text(file.read_text(encoding="utf-8").replace("python_abi 3.11.* *_cp311", "python_abi 3.9.* *_cp39"))
    assert "regex" in check(index)[1]
    assert "jinja2" not in check(index)[1]


@pytest.mark.skipif("CONDA_CHANNEL_INDEX" not in os.environ, reason="CONDA_CHANNEL_INDEX names no channel")
def test_the_channel_has_what_the_environments_pin():
    status, said = check(os.environ["CONDA_CHANNEL_INDEX"])
    assert status == 0, said


def test_the_image_has_the_lock_and_nothing_else_of_python():
    lines = (ROOT / "envs/Containerfile").read_text(encoding="utf-8")
    said = "\n".join(line for line in lines.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    instructions = re.findall(r"^([A-Z]+) +(.*(?:\n +.*)*)", said, re.MULTILINE)
    by_name = {name: [text for other, text in instructions if other == name] for name, _ in instructions}
    (base,) = by_name["FROM"]
    minor = {pin for file in ENVIRONMENTS for pin in check_pins.conda_pins(file) if pin.startswith("python=")}
    assert minor == {f"python={re.fullmatch(r'python:(3.[0-9]+)-slim-bookworm', base)[1]}"}
    assert by_name["COPY"] == ["requirements.lock /opt/snaketune/"]
    installs = [command for run in by_name["RUN"] for command in run.split("&&") if "pip install" in command]
    assert [command.split()[-1].strip('"') for command in installs] == [
        "/opt/snaketune/requirements.lock)",
        "/opt/snaketune/requirements.lock",
    ]
    assert "grep '^torch=='" in installs[0]
    # torch's own index if configured, otherwise pip's.
    assert "https://" not in said
    assert by_name["ARG"] == ["TORCH_INDEX="]
    assert "--index-url" in installs[0] and "index" not in installs[1]
    assert by_name["USER"] == ["1000"]


def test_torch_is_one_line_of_the_lock():
    assert len(re.findall("^torch==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)) == 1


# Used where they are, and done without elsewhere; the trainings' environment has what of them conda-forge has. Only planning
# and the corpus stage read from web servers, with aiohttp, which s3fs brings.
OPTIONAL = {"deepspeed", "flash_attn", "aiohttp"}
# The packages that every stage needs.
RUN = "snaketune.stages.run"


@cache
def imports_of(module: str) -> list[str]:
    """All that a module imports, also inside functions."""
    return list(imports_in(module))


def imports_in(module: str) -> Iterator[str]:
    path = PACKAGE_FOLDER.parent.joinpath(*module.split("."))
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def imported_packages(*entries: str) -> set[str]:
    """The packages that modules import, and that what they import of this one does."""
    reached, packages, waiting = set(), set(), list(entries)
    while waiting:
        module = waiting.pop()
        if module.split(".")[0] != "snaketune":
            packages.add(module.split(".")[0])
        elif module not in reached:
            reached.add(module)
            waiting += [*imports_of(module), *filter(None, [module.rpartition(".")[0]])]
    return packages - sys.stdlib_module_names


installed_as = cache(packages_distributions)


def plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def brought_by(names: set[str]) -> set[str]:
    """Distributions with all that they require, as installed here."""
    brought, waiting = set(), list(names)
    while waiting:
        name = plain(waiting.pop())
        if name not in brought:
            brought.add(name)
            needed = [Requirement(line) for line in requires(name) or ()]
            waiting += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
    return brought


@pytest.mark.parametrize("stage", list(STAGES))
def test_an_environment_brings_what_its_stages_import(stage):
    rule = (ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8")
    (file,) = (ROOT / "workflow/rules" / path for path in re.findall(r"\.\./\.\./envs/\w+\.yaml", rule))
    *pins, last = yaml.safe_load(file.read_text(encoding="utf-8"))["dependencies"]
    named = {re.split("=+", pin)[0] for pin in [*pins, *(last["pip"] if isinstance(last, dict) else [last])]}
    here = brought_by({PYPI_NAMES.get(name, name) for name in named} - {"python", "pip", "flash-attn"})
    for package in imported_packages(STAGES[stage].module, RUN) - OPTIONAL:
        assert here & {plain(name) for name in installed_as()[package]}, f"{package} is not in {file.name}"
