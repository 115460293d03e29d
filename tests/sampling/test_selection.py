"""Rows from scored responses: which responses are chosen, and why a prompt gives none."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.sampling.selection import build
from snaketune.sampling.tables import (
    PROMPT_SCHEMA,
    PROMPTS,
    RESPONSE_SCHEMA,
    RESPONSES,
    SCORE_FIELDS,
    SCORES,
    SELECTED,
)
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import SelectSpec
from snaketune.tables import write_table

NOTHING = {"margin": 0.0, "per_prompt": 1, "rows": "best", "at_least": None, "good_from": None, "bad_to": None}


def artifact(folder: Path) -> Artifact:
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def select(tmp_path: Path, responses: list[list[tuple]], kind: str = "preferences", prompt: dict | None = None, **spec):
    """Run the stage. Args: responses: for each prompt (text, score, length, further columns)."""
    for name in ("sample", "score"):
        (tmp_path / name).mkdir(parents=True)
    prompts = [
        {"id": f"p{n}", "turn": 1, "corpus": "chat", "messages": [{"role": "user", "content": f"Q{n}"}], "answer": "7"}
        | (prompt or {})
        for n in range(len(responses))
    ]
    rows, scores = [], []
    for n, of_prompt in enumerate(responses):
        for index, (text, score, length, *more) in enumerate(of_prompt):
            key = {"id": f"p{n}", "turn": 1, "index": index}
            rows.append(key | {"text": text, "content": text, "tokens": [1] * length, "ended": "stop"} | dict(*more))
            scores.append(key | {"score": score})
    write_table(tmp_path / "sample" / PROMPTS, pa.Table.from_pylist(prompts, schema=PROMPT_SCHEMA))
    write_table(tmp_path / "sample" / RESPONSES, pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA))
    columns = pa.schema([*SCORE_FIELDS, ("score", pa.float64())])
    write_table(tmp_path / "score" / SCORES, pa.Table.from_pylist(scores, schema=columns))
    work = WorkFolder(tmp_path / "work")
    work.start()
    inputs = {"samples": artifact(tmp_path / "sample"), "scores": artifact(tmp_path / "score")}
    operation = Execution(sampled="dpo:demo")
    outcome = build(SelectSpec(**(NOTHING | {"kind": kind} | spec)), work, operation=operation, **inputs)
    lines = (work.payload / SELECTED).read_text(encoding="utf-8").splitlines()
    return outcome, [json.loads(line) for line in lines]


def texts(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]


def test_the_best_is_paired_with_the_worst(tmp_path):
    outcome, rows = select(tmp_path, [[("low", 1, 5), ("high", 9, 5), ("middle", 5, 5)]])
    assert texts(rows) == [("high", "low")]
    (row,) = rows
    assert row["prompt"] == [{"role": "user", "content": "Q0"}] and row["answer"] == "7"
    assert outcome.counts == {"prompts": 1, "rows": 1, "prompts_without": {}, "left_out": {}}
    assert outcome.about["mean_tokens"] == {"chosen": 5.0, "rejected": 5.0}


def test_pairs_have_the_scores_of_both_so_that_their_difference_can_be_a_margin(tmp_path):
    _, rows = select(tmp_path, [[("a", 0.2, 3), ("b", 0.9, 3)]])
    assert [(row["score_chosen"], row["score_rejected"]) for row in rows] == [(0.9, 0.2)]


def test_several_pairs_of_a_prompt_share_no_response_and_keep_the_margin(tmp_path):
    responses = [[(f"s{score}", score, 5) for score in (1, 2, 4, 7, 8)]]
    outcome, rows = select(tmp_path, responses, per_prompt=9, margin=5)
    assert texts(rows) == [("s8", "s1"), ("s7", "s2")]
    assert outcome.counts["rows"] == 2


def test_among_equal_scores_length_decides_so_that_it_tells_nothing(tmp_path):
    responses = [
        [("long right", 1, 30), ("right", 1, 12), ("wrong", 0, 3), ("wrong long", 0, 14), ("wrong longer", 0, 90)]
    ]
    _, rows = select(tmp_path, responses)
    assert texts(rows) == [("right", "wrong long")]


def test_a_prompt_without_a_difference_gives_no_pair_and_is_counted(tmp_path):
    outcome, rows = select(
        tmp_path,
        [
            [("a", 1, 5), ("b", 1, 5)],  # all right
            [("a", 0, 5), ("b", 0, 5)],  # all wrong
            [("a", 1, 5), ("a", 1, 5), ("a", 0, 5)],  # equal texts
            [("a", 1, 5), ("b", None, 5), ("c", 0, 5, {"ended": "length"}), (" ", 0, 1)],
            [("a", None, 5)],
            [("a", 0.6, 5), ("b", 0.4, 5)],
            [("a", 1, 5), ("b", 0, 5)],
        ],
        margin=0.5,
    )
    assert texts(rows) == [("a", "b")]
    assert outcome.counts["prompts_without"] == {
        "below margin": 1,
        "equal scores": 2,
        "no response left": 1,
        "one response left": 2,
    }
    assert outcome.counts["left_out"] == {"empty": 1, "equal text": 2, "truncated": 1, "without score": 2}


def test_the_best_response_becomes_a_conversation_if_it_is_good_enough(tmp_path):
    responses = [[("low", 0, 5), ("good", 1, 9), ("good and short", 1, 5)], [("low", 0.5, 5)]]
    outcome, rows = select(tmp_path, responses, kind="conversations", at_least=1.0)
    assert [row["messages"][-1]["content"] for row in rows] == ["good and short"]
    assert rows[0]["messages"][0] == {"role": "user", "content": "Q0"}
    assert outcome.counts["prompts_without"] == {"below at_least": 1}


def test_all_responses_that_are_good_enough_become_conversations(tmp_path):
    _, rows = select(tmp_path, [[("a", 1, 5), ("b", 2, 5), ("c", 0, 5)]], kind="conversations", rows="all", at_least=1)
    assert [row["messages"][-1]["content"] for row in rows] == ["b", "a"]


def test_responses_are_labelled_by_two_bounds(tmp_path):
    outcome, rows = select(
        tmp_path, [[("a", 8, 5), ("b", 5, 5), ("c", 4, 7)], [("d", 5, 5)]], kind="unpaired", good_from=7, bad_to=4
    )
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [("a", True), ("c", False)]
    assert outcome.counts["prompts_without"] == {"between bad_to and good_from": 1}
    assert outcome.about["mean_tokens"] == {"bad": 7.0, "good": 5.0}


def test_reasoning_calls_tools_and_variables_are_in_the_form_of_rows(tmp_path):
    call = {"name": "now", "arguments": {"zone": "UTC"}}
    tools = [{"type": "function", "function": {"name": "now"}}]
    prompt = {
        "tools": json.dumps(tools),
        "template_variables": '{"enable_thinking": true}',
        "task": "time",
        "answer": None,
    }
    thought = {"reasoning": "Hm.", "tool_calls": json.dumps([call, call])}
    _, rows = select(tmp_path, [[("Wait.", 1, 5, thought), ("no", 0, 5)]], prompt=prompt)
    (row,) = rows
    line = json.dumps(call)
    assert row["chosen"][0]["content"] == (
        f"<think>\nHm.\n</think>\n\nWait.\n<tool_call>\n{line}\n</tool_call>\n<tool_call>\n{line}\n</tool_call>"
    )
    assert row["tools"] == tools and row["template_variables"] == {"enable_thinking": True}
    assert row["task"] == "time" and "answer" not in row


def test_how_many_prompts_are_solved_is_in_the_manifest(tmp_path):
    responses = [[("a", 1, 5), ("b", 1, 5)], [("a", 0, 5), ("b", 0, 5)], [("a", 1, 5), ("b", 0, 5)]]
    outcome, _ = select(tmp_path, responses)
    assert outcome.about["solved"] == {"low": 0, "high": 1, "prompts": [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]}


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("preferences", {}, r"equal scores: 1.*lower margin"),
        ("conversations", {"at_least": 2.0}, r"below at_least: 1.*lower at_least"),
        ("unpaired", {"good_from": 5, "bad_to": 0}, r"between bad_to and good_from: 1.*raise bad_to"),
    ],
)
def test_a_selection_of_nothing_says_why(tmp_path, kind, spec, said):
    with pytest.raises(SnaketuneError, match=said):
        select(tmp_path, [[("a", 1, 5), ("b", 1, 5)]], kind=kind, **spec)


def test_a_selection_of_too_little_names_the_model_to_end_with(tmp_path):
    responses = [[("a", 1, 5), ("b", 0, 5)], [("a", 1, 5), ("b", 1, 5)]]
    outcome, _ = select(tmp_path / "enough", responses, min_rows=1)
    assert outcome.counts["rows"] == 1
    said = r"2 prompts give 1 rows, fewer than min_rows: 2 \(prompts without: equal scores: 1\)"
    with pytest.raises(SnaketuneError, match=said):
        select(tmp_path / "little", responses, min_rows=2)
