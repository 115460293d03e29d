"""What a source says, taken apart or from a note of it."""

import json

import pytest

from snaketune.stages import syntax


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """As a process that has just begun, in a folder of its own with results."""
    monkeypatch.chdir(tmp_path)
    syntax.NOTES.parent.mkdir(parents=True)

    def begin():
        syntax._notes.cache_clear()
        syntax.syntax_of.cache_clear()

    begin()
    yield begin
    begin()


SOURCE = b'"""Doc."""\nfrom snaketune.packing import plan  # why\nx = 1\n'


def test_a_note_is_what_looking_says(fresh, monkeypatch):
    found = syntax.syntax_of(SOURCE)
    assert found[1] == ["snaketune.packing", "snaketune.packing.plan"]
    syntax._keep()
    fresh()
    monkeypatch.setattr(syntax, "_taken_apart", None)
    assert syntax.syntax_of(SOURCE) == found


def test_another_source_or_another_way_to_look_has_no_note(fresh, monkeypatch):
    found = syntax.syntax_of(SOURCE)
    syntax._keep()
    fresh()
    assert syntax.syntax_of(SOURCE.replace(b"Doc", b"Other words")) == found
    assert syntax.syntax_of(SOURCE.replace(b"x = 1", b"x = 2"))[0] != found[0]
    fresh()
    monkeypatch.setattr(syntax, "_taken_apart_by", lambda: "other")
    monkeypatch.setattr(syntax, "_taken_apart", lambda source: ("looked", []))
    assert syntax.syntax_of(SOURCE) == ("looked", [])


@pytest.mark.parametrize("there", ["{", "[]", "7"])
def test_notes_that_cannot_be_read_cost_a_look(fresh, there):
    found = syntax.syntax_of(SOURCE)
    syntax.NOTES.write_text(there, encoding="utf-8")
    fresh()
    assert syntax.syntax_of(SOURCE) == found
    syntax._keep()
    assert len(json.loads(syntax.NOTES.read_text(encoding="utf-8"))) == 1


def test_where_there_are_no_results_nothing_is_left(fresh):
    syntax.NOTES.parent.rmdir()
    syntax.syntax_of(SOURCE)
    syntax._keep()
    assert not syntax.NOTES.parent.exists()
