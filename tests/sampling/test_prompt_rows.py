"""Prompts of a sample: which rows, up to which turn, and what doesn't fit."""

from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Scratch
from snaketune.corpus.rows import SCHEMAS
from snaketune.errors import SnaketuneError
from snaketune.sampling.prompts import build
from snaketune.sampling.responses import Request
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import PromptsSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import Refused
from tests.tokenization.small_tokenizers import tokenizer_artifact

BASE = Scratch(hidden_size=32, intermediate_size=32, layers=1, heads=2, max_positions=300)
DEFAULTS = {"corpora": ("chat",), "split": "train", "limit": None, "turns": "last", "longest": None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


def turns(*contents: str, first: str = "user") -> list[dict]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[n % 2], "content": content, "supervised": True} for n, content in enumerate(contents)]


def corpus(folder: Path, kind: str, rows: list[dict], split: str = "train") -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / f"{split}.arrow", pa.Table.from_pylist(rows, schema=SCHEMAS[kind]))
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def prompts(tmp_path: Path, tokenizer: Artifact, rows: list[dict], kind: str = "conversations", **spec):
    settings = DEFAULTS | {"template_variables": {}, "base": BASE, "new_tokens": 10} | spec
    made = corpus(tmp_path / "corpus", kind, rows, settings["split"])
    work = WorkFolder(tmp_path / "work")
    work.start()
    outcome = build(
        PromptsSpec(**settings), work, corpora=[made] * len(settings["corpora"]), tokenizer=tokenizer, base=[]
    )
    return outcome, read_table(work.payload / "prompts.arrow").to_pylist()


CHAT = [
    {"id": "b", "messages": turns("Q1", "A1", "Q2", "A2"), "answer": "2"},
    {"id": "a", "messages": turns("Q3", "A3"), "task": "t"},
]


def test_prompts_end_before_the_last_assistant_turn_and_are_in_the_order_of_ids(tmp_path, tokenizer):
    outcome, rows = prompts(tmp_path, tokenizer, CHAT)
    assert [(row["id"], row["turn"], row["reference"], row["answer"]) for row in rows] == [
        ("a", 1, "A3", None),
        ("b", 3, "A2", "2"),
    ]
    assert [turn["content"] for turn in rows[1]["messages"]] == ["Q1", "A1", "Q2"] and rows[0]["task"] == "t"
    chat = ChatTokenizer.load(tokenizer.folder)
    for row in rows:
        ids = chat.encode_prompt(row["messages"])
        assert row["tokens"] == ids.tolist() and row["digest"] == Request(ids).digest.hex()
    assert outcome.counts == {"prompts": 2, "distinct": 2, "left_out": {}}


def test_each_assistant_turn_may_be_a_prompt_and_only_the_last_has_the_answer(tmp_path, tokenizer):
    _, rows = prompts(tmp_path, tokenizer, CHAT, turns="all")
    assert [(row["id"], row["turn"], row["reference"], row["answer"]) for row in rows] == [
        ("a", 1, "A3", None),
        ("b", 1, "A1", None),
        ("b", 3, "A2", "2"),
    ]


def test_limit_and_split_choose_rows(tmp_path, tokenizer):
    _, rows = prompts(tmp_path, tokenizer, CHAT, limit=1, split="held_out")
    assert [row["id"] for row in rows] == ["a"]


def test_prompts_of_pairs_and_labelled_rows_have_the_better_response_as_reference(tmp_path, tokenizer):
    pair = {"id": "p", "prompt": turns("Q"), "chosen": turns("good", first="a"), "rejected": turns("bad", first="a")}
    _, rows = prompts(tmp_path / "pairs", tokenizer, [pair | {"answer": "good"}], "preferences")
    assert [(row["turn"], row["reference"], row["answer"]) for row in rows] == [(1, "good", "good")]
    labelled = [
        {"id": str(label), "prompt": turns("Q"), "completion": turns("text", first="a"), "label": label, "answer": "x"}
        for label in (True, False)
    ]
    outcome, rows = prompts(tmp_path / "votes", tokenizer, labelled, "unpaired")
    # A bad completion is no reference; both rows have one prompt.
    assert {row["id"]: (row["reference"], row["answer"]) for row in rows} == {
        "True": ("text", "x"),
        "False": (None, None),
    }
    assert outcome.counts["prompts"] == 2 and outcome.counts["distinct"] == 1


def test_a_prompt_that_does_not_fit_ends_the_run_or_is_left_out(tmp_path, tokenizer):
    long = {"id": "c", "messages": turns("word " * 400, "A")}
    with pytest.raises(SnaketuneError, match=r"prompt c of chat has \d+ tokens.*300 positions.*prompts.longest: 290"):
        prompts(tmp_path / "one", tokenizer, [*CHAT, long])
    outcome, rows = prompts(tmp_path / "two", tokenizer, [*CHAT, long], longest=290)
    assert len(rows) == 2 and outcome.counts["left_out"] == {"longer": 1}
    with pytest.raises(SnaketuneError, match=r"chat give no prompt \(longer 1\)"):
        prompts(tmp_path / "three", tokenizer, [long], longest=5)


def test_variables_that_the_template_does_not_use_are_refused(tmp_path, tokenizer):
    with pytest.raises(SnaketuneError, match="doesn't use the variable 'enable_thinking'"):
        prompts(tmp_path, tokenizer, CHAT, template_variables={"enable_thinking": False})


def test_what_the_template_refuses_is_left_out_and_counted(tmp_path, tokenizer, capsys, monkeypatch):
    encode = ChatTokenizer.encode_prompt

    def refusing(chat, messages, *more):
        if messages[0]["content"] == "Q3":
            raise Refused("odd_turn", "the template refuses it")
        return encode(chat, messages, *more)

    monkeypatch.setattr(ChatTokenizer, "encode_prompt", refusing)
    outcome, rows = prompts(tmp_path, tokenizer, CHAT)
    assert [row["id"] for row in rows] == ["b"] and outcome.counts["left_out"] == {"odd_turn": 1}
    assert "left out: prompt a of chat: the template refuses it" in capsys.readouterr().out
