"""The libraries whose versions a result records."""

import gc
import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from snaketune.stages.cache.libraries import importing
from snaketune.stages.outcome import Outcome
from snaketune.stages.table import STAGES

from .demo_jobs import build_demo

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# What computes with a model. Results of data don't depend on it.
COMPUTING = {"torch", "accelerate", "peft", "bitsandbytes", "lm_eval"}
DATA = {
    "read",
    "decide",
    "filter",
    "corpus",
    "tokenizer",
    "tokenize",
    "plan",
    "write",
    "pack",
    "prompts",
    "select",
    "score",
}


def test_garbage_is_searched_for_again_after_imports_that_fail_too():
    with pytest.raises(ModuleNotFoundError), importing():
        assert not gc.isenabled()
        import no_such_module  # noqa: F401
    assert gc.isenabled()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_names_libraries_of_the_lock_and_of_data_none_that_computes(stage):
    lock = PROJECT.with_name("requirements.lock").read_text(encoding="utf-8")
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"].values()
    known = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    known |= {Requirement(line).name for extra in extras for line in extra}
    named = STAGES[stage].libraries
    assert {canonicalize_name(name) for name in named} <= {canonicalize_name(name) for name in known}
    assert len(set(named)) == len(named)
    assert not (stage in DATA and COMPUTING & set(named))


def test_a_result_names_what_is_installed_of_its_stages_libraries(tmp_path):
    """bitsandbytes isn't everywhere."""
    manifest = build_demo(
        tmp_path, lambda work: (work.payload / "x").touch() or Outcome(), libraries=("numpy", "no-such")
    )
    assert json.loads(manifest.read_text())["versions"] == {"numpy": version("numpy")}
