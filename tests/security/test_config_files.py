"""Config files: nothing in them is run or constructed, their size is limited, and duplicate keys are reported."""

import json
import re

import pytest
import yaml

from snaketune.__main__ import main
from snaketune.config.load import load
from snaketune.config.yaml_values import MAX_VALUES, check_file
from snaketune.errors import SnaketuneError
from tests.workflow.command_line import snakemake
from tests.workflow.conftest import ROOT

RUNS = """
__use_yte__: true
__definitions__:
  - from pathlib import Path
corpora: {x: {kind: "?Path('MARK').touch() or 'text'"}}
"""
LAUGHS = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
MAPPINGS = "\n".join(f"m{n}: &m{n} {{{', '.join(f'k{key}: *m{n - 1}' for key in range(9))}}}" for n in range(1, 12))
REFUSED = {
    "runs by Snakemake": (RUNS, "line 2: `__use_yte__` lets Snakemake run parts of the config as Python"),
    "json runs": ('{"__use_yte__": true}', "`__use_yte__` lets Snakemake run"),
    "object": ("a: !!python/object/apply:os.system ['touch MARK']", "line 1: found tag:yaml.org,2002:python/object/apply:os"),
    "new": ("a: !!python/object/new:pathlib.Path [x]", "found tag:yaml.org,2002:python/object/new"),
    "name": ("a: !!python/name:os.system", "found tag:yaml.org,2002:python/name:os.system"),
    "module": ("a:\n- !!python/module:this", "line 2: found tag:yaml.org,2002:python/module:this"),
    "function": ("a: !function os.system", "line 1: found !function"),
    "binary": ("a: !!binary aGk=", "found tag:yaml.org,2002:binary"),
    "twice": ("a: 1\nb: {c: 1,\n c: 2}", "line 3: the key 'c' occurs twice"),
    "twice at the top": ("corpora: {}\ncorpora: {}", "line 2: the key 'corpora' occurs twice"),
    "an empty key": ("sft:\n  demo: {lora: }", "line 2: `lora:` is empty, which could mean its defaults or none of it"),
    "an empty section": ("report:\ncorpora: {}", "line 1: `report:` is empty"),
    "an empty last key": ("sft:\n  demo:\n    lora:\n", "`lora:` is empty"),
    "a name that is true": ("dpo:\n  on: {beta: 1}", "line 2: YAML reads the key 'on' as true or false; put it in quotes"),
    "a name that is nothing": ("dpo: {~: {beta: 1}}", "line 1: YAML reads the key '~' as nothing; put it in quotes"),
    "twice in JSON": ('{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
    "billion laughs": (f"l0: &l0 lol\n{LAUGHS}", f"more than {MAX_VALUES:,} values"),
    "of mappings": (f"m0: &m0 lol\n{MAPPINGS}", f"more than {MAX_VALUES:,} values"),
    "within itself": ("a: &a [*a]", "line 1: *a refers to itself"),
    "deep": ("a: " + "[" * 200 + "]" * 200, "nested too deeply"),
    "deeper": ("a: " + "[" * 100_000 + "]" * 100_000, "nested too deeply|can't be read as YAML"),
    "deep JSON": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "no YAML": ("a: [1", "can't be read as YAML"),
    "no text": (b"\xff\xfe\x00", "can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_plain_value_is_refused_and_not_run(what, tmp_path, mark):
    text, reason = REFUSED[what]
    file = tmp_path / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.replace("MARK", str(mark.path)).encode())
    with pytest.raises(SnaketuneError) as caught:
        check_file(file)
    assert any(words in str(caught.value) for words in reason.split("|"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: &shared {x: [1, 2], y: !!str 5}\nb: {<<: *shared, y: 6}\nc: [*shared, *shared]",
        "a: {<<: &one {x: 1}}\nb: {k: *one}",
        '{"a":\t{"b": [1, {"c": 2}]}, "b": {"c": 3}}',
        "- {a: 1}\n- {a: 2}\n- a",
        "? [1, 2]\n: 3\n? {a: 1}\n: {a: 1}\nx: y",
    ],
)
def test_plain_values_pass_aliases_and_merged_keys_too(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    check_file(file)


def test_shipped_configs_pass_and_others_can_be_checked_first(tmp_path, capsys, mark):
    shipped = [ROOT / "config/config.yaml", *(ROOT / "config/recipes").glob("*.yaml")]
    assert main(["check", *map(str, shipped)]) == 0
    (tmp_path / "theirs.yaml").write_text(RUNS.replace("MARK", str(mark.path)))
    assert main(["check", str(tmp_path / "theirs.yaml")]) == 1
    assert "`__use_yte__` lets Snakemake run" in capsys.readouterr().err


def test_the_default_config_is_checked_before_snakemake_runs_it(fresh, mark):
    """A config from the command line is loaded by Snakemake first, so it can only be reported."""
    (fresh.folder / "config").mkdir()
    (fresh.folder / "config/config.yaml").write_text(RUNS.replace("MARK", str(mark.path)))
    given = fresh.arguments("-n")
    at = given.index("--configfile")
    status, said = snakemake(given[:at] + given[at + 2 :], fresh.folder)
    assert status
    assert "`__use_yte__` lets Snakemake run parts of the config as Python" in said


def test_a_config_with_a_duplicate_key_stops_before_anything_runs(fresh):
    fresh.write_config()
    (fresh.folder / "twice.yaml").write_text(fresh.read("config.yaml") + "report: {title: a, title: b}\n")
    given = fresh.arguments()
    given[given.index("--configfile") + 1] = "twice.yaml"
    status, said = snakemake(given, fresh.folder)
    assert status
    assert re.search(r"twice\.yaml, line \d+: the key 'title' occurs twice", said)
    assert not fresh.made()


NAMES = [
    "../x",
    "a/b",
    "/etc",
    "a b",
    "a\n",
    "a$(id)",
    "`id`",
    "a;b",
    "-a",
    ".a",
    "a{x}",
    "a'b",
    'a"b',
    "",
    "é",
    "a" * 81,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["corpora", "tokenizers", "sft", "dpo", "eval"])
def test_a_name_is_no_path_and_no_command(name, section):
    """Also one that a grid makes of its values."""
    config = {"corpora": {"c": {"kind": "text", "sources": [{"hub": {"path": "a/b", "revision": "main"}}]}}}
    config.setdefault(section, {})[name] = {}
    with pytest.raises(SnaketuneError) as caught:
        load(config)
    assert "expected a name of letters" in str(caught.value) or "at most 80" in str(caught.value)


def test_a_value_of_a_grid_that_makes_no_name_is_called_by_its_index():
    values = ["$(touch x)", "../x", ".*mlp.*"]
    run = HUB["sft"]["s"] | {"grid": {"training.trainable": values, "training.learning_rate": [1e-4, 1e16]}}
    config, variants = load(HUB | {"sft": {"s": run}})
    rates = ("learning_rate0.0001", "learning_rate1")
    assert variants["sft"]["s"] == tuple(f"s-trainable{number}-{rate}" for number in range(3) for rate in rates)
    assert config.sft["s-trainable2-learning_rate0.0001"].training.trainable == values[2]


HUB = {
    "corpora": {"c": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "main"}}]}},
    "tokenizers": {"t": {"adopt": "a/b", "revision": "main"}},
    "sft": {"s": {"base": {"path": "a/b", "revision": "main"}, "corpus": "c", "tokenizer": "t",
                  "training": {"learning_rate": 1e-4}}},
}  # fmt: skip
PLACES = [("corpora", "c", "sources", 0, "hub", "path"), ("tokenizers", "t", "adopt"), ("sft", "s", "base", "path")]


def with_value(path, value):
    config = json.loads(json.dumps(HUB))
    inside = config
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return config


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path[0])
@pytest.mark.parametrize(
    "id_", ["../../etc", "a/../../etc", "a/b/../..", "https://x/y", "a b", "a/$(id)", "-a/b", "a\nb"]
)
def test_a_hub_id_is_no_path_and_no_command(path, id_, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load(HUB)
    with pytest.raises(SnaketuneError, match=r"expected a|is not a folder|control characters"):
        load(with_value(path, id_))


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path[0])
@pytest.mark.parametrize("revision", ["../../etc", "a/../b", "/main", "a b", "$(id)", "-x", "a\n", ""])
def test_a_revision_is_no_path_and_no_command(path, revision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for fine in ("main", "refs/pr/1", "v1.0+cu_2", "0123456789abcdef0123456789abcdef01234567"):
        load(with_value((*path[:-1], "revision"), fine))
    with pytest.raises(SnaketuneError, match=r"revision: found .*a text that matches"):
        load(with_value((*path[:-1], "revision"), revision))


def test_a_folder_is_not_read_instead_of_a_hub_dataset(tmp_path, monkeypatch):
    """`datasets` does that, and no fingerprint would have it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(SnaketuneError, match="'a/b' also exists locally"):
        load({"corpora": HUB["corpora"]})


def test_numbers_and_dates_of_yaml_are_no_names_by_surprise():
    with pytest.raises(SnaketuneError, match="the config is wrong"):
        load(yaml.safe_load("corpora: {2024-01-01: {kind: text}, 5: {kind: text}, null: {kind: text}}"))
