"""Prompts of a sample: which rows, up to which turn, and what doesn't fit."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Scratch
from snaketune.corpus.rows import SCHEMAS
from snaketune.errors import SnaketuneError
from snaketune.sampling.prompt_rows import build
from snaketune.sampling.responses import Request
from snaketune.sampling.tables import SCORE_FIELDS, SCORES
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
    write_table(folder / f"{split}-00000.arrow", pa.Table.from_pylist(rows, schema=SCHEMAS[kind]))
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def prompts(
    tmp_path: Path,
    tokenizer: Artifact,
    rows: list[dict],
    kind: str = "conversations",
    scores: Sequence[Artifact] = (),
    **spec,
):
    settings = DEFAULTS | {"template_variables": {}, "base": BASE, "new_tokens": 10} | spec
    made = corpus(tmp_path / "corpus", kind, rows, settings["split"])
    work = WorkFolder(tmp_path / "work")
    work.start()
    outcome = build(
        PromptsSpec(**settings),
        work,
        corpora=[made] * len(settings["corpora"]),
        tokenizer=tokenizer,
        base=[],
        scores=scores,
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


def scored(folder: Path, scores: dict[str, list[float | None]], turn: int = 1) -> Artifact:
    """Scores of an earlier sample by row."""
    rows = [
        {"id": id, "turn": turn, "index": index, "score": score}
        for id, values in scores.items()
        for index, score in enumerate(values)
    ]
    folder.mkdir()
    write_table(folder / SCORES, pa.Table.from_pylist(rows, pa.schema([*SCORE_FIELDS, ("score", pa.float64())])))
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def test_a_later_sample_takes_the_rows_that_an_earlier_one_left(tmp_path, tokenizer):
    rows = [{"id": id, "messages": turns(f"Q {id}", "A")} for id in "dbeac"]

    def ids(skip: int, limit: int | None = 2) -> str:
        _, taken = prompts(tmp_path / f"{skip}-{limit}", tokenizer, rows, skip=skip, limit=limit)
        return "".join(row["id"] for row in taken)

    # Where they don't last, it begins again.
    assert [ids(0), ids(2), ids(4), ids(6)] == ["ab", "cd", "ea", "bc"]
    assert ids(2, limit=None) == "cdeab"


def test_solved_and_unsolved_rows_are_left_out_or_sampled_less(tmp_path, tokenizer):
    rows = [{"id": id, "messages": turns(f"Q {id}", "A")} for id in ("both", "half", "right", "unknown", "wrong")]
    first = scored(tmp_path / "first", {"both": [1, 1], "right": [0, 1], "wrong": [0, 0], "half": [0.5, 0.5]})
    second = scored(tmp_path / "second", {"both": [1, 0], "right": [1, 1, None]})

    def left(*scores: Artifact, **spec) -> tuple[list[str], dict]:
        folder = tmp_path / f"taken-{len(list(tmp_path.iterdir()))}"
        outcome, taken = prompts(folder, tokenizer, rows, scores=scores, **spec)
        return [row["id"] for row in taken], outcome.counts["left_out"]

    assert left(first, solved=0.0) == (["half", "right", "unknown", "wrong"], {"solved": 1})
    assert left(first, unsolved=0.0) == (["both", "half", "right", "unknown"], {"unsolved": 1})
    # The last sample that has a row says what it is; `limit` counts those that are left.
    assert left(first, second, solved=0.0, unsolved=0.0, limit=2) == (["both", "half"], {"solved": 1, "unsolved": 1})
    # Where all responses to all rows have one score, none is better.
    assert left(scored(tmp_path / "same", {"both": [1, 1], "right": [1]}), solved=0.0)[1] == {}
    many = [{"id": f"row {n}", "messages": turns(f"Q{n}", "A")} for n in range(400)]
    known = scored(tmp_path / "many", {row["id"]: [1, 1] for row in many} | {"another": [0]})
    kept = [
        {row["id"] for row in prompts(tmp_path / f"share-{share}", tokenizer, many, scores=[known], solved=share)[1]}
        for share in (0.2, 0.5, 1.0)
    ]
    assert kept[0] < kept[1] < kept[2] and len(kept[2]) == 400
    assert [len(ids) / 400 for ids in kept] == pytest.approx([0.2, 0.5, 1.0], abs=0.06)
