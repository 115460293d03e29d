"""Public data sets as they are published: what becomes of each of their rows.

The files aren't part of the repository. They are looked for in the folder that SNAKETUNE_DATA names, else in `data/`;
for those that aren't there, there is no test.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Conversation, Dropped, Malformed, Preference, content_hash
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, SHORT

ROWS = {"conversations": Conversation, "preferences": Preference}

DATA = Path(os.environ.get("SNAKETUNE_DATA") or Path(__file__).parents[3] / "data")


class Real(NamedTuple):
    """A file, and what its rows become. `joined` rows became part of others."""

    file: str
    layout: str
    rows: int
    kind: str = CONVERSATIONS
    quarantined: dict[str, int] = {}
    dropped: dict[str, int] = {}
    joined: int = 0
    notes: dict[str, int] = {}
    repair: tuple[str, ...] = ()
    fields: dict[str, str] = {}
    frame: dict[str, str] | None = None


ONE_SIDED = ("merge-same-role", "drop-trailing-user")
SVAMP = {"prompt": "{Body} {Question}", "response": "{Answer}", "answer": "Answer", "task": "Type"}
SOLUTIONS = {"prompt": "question", "response": "ground_truth"}
OASST1 = "oasst1_en_val/en-validation.jsonl"
OASST = ("oasst_en_100_tree/en_100_tree.jsonl", "oasst_en_100_tree/en_100_message.jsonl")
PERSONA = "synthetic_persona_chat/Synthetic-Persona-Chat_{}.csv"
BBH = {
    "boolean_expressions": 250,
    "causal_judgement": 187,
    "date_understanding": 250,
    "disambiguation_qa": 250,
    "dyck_languages": 250,
    "formal_fallacies": 250,
    "geometric_shapes": 250,
    "hyperbaton": 250,
    "logical_deduction_five_objects": 250,
    "logical_deduction_seven_objects": 250,
    "logical_deduction_three_objects": 250,
    "movie_recommendation": 250,
    "multistep_arithmetic_two": 250,
    "navigate": 250,
    "object_counting": 250,
    "penguins_in_a_table": 146,
    "reasoning_about_colored_objects": 250,
    "ruin_names": 250,
    "salient_translation_error_detection": 250,
    "snarks": 178,
    "sports_understanding": 250,
    "temporal_sequences": 250,
    "tracking_shuffled_objects_five_objects": 250,
    "tracking_shuffled_objects_seven_objects": 250,
    "tracking_shuffled_objects_three_objects": 250,
    "web_of_lies": 250,
    "word_sorting": 250,
}
FILES = [
    Real("gsm8k/train.jsonl", "prompt-response", 7473),
    Real("gsm8k/test.jsonl", "prompt-response", 1319),
    Real("gsm8k/test_socratic.jsonl", "prompt-response", 1319),
    Real("gsm8k/example_model_solutions.jsonl", "prompt-response", 1319, fields=SOLUTIONS),
    Real(
        "dolly_hhrlhf_small/dolly_hhrlhf_train_small.jsonl",
        "prompt-response",
        1000,
        frame={
            "before": "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\n",
            "after": "\n\n### Response:\n",
        },
    ),
    Real("self_instruct/seed_tasks.jsonl", "instances", 175),
    Real("self_instruct/user_oriented_instructions.jsonl", "instances", 252),
    Real("raschka_instruct/instruction-data.json", "prompt-response", 1100),
    Real(
        "raschka_instruct/instruction-data-with-preference.json",
        "pairs",
        1094,
        PREFERENCES,
        {"identical_chosen_and_rejected": 6},
    ),
    Real(
        OASST1,
        "message-tree",
        188,
        quarantined={"orphan_node": 3},
        dropped={"other_branch": 1425, "deleted": 40},
        joined=366,
    ),
    Real(
        OASST1,
        "message-tree",
        710,
        PREFERENCES,
        {"orphan_node": 3, "identical_chosen_and_rejected": 1},
        {"unpaired": 434, "deleted": 40},
        834,
    ),
    *(Real(file, "message-tree", 100, notes={"synthetic_message": 5}) for file in OASST),
    *(Real(file, "message-tree", 429, PREFERENCES, notes={"synthetic_message": 12}) for file in OASST),
    Real("fastchat/dummy_conversation.json", "messages", 500),
    *(Real(f"sgd_dialogues/dialogues_{number}.json", "turns", 128) for number in ("001", "002", "004", "005")),
    Real("sgd_dialogues/dialogues_003.json", "turns", 127, quarantined={"empty_turn": 1}),
    Real(
        PERSONA.format("test"),
        "dialogue",
        966,
        quarantined={"not_a_dialogue": 2},
        notes={"repaired_drop_trailing_user": 434, "removed_stage_direction": 14, "repaired_merge_same_role": 18},
        repair=ONE_SIDED,
    ),
    Real(
        PERSONA.format("valid"),
        "dialogue",
        998,
        quarantined={"not_a_dialogue": 2},
        notes={"repaired_drop_trailing_user": 402, "removed_stage_direction": 20, "repaired_merge_same_role": 23},
        repair=ONE_SIDED,
    ),
    Real(
        "pandalm_test/testset-v1.json",
        "votes",
        836,
        PREFERENCES,
        {"empty_completion": 52, "wrong_type": 6},
        {"tie": 105},
    ),
    Real("svamp/SVAMP.json", "prompt-response", 1000, fields=SVAMP),
    *(Real(f"bbh/{task}.json", "prompt-response", rows) for task, rows in BBH.items()),
    Real("ifeval/input_data.jsonl", "auto", 0, quarantined={"unknown_layout": 541}),
]


class Shape(NamedTuple):
    """The first row of a file: who speaks, in the opening (in what both completions answer) and in all; how long each
    turn is; and what the last of them ends with.
    """

    file: str
    kind: str
    opening: str
    turns: str
    lengths: tuple[int, ...]
    end: str


DINNER = (60, 52, 79, 92, 20, 80, 51, 112, 81, 119, 19, 39, 27, 23)
SMALL_TALK = (42, 47, 49, 80, 129, 81, 87, 42, 25, 51, 57, 34, 49, 39, 25, 73, 67, 38, 69, 24, 27, 17)
SHAPES = [
    Shape("gsm8k/train.jsonl", CONVERSATIONS, "UA", "UA", (155, 126), "\n#### 72"),
    Shape("dolly_hhrlhf_small/dolly_hhrlhf_train_small.jsonl", CONVERSATIONS, "UA", "UA", (21, 497), "."),
    Shape("self_instruct/seed_tasks.jsonl", CONVERSATIONS, "UA", "UA", (127, 302), " calories."),
    Shape("raschka_instruct/instruction-data.json", CONVERSATIONS, "UA", "UA", (92, 89), '".'),
    Shape("raschka_instruct/instruction-data-with-preference.json", PREFERENCES, "U", "UAA", (92, 89, 111), '".'),
    Shape(OASST1, CONVERSATIONS, "UAUA", "UAUA", (32, 1410, 84, 672), "."),
    Shape(OASST1, PREFERENCES, "UAU", "UAUAA", (32, 1410, 84, 672, 118), "."),
    *(Shape(file, CONVERSATIONS, "UA", "UA", (47, 433), ".") for file in OASST),
    *(Shape(file, PREFERENCES, "U", "UAA", (47, 433, 405), ".") for file in OASST),
    Shape("fastchat/dummy_conversation.json", CONVERSATIONS, "UAUA", "UAUA", (12, 99, 16, 8), "!"),
    Shape("sgd_dialogues/dialogues_001.json", CONVERSATIONS, "UA" * 7, "UA" * 7, DINNER, "!"),
    Shape(PERSONA.format("test"), CONVERSATIONS, "UA" * 11, "UA" * 11, SMALL_TALK, ""),
    Shape("pandalm_test/testset-v1.json", PREFERENCES, "U", "UAA", (386, 46, 60), "."),
    Shape("svamp/SVAMP.json", CONVERSATIONS, "UA", "UA", (131, 2), "51"),
    Shape("bbh/boolean_expressions.json", CONVERSATIONS, "UA", "UA", (28, 5), "False"),
]
HERE = [real for real in FILES if (DATA / real.file).is_file()]
# An empty table would make a skipped test.
__test__ = bool(HERE)


def made(real: Real) -> list[Any]:
    source = Source(files=[real.file], fields=real.fields, frame=real.frame)
    raws = read_file(DATA / real.file, real.file)
    return list(canonical_rows(raws, kind=real.kind, source=source, repair=real.repair))


def roles(turns: list[dict[str, str]]) -> str:
    """`UAUA` for two exchanges."""
    short = {role: letter for letter, role in SHORT.items()}
    return "".join(short[turn["role"]] for turn in turns)


@pytest.mark.parametrize("real", HERE, ids=[f"{real.file}-{real.kind}" for real in HERE])
def test_every_row_is_accounted_for(real):
    rows, joined, layouts = 0, 0, Counter()
    quarantined, dropped, notes = Counter(), Counter(), Counter()
    for m in made(real):
        layouts[m.layout] += 1
        if m.row is None:
            joined += 1
        elif isinstance(m.row, Malformed):
            quarantined[m.row.reason] += 1
        elif isinstance(m.row, Dropped):
            dropped[m.row.reason] += 1
        else:
            assert type(m.row) is ROWS[real.kind] and content_hash(m.row)
            notes.update(m.row.notes)
            rows += 1
    assert set(layouts) == {real.layout}
    assert (rows, dict(quarantined), dict(dropped), joined) == (real.rows, real.quarantined, real.dropped, real.joined)
    assert dict(notes) == real.notes


SHAPES_HERE = [(shape, real) for shape in SHAPES for real in HERE if (real.file, real.kind) == shape[:2]]


@pytest.mark.parametrize("shape, real", SHAPES_HERE, ids=[f"{shape.file}-{shape.kind}" for shape, _ in SHAPES_HERE])
def test_the_first_row(shape, real):
    row = next(m.row for m in made(real) if isinstance(m.row, Conversation | Preference))
    assert (roles(row.opening), roles(row.turns)) == (shape.opening, shape.turns)
    assert tuple(len(turn["content"]) for turn in row.turns) == shape.lengths
    assert row.turns[-1]["content"].endswith(shape.end)
    # What the fields map, and what no column of the other files is for.
    assert (row.answer, row.task) == (("51", "Subtraction") if shape.file == "svamp/SVAMP.json" else (None, None))


EVERY_ROW = {
    "gsm8k": lambda row: row.reply.splitlines()[-1].startswith(("#### ", "A: ")),
    "dolly_hhrlhf_small": lambda row: "### Response" not in row.turns[0]["content"],
    "svamp": lambda row: row.answer == row.reply and row.task,
    "sgd_dialogues": lambda row: roles(row.turns) == "UA" * (len(row.turns) // 2),
    "pandalm_test": lambda row: row.chosen != row.rejected and len(row.prompt) == 1,
    "bbh": lambda row: row.reply.strip() and len(row.turns) == 2,
}
WITH_MORE = [real for real in HERE if real.file.split("/")[0] in EVERY_ROW]


@pytest.mark.parametrize("real", WITH_MORE, ids=[real.file for real in WITH_MORE])
def test_properties_of_every_row(real):
    holds = EVERY_ROW[real.file.split("/")[0]]
    assert all(holds(m.row) for m in made(real) if isinstance(m.row, Conversation | Preference))
