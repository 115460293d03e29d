"""Rows that a chat template refuses are quarantined one by one, or fail the stage if configured."""

import json

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import CHATML, LLAMA3, chat_of, families, messages
from test_tokenize_stage import artifact, corpus_of, rows_of

from snaketune.corpus.rows import VARIABLES
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizeSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization import corpus_part
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.token_store import TokenParts

REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + LLAMA3
TOOL = json.dumps([{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}])
GOOD = [messages(f"the cat {number}", f"sat {number}") for number in range(40)]
BAD = [messages("a", "b", system="be kind"), messages("c", "d", system="be short")]


def run(folder, rows, tokenizer, kind="sft", most_refused=None, part=1, parts=1):
    work = WorkFolder(folder)
    work.start()
    spec = TokenizeSpec(kind=kind, train_on="assistant", part=part, parts=parts, most_refused=most_refused)
    return work, corpus_part.build(spec, work, corpus=rows, tokenizer=tokenizer)


@pytest.fixture
def tokenizer(tmp_path):
    chat_of(tmp_path / "tokenizer", families()["gpt2"], REFUSES)
    return artifact(tmp_path / "tokenizer")


def with_bad(good: list) -> list:
    """Insert bad rows as the fourth and the last."""
    return [*good[:3], BAD[0], *good[3:], BAD[1]]


def test_without_quarantine_the_first_one_fails_the_stage_and_the_error_names_the_key(tokenizer, tmp_path):
    rows = corpus_of(tmp_path / "rows", {"messages": with_bad(GOOD)})
    with pytest.raises(SnaketuneError, match=r"no system turns.*'be kind'.*on_template_error: quarantine"):
        run(tmp_path / "work", rows, tokenizer)


def test_they_are_listed_with_row_and_reason_and_other_rows_are_unchanged(tokenizer, tmp_path):
    rows = corpus_of(tmp_path / "rows", {"messages": with_bad(GOOD)}, {"messages": [GOOD[0], BAD[0], GOOD[1]]})
    work, outcome = run(tmp_path / "work", rows, tokenizer, most_refused=0.5)
    assert {split: outcome.counts[split]["refused"] for split in outcome.counts} == {"train": 2, "held_out": 1}
    assert outcome.counts["train"]["rows"] == 42
    assert outcome.records == ("quarantine.jsonl",)
    lines = (work.payload / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    listed = [json.loads(line) for line in lines]
    assert [(one["file"], one["row"], one["reason"]) for one in listed] == [
        ("train", 4, "template_error"),
        ("train", 42, "template_error"),
        ("held_out", 2, "template_error"),
    ]
    assert "no system turns" in listed[0]["detail"]
    assert '"be kind"' in listed[0]["excerpt"]

    alone, _ = run(
        tmp_path / "alone", corpus_of(tmp_path / "good", {"messages": GOOD}, {"messages": GOOD[:2]}), tokenizer
    )
    tokens, expected = (TokenParts([artifact(one.payload)]) for one in (work, alone))
    for split in ("train", "held_out"):
        both = rows_of(tokens, split), rows_of(expected, split)
        # A refused row is an empty sequence with the same number.
        accepted = [number for number, row in enumerate(both[0]) if row["length"]]
        assert len(both[0]) - len(accepted) == (2 if split == "train" else 1)
        for row, other in zip([both[0][number] for number in accepted], both[1], strict=True):
            # The rows around them have other numbers and, in this corpus, other sources.
            left_out = ("id", "source")
            assert {name: value for name, value in row.items() if name not in left_out} == {
                name: value for name, value in other.items() if name not in left_out
            }


def test_concatenated_parts_equal_the_whole(tokenizer, tmp_path):
    rows = corpus_of(tmp_path / "rows", {"messages": with_bad(GOOD)})
    whole, _ = run(tmp_path / "whole", rows, tokenizer, most_refused=0.5)
    parts = [
        run(tmp_path / f"part-{part}", rows, tokenizer, most_refused=0.5, part=part, parts=3) for part in (1, 2, 3)
    ]
    listed = [(work.payload / "quarantine.jsonl").read_text(encoding="utf-8") for work, _ in parts]
    assert "".join(listed) == (whole.payload / "quarantine.jsonl").read_text(encoding="utf-8")
    laid = TokenParts([artifact(work.payload) for work, _ in parts])
    assert laid.index("train").equals(TokenParts([artifact(whole.payload)]).index("train"))


@pytest.mark.parametrize("most_refused", [0.01, 1.0])
def test_too_many_fail_the_stage(tokenizer, tmp_path, most_refused):
    rows = corpus_of(tmp_path / "rows", {"messages": with_bad(GOOD)})
    if most_refused == 1:
        _, outcome = run(tmp_path / "work", rows, tokenizer, most_refused=most_refused)
        assert outcome.counts["train"]["refused"] == 2
        return
    with pytest.raises(SnaketuneError, match=r"2 of 42 rows \(4.76%\).*1.00%(?s:.*)template_error.*train, row 4"):
        run(tmp_path / "work", rows, tokenizer, most_refused=most_refused)
    assert len((tmp_path / "work/quarantine.jsonl").read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize("kind", ["preference", "unpaired"])
def test_either_completion_of_a_pair_may_be_refused(kind, tmp_path):
    # This template refuses a content, not a role.
    forbids = "{% if 'forbidden' in message['content'] %}{{ raise_exception('no') }}{% endif %}"
    template = LLAMA3.replace("{% set content", forbids + "{% set content", 1)
    chat_of(tmp_path / "tokenizer", families()["gpt2"], template)
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no", "forbidden")]
    prompts = [messages(f"q{number}") for number in range(6)]
    if kind == "preference":
        columns = {
            "prompt": prompts,
            "chosen": [answers[0]] * 5 + [answers[2]],
            "rejected": [answers[1], answers[2], *[answers[1]] * 4],
        }
    else:
        columns = {"prompt": prompts, "completion": [answers[0], answers[2], *[answers[1]] * 3, answers[2]]}
    rows = corpus_of(tmp_path / "rows", columns)
    if kind == "unpaired":
        rows = labelled(tmp_path / "labelled", rows)
    work, outcome = run(tmp_path / "work", rows, artifact(tmp_path / "tokenizer"), kind=kind, most_refused=0.9)
    assert outcome.counts["train"]["refused"] == 2
    index = TokenParts([artifact(work.payload)]).index("train")
    assert np.flatnonzero(index["length"].to_numpy() == 0).tolist() == [1, 5]


def labelled(folder, rows):
    folder.mkdir()
    for split in ("train", "held_out"):
        table = read_table(rows.file(f"{split}-00000.arrow"))
        write_table(folder / f"{split}-00000.arrow", table.append_column("label", [[True] * len(table)]))
    return artifact(folder)


def test_whole_groups_may_be_refused(tokenizer, tmp_path):
    rows = corpus_of(tmp_path / "rows", {"messages": BAD * 3}, {"messages": GOOD[:1]})
    work, outcome = run(tmp_path / "work", rows, tokenizer, most_refused=1.0)
    assert outcome.counts["train"]["refused"] == 6
    assert TokenParts([artifact(work.payload)]).index("train")["length"].to_pylist() == [0] * 6


def test_errors_that_are_no_rows_fault_fail_the_stage(tmp_path):
    chat_of(tmp_path / "tokenizer", families()["gpt2"], CHATML.read_text())
    (tmp_path / "tokenizer/chat_template.jinja").unlink()
    rows = corpus_of(tmp_path / "rows", {"messages": GOOD})
    with pytest.raises(SnaketuneError, match="has no chat template"):
        run(tmp_path / "work", rows, artifact(tmp_path / "tokenizer"), most_refused=1.0)


def test_a_split_may_hold_refused_rows_alone(tokenizer, tmp_path):
    rows = corpus_of(tmp_path / "rows", {"messages": GOOD}, {"messages": BAD})
    work, outcome = run(tmp_path / "work", rows, tokenizer, most_refused=0.5)
    assert outcome.counts["held_out"]["refused"] == outcome.counts["held_out"]["rows"] == 2
    index = TokenParts([artifact(work.payload)]).index("held_out")
    assert index["length"].to_pylist() == [0, 0]


def test_rows_have_their_variables_and_those_with_unused_ones_are_listed(tmp_path):
    template = (
        "{{ mood }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat_of(tmp_path / "tokenizer", families()["gpt2"], template)
    rows = corpus_of(tmp_path / "rows", {"messages": GOOD[:1] * 3})
    path = rows.folder / "train-00000.arrow"
    variables = pa.array(['{"mood": "glad"}', '{"tone": 1}', None])
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    write_table(path, table.append_column(VARIABLES, variables))
    lengths = {}
    for treatment in ("mask", "supervise"):
        work = WorkFolder(tmp_path / treatment)
        work.start()
        spec = TokenizeSpec(
            kind="sft", train_on="assistant", empty_reasoning=treatment, part=1, parts=1, most_refused=0.5
        )
        outcome = corpus_part.build(
            spec, work, corpus=artifact(rows.folder), tokenizer=artifact(tmp_path / "tokenizer")
        )
        (listed,) = map(json.loads, (work.payload / "quarantine.jsonl").read_text(encoding="utf-8").splitlines())
        assert (listed["row"], listed["reason"]) == (2, "unused_template_variable") and "it uses mood" in listed[
            "detail"
        ]
        glad, _, plain = rows_of(TokenParts([artifact(work.payload)]), "train")
        chat = ChatTokenizer.load(tmp_path / "tokenizer")
        assert chat.text(glad["ids"]) == "glad" + chat.text(plain["ids"])
        lengths[treatment] = outcome.counts["train"]["supervised_tokens"]
    assert lengths["supervise"] - lengths["mask"] == 2 * len(chat.encode_text("<think></think>").ids)
