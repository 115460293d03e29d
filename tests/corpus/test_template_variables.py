"""Variables of chat templates and weights of rows: from columns, in corpora, and in what counts as the same row."""

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from snaketune.config.corpora import Corpus, CorpusContent
from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import SCHEMAS, VARIABLES, Malformed, RawRow, content_hash
from snaketune.tables import read_table
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, read, read_all, turns

MODES = {"enable_thinking": False, "xml_tools": ['{"name": "now"}'], "custom_instructions": "Be brief."}
CHAT = {"messages": turns("U hi", "A hello")}


@pytest.mark.parametrize("value", [MODES, json.dumps(MODES), MODES | {"python_tools": None}])
def test_a_column_holds_an_object_or_json_of_one(value):
    row = read(CHAT | {"chat_template_kwargs": value}, template_variables="chat_template_kwargs")[1]
    assert json.loads(row.template_variables) == MODES
    nested = CHAT | {"metadata": json.dumps({"kwargs": value})}
    assert read(nested, template_variables="metadata.kwargs")[1].template_variables == row.template_variables


@pytest.mark.parametrize("value", [None, "", " ", {}, "{}", {"python_tools": None}])
def test_rows_without_variables_have_none(value):
    assert read(CHAT | {"v": value}, template_variables="v")[1].template_variables is None


@pytest.mark.parametrize("value", ["on", "[1]", ["a"], 3, True, {"a": float("inf")}, "{'enable_thinking': True}"])
def test_anything_else_is_malformed(value):
    with pytest.raises(Malformed, match="bad_template_variables: v"):
        read(CHAT | {"v": value}, template_variables="v")
    with pytest.raises(Malformed, match="missing_column"):
        read(CHAT, template_variables="v")


def variables_of(raw: dict, kind: str = CONVERSATIONS, **keys) -> str | None:
    (made,) = canonical_rows([RawRow("row", 1, raw)], kind=kind, source=Source(files=["x"], **keys), repair=())
    return made.row.template_variables


def test_those_of_a_row_replace_those_of_the_source():
    by_default = {"template_variables": {"enable_thinking": True, "budget": 8}}
    assert variables_of(CHAT, **by_default) == '{"budget": 8, "enable_thinking": true}'
    keys = by_default | {"fields": {"template_variables": "v"}}
    assert variables_of(CHAT | {"v": '{"enable_thinking": false}'}, **keys) == '{"budget": 8, "enable_thinking": false}'


def test_all_kinds_of_rows_have_them():
    own = {"fields": {"template_variables": "v"}}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "v": MODES}
    assert json.loads(variables_of(pair, PREFERENCES, **own)) == MODES
    completion = {"prompt": "q", "completion": "a", "label": True, "v": MODES}
    assert json.loads(variables_of(completion, "unpaired", **own)) == MODES
    mapped = {"fields": {"prompt": "q", "response": "r", "template_variables": "v"}}
    assert json.loads(variables_of({"q": "x", "r": "y", "v": MODES}, **mapped)) == MODES
    by_message = {"conversation": "c", "role": "who", "content": "said", "template_variables": "v"}
    raws = [{"c": 1, "who": who, "said": "x", "v": MODES} for who in ("user", "assistant")]
    assert json.loads(read_all(raws, **by_message)[1].row.template_variables) == MODES


def test_rows_that_differ_in_variables_are_no_duplicates(make):
    variables = [None, {"enable_thinking": False}, {"enable_thinking": True}, '{"enable_thinking": true}']
    rows = [{"messages": turns("U one two three four five six", "A hello"), "v": value} for value in variables]
    source = {"fields": {"template_variables": "v"}}
    for near in ({}, {"near_duplicates": {"threshold": 0.5}}):
        built = make(rows, source=source, **near)
        found = sorted(row["template_variables"] or "" for row in built.train)
        assert found == ["", '{"enable_thinking": false}', '{"enable_thinking": true}']
        assert built.counts["dropped"]["duplicate"] == 1


def test_the_column_is_there_only_where_a_row_has_variables(make):
    source = {"fields": {"template_variables": "v"}}
    plain = make([CHAT])
    for value in (None, {}):
        empty = make([CHAT | {"v": value}], source=source)
        assert (empty.folder / "train-00000.arrow").read_bytes() == (plain.folder / "train-00000.arrow").read_bytes()
    filled = make([CHAT | {"v": MODES}], source=source)
    assert read_table(filled.folder / "train-00000.arrow").schema == SCHEMAS[CONVERSATIONS].append(VARIABLES)
    weighted = make([CHAT | {"v": MODES, "w": 0.5}], source={"fields": {"template_variables": "v", "weight": "w"}})
    assert json.loads(weighted.train[0]["template_variables"]) == MODES
    assert [turn["weight"] for turn in weighted.train[0]["messages"]] == [0.5, 0.5]


@pytest.mark.parametrize(("value", "weight"), [(0.5, 0.5), ("0.5", 0.5), (2, 2.0), (0, 0.0), (1, None), (True, None)])
def test_a_weight_multiplies_those_of_the_turns(value, weight):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "r", "weight": 0.5}]}
    if value is True:
        with pytest.raises(Malformed, match=r"unsupported_weight: w is true"):
            read(row | {"w": value}, weight="w")
        return
    user, assistant = read(row | {"w": value}, weight="w")[1].messages
    assert user.get("weight") == weight and assistant["weight"] == 0.5 * (1 if weight is None else weight)


@pytest.mark.parametrize("value", [-1, 101, "high", None, [1], float("nan")])
def test_other_weights_are_malformed(value):
    with pytest.raises(Malformed, match=r"unsupported_weight: w is .*expected a number from 0 to 100"):
        read(CHAT | {"w": value}, weight="w")


def test_rows_with_other_weights_are_other_rows():
    half, whole = (read(CHAT | {"w": weight}, weight="w")[1] for weight in (0.5, 1))
    assert content_hash(half) != content_hash(whole) == content_hash(read(CHAT)[1])


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("preferences", {"fields": {"weight": "w"}}, "fields.weight weighs conversations"),
        ("text", {"template_variables": {"a": 1}}, "documents have no chat template"),
        ("text", {"fields": {"template_variables": "v"}}, "documents have one column"),
    ],
)
def test_kinds_that_have_none(kind, source, expected):
    with pytest.raises(ValidationError, match=expected):
        CorpusContent(kind=kind, sources=[{"files": ["x"]} | source])


def test_the_documented_example_is_a_corpus():
    text = (Path(__file__).parents[2] / "docs/config/corpora.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```yaml\n(my-chat:.*?)```", text, re.DOTALL))
    corpus = Corpus(**yaml.safe_load(example)["my-chat"])
    assert corpus.empty_reasoning == "mask"
    assert [source.template_variables for source in corpus.sources] == [
        {"enable_thinking": True},
        {"enable_thinking": False},
        {},
    ]
    row = CHAT | {"chat_template_kwargs": {"enable_thinking": False, "python_tools": None}, "quality": 0.5}
    (made,) = canonical_rows([RawRow("row", 1, row)], kind=CONVERSATIONS, source=corpus.sources[2], repair=())
    assert made.row.template_variables == '{"enable_thinking": false}' and made.row.messages[1]["weight"] == 0.5
    assert made.ignored == ()
