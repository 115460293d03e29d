"""The architecture page is up to date; no package imports from below, and only one Snakemake; a rule, its file and
its module have one name; nothing is patched."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from snaketune.stages.table import STAGES

ROOT = Path(__file__).parents[1]
described = spec_from_file_location("draw_architecture", ROOT / "docs/draw_architecture.py")
drawn = module_from_spec(described)
described.loader.exec_module(drawn)


def test_the_page_and_the_picture_are_up_to_date():
    for name, made in (("architecture.svg", drawn.picture()), ("architecture.md", drawn.page())):
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "outdated: make docs"


def test_every_package_is_in_the_picture():
    packages = {path.parent.name for path in drawn.PACKAGE.glob("*/__init__.py")}
    assert packages == set(drawn.PACKAGES)


@pytest.mark.parametrize("package", drawn.PACKAGES)
def test_a_package_imports_only_from_those_above_it(package):
    above = drawn.PACKAGES[: drawn.PACKAGES.index(package)]
    assert drawn.imported_packages()[package] <= set(above)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rule_its_file_and_its_module_have_one_name(stage):
    assert STAGES[stage].module.rpartition(".")[2] == stage
    assert f"rule {stage}:" in (ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8")


def test_the_engine_knows_nothing_of_the_workflow():
    """Only modules without a package, such as `files`, and libraries."""
    assert drawn.imported_packages()["engine"] == set()


def importing(pattern: str) -> set[str]:
    """The modules that import what begins with this pattern."""
    return {
        path.relative_to(drawn.PACKAGE).as_posix()
        for path in drawn.PACKAGE.rglob("*.py")
        if re.search(rf"^\s*(import|from) {pattern}", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_only_the_adapter_imports_snakemake():
    assert {name.split("/")[0] for name in importing("snakemake")} == {"snakemake_adapter"}


def test_no_module_imports_what_is_for_tests():
    assert not importing(r"unittest\b")
