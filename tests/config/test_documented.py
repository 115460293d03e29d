"""docs/config explains every key, with its default; the environments' pins are the lock's."""

import doctest
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from snaketune.config import (
    base,
    base_models,
    corpora,
    corpus_sources,
    doctor,
    evaluations,
    generation,
    held_out,
    lora,
    losses,
    operation,
    round_keys,
    sampling,
    scoring,
    teachers,
    tokenizers,
    tracking,
    training_runs,
    verify,
    workflow,
)
from snaketune.config.load import load
from snaketune.corpus.layouts.table import LAYOUTS

from .edits import generated

ROOT = Path(__file__).parents[2]
# conda-forge's name where it isn't PyPI's.
PYPI_NAMES = {"pytorch": "torch", "python-xxhash": "xxhash"}


def models() -> set[str]:
    return {
        name
        for module in (
            corpora,
            corpus_sources,
            tokenizers,
            training_runs,
            base_models,
            lora,
            losses,
            operation,
            round_keys,
            held_out,
            doctor,
            verify,
            evaluations,
            generation,
            sampling,
            scoring,
            teachers,
            tracking,
            workflow,
        )
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base.Model)
        # Parts of others, and what no config holds.
        and value
        not in (
            base.Model,
            corpora.CorpusContent,
            held_out.Selection,
            training_runs.Learning,
            training_runs.Optimization,
            losses.PreferenceLoss,
            operation.Execution,
            generation.Decoding,
            generation.EngineChoice,
            evaluations.TaskSettings,
            sampling.Responses,
            scoring.Scoring,
        )
    }


def reference() -> str:
    """All pages, one after the other."""
    return "\n".join(page.read_text(encoding="utf-8") for page in generated.PAGES)


def test_the_tables_of_keys_are_what_the_models_say():
    pages = [page.read_text(encoding="utf-8") for page in generated.PAGES]
    assert pages == [generated.with_tables(page) for page in pages], "write them again: make docs"
    text = reference()
    assert set(re.findall(r"<!-- keys: (\w+)", text)) == models()
    # A model in several tables is in them as a whole.
    for name in ("Dpo",):
        shown = re.findall(rf"<!-- keys: {name}((?: \w+)*) -->", text)
        keys = [key for keys in shown for key in keys.split()]
        assert sorted(keys) == sorted(field.alias or key for key, field in training_runs.Dpo.model_fields.items())
    # Every key has a value, a default and a meaning.
    tables = re.findall(r"<!-- keys: .* -->\n\n((?:\|.*\n)+)", text)
    rows = [line for table in tables for line in table.splitlines()[2:]]
    assert len(rows) > 100
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").replace("\\|", "").split("|")), row


def test_every_layout_has_a_reader_and_a_line():
    """Documents have a module of their own."""
    assert {*get_args(corpus_sources.Layout)} == {"auto", *LAYOUTS}
    text = reference()
    assert {*re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)} >= {*LAYOUTS}


def test_a_table_says_what_a_key_takes_and_what_it_is_without_it():
    marked = "<!-- keys: Training -->\n\n| old |\n\nAfter."
    text = generated.with_tables(marked)
    assert "| `batch_rows` | integer | `32` | Rows per optimizer step" in text
    assert "| `learning_rate` | number | required |" in text
    assert "| `precision` | `auto` \\| `float32` \\| `bfloat16` | `auto` |" in text
    assert "| `gradient_checkpointing` | `auto` or true or false | `auto` |" in text
    assert "| old |" not in text
    assert text.endswith("\n\nAfter.\n")


def test_the_configs_in_the_readme_are_valid(tmp_path, monkeypatch):
    """Its first one, also with the keys that the later ones add."""
    (tmp_path / "data").mkdir()
    for name in ("data/chat.jsonl", "data/votes.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "resources").symlink_to(ROOT / "resources")
    monkeypatch.chdir(tmp_path)
    config, *additions = (
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    )
    load(config)
    assert len(additions) == 2
    for addition in additions:
        for section, runs in addition.items():
            for name, run in runs.items():
                runs[name] = config.get(section, {}).get(name, {}) | run if isinstance(run, dict) else run
            config[section] = config.get(section, {}) | runs
    assert load(config)[0].sft["TUNED"].operation.gpus == 8


def test_the_examples_of_the_generator_are_true():
    assert doctest.testmod(generated) == (0, 1)


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
