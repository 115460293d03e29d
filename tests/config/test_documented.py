"""config/README.md explains every key, with its default; the environments' pins are the lock's."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from snaketune.config import base, corpora, evaluation, runs, tokenizers

ROOT = Path(__file__).parents[2]
# conda-forge's name where it isn't PyPI's.
PYPI_NAMES = {"pytorch": "torch", "python-xxhash": "xxhash"}


def models() -> list[type[BaseModel]]:
    return [
        value
        for module in (corpora, tokenizers, runs, evaluation)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base.Model) and value is not base.Model
    ]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_key_has_a_line_with_its_default_and_meaning(model):
    text = (ROOT / "config/README.md").read_text(encoding="utf-8")
    for name, field in model.model_fields.items():
        lines = [line for line in text.splitlines() if line.startswith(f"| `{field.alias or name}` |")]
        assert lines, f"{model.__name__}.{name} is not explained"
        if isinstance(field.default, str | int | float) and not isinstance(field.default, bool):
            assert any(f"`{field.default}`" in line for line in lines), f"{model.__name__}.{name}: default not given"


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {re.sub("[-_.]+", "-", n).lower(): v for n, v in (line.split("==") for line in lines if "==" in line)}


@pytest.mark.parametrize("name", ["data", "train", "eval"])
def test_environments_pin_what_the_lock_pins(name):
    environment = yaml.safe_load((ROOT / f"envs/{name}.yaml").read_text(encoding="utf-8"))
    extras = re.search(r"flash-attn==([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    pinned = lock() | {"flash-attn": extras}
    *conda, last = environment["dependencies"]
    # What conda-forge doesn't have comes from PyPI, as the last entry; pip itself is there for it.
    pins = [*conda[:-1], *last["pip"]] if isinstance(last, dict) else [*conda, last]
    for dependency in pins:
        package, version = re.split("==?", dependency)
        if package != "python":
            assert version == pinned[PYPI_NAMES.get(package, package).replace("_", "-").lower()], dependency


def test_every_direct_dependency_is_locked():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text[text.index("dependencies = [") : text.index("[project.optional")]
    for package in re.findall(r'^    "([\w-]+)"', block, re.MULTILINE):
        assert package.replace("_", "-").lower() in lock(), package
