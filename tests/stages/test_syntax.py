"""Digests of the syntax of modules, computed or from the cache."""

import ast
import json

import pytest

from snaketune.stages.cache import syntax


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A new process with an empty cache: a function that forgets what this process has cached."""
    monkeypatch.setattr(syntax, "CACHE", tmp_path / "__pycache__/syntax.json")
    syntax.CACHE.parent.mkdir()

    def begin():
        syntax._cache.cache_clear()
        syntax.syntax_of.cache_clear()

    begin()
    yield begin
    begin()


SOURCE = b'"""Doc."""\nfrom snaketune.packing import plan  # why\nx = 1\n'


def test_the_cache_returns_what_parsing_does(fresh, monkeypatch):
    result = syntax.syntax_of(SOURCE)
    assert result[1] == (("snaketune.packing", "plan", "plan"),)
    syntax._write_cache()
    fresh()
    monkeypatch.setattr(ast, "parse", None)
    assert syntax.syntax_of(SOURCE) == result


def test_another_source_or_another_parser_is_not_in_the_cache(fresh, monkeypatch):
    result = syntax.syntax_of(SOURCE)
    syntax._write_cache()
    fresh()
    assert syntax.syntax_of(SOURCE.replace(b"Doc", b"Other words")) == result
    assert syntax.syntax_of(SOURCE.replace(b"x = 1", b"x = 2"))[0] != result[0]
    fresh()
    monkeypatch.setattr(syntax, "_parser_version", lambda: "other")
    monkeypatch.setattr(syntax, "_parse", lambda source: ("parsed", []))
    assert syntax.syntax_of(SOURCE) == ("parsed", ())


@pytest.mark.parametrize("there", ["{", "[]", "7"])
def test_cache_that_cannot_be_read_cost_a_look(fresh, there):
    result = syntax.syntax_of(SOURCE)
    syntax.CACHE.write_text(there, encoding="utf-8")
    fresh()
    assert syntax.syntax_of(SOURCE) == result
    syntax._write_cache()
    assert len(json.loads(syntax.CACHE.read_text(encoding="utf-8"))) == 1


def test_where_python_compiles_nothing_no_cache_is_written(fresh):
    syntax.CACHE.parent.rmdir()
    syntax.syntax_of(SOURCE)
    syntax._write_cache()
    assert not syntax.CACHE.parent.exists()


@pytest.mark.parametrize("line", ["import snaketune.errors", "from snaketune import errors", "from . import errors"])
def test_imports_that_would_put_the_name_of_a_module_into_the_digest_are_refused(fresh, line):
    with pytest.raises(SyntaxError, match=r"line 2: write `from snaketune\.package"):
        syntax.syntax_of(f"x = 1\n{line}\n".encode())
