"""The picture of the house is the house; nothing imports upward; a rule, its file and its module have one name."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from snaketune.stages.table import STAGES

ROOT = Path(__file__).parents[1]
described = spec_from_file_location("draw_architecture", ROOT / "docs/draw_architecture.py")
drawn = module_from_spec(described)
described.loader.exec_module(drawn)


def test_the_picture_is_of_the_code():
    for name, made in (("architecture.svg", drawn.picture()), ("architecture.md", drawn.page())):
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "draw it again: make docs"


def test_every_room_is_in_the_picture():
    rooms = {path.parent.name for path in drawn.PACKAGE.glob("*/__init__.py")}
    assert rooms == set(drawn.ROOMS)


@pytest.mark.parametrize("room", drawn.ROOMS)
def test_a_room_imports_from_those_above_it_alone(room):
    above = drawn.ROOMS[: drawn.ROOMS.index(room)]
    assert drawn.imported_rooms()[room] <= set(above)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rule_its_file_and_its_module_have_one_name(stage):
    assert STAGES[stage].module.rpartition(".")[2] == stage
    assert f"rule {stage}:" in (ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8")
