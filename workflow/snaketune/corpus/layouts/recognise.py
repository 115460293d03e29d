"""Recognition of a row's layout, by its columns and, where they are ambiguous, by their values."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.columns import columns_of
from snaketune.corpus.layouts.dialogues import dialogue_column
from snaketune.corpus.layouts.exchanges import INSTRUCTION_RESPONSES, prompt_and_response
from snaketune.corpus.layouts.message_trees import is_message, is_nested_tree
from snaketune.corpus.layouts.messages import may_be_serialized_turns
from snaketune.corpus.layouts.nearest_layout import nearest
from snaketune.corpus.layouts.preference_pairs import pair_columns
from snaketune.corpus.layouts.rated import is_rated
from snaketune.corpus.layouts.readers import LAYOUTS
from snaketune.corpus.layouts.transcripts import is_transcript
from snaketune.corpus.layouts.unpaired import LABEL_COLUMNS, is_labelled, label_value
from snaketune.corpus.layouts.vendor_turns import is_contents
from snaketune.corpus.layouts.votes import answer_columns, only_scored
from snaketune.corpus.rows import Malformed

# Beside these columns, a text that looks like a dialogue is part of the question.
PROMPT_COLUMNS = {"instruction", "prompt", "question", "input", "query", "response", "output", "answer", "completion"}


def recognise(
    raw: dict[str, Any], speakers: Mapping[str, str], dialogues: dict[tuple[str, ...], str], kind: str
) -> str:
    """Return the layout of `raw`.

    >>> recognise({"question": "1 + 1?", "answer": "2"}, {}, {}, "conversations")
    'prompt-response'

    Args:
        raw: a row without null columns.
        kind: the kind of the corpus.
        dialogues: by the columns of earlier dialogue rows, the column that held the dialogue; extended here. A row with
            the same columns is a dialogue too, even if its text is damaged.
    Raises:
        Malformed: no layout is recognised.
    """
    columns = tuple(raw)
    layout = _by_columns(columns)
    if layout == "sharegpt" and isinstance(raw.get("conversation"), str) and "conversations" not in raw:
        layout = "sharegpt" if may_be_serialized_turns(raw["conversation"]) else None
    elif layout == "turns" and not isinstance(raw["turns"], (list, str)):
        # The number of turns.
        layout = _by_columns(tuple(column for column in columns if column != "turns"))
    elif layout == "votes" and kind != "preferences" and only_scored(columns):
        layout = _by_columns(tuple(column for column in columns if column not in only_scored(columns)))
    if layout == "contents" and not is_contents(raw["contents"]):
        layout = None
    labelled = any(label_value(raw.get(column)) is not None for column in LABEL_COLUMNS)
    if kind == "preferences" and layout not in ("pairs", "votes") and not labelled and is_rated(raw):
        return "rated"
    if layout is None:
        if is_nested_tree(raw):
            return "message-tree"
        if columns not in dialogues:
            column = None if PROMPT_COLUMNS & raw.keys() else dialogue_column(raw, speakers)
            if column is None:
                raise Malformed("unknown_layout", f"{columns_of(raw)}; {nearest(columns, _of_kind(kind))}")
            dialogues[columns] = column
        return "dialogue"
    if (
        layout == "pairs"
        and is_transcript(raw.get("chosen"))
        and not raw.keys() & {"prompt", "question", "instruction"}
    ):
        return "transcripts"
    if layout in ("messages", "sharegpt", "alpaca", "prompt-response") and (
        kind == "unpaired" or is_labelled(raw, layout)
    ):
        return "unpaired"
    return layout


def check_kind(layout: str, kind: str, raw: dict[str, Any]) -> None:
    """Raise Malformed if `layout` doesn't give rows of this kind."""
    makes = LAYOUTS[layout].kinds
    if kind in makes:
        return
    hint = f"; {columns_of(raw)}; {nearest(tuple(raw), _of_kind(kind))}"
    if kind == "conversations":
        hint = ""
        layouts = (("output", "alpaca"), ("messages", "messages"), ("conversations", "sharegpt"))
        for column, other in (*layouts, *((label, "prompt-response") for label in LABEL_COLUMNS)):
            if column in raw:
                what = column if column not in LABEL_COLUMNS else "completion all the same"
                hint = f"; set layout: {other} to read its {what}"
                break
    raise Malformed(
        "wrong_kind", f"rows of layout {layout} are for kind {makes[0]}, and the corpus is of kind {kind}{hint}"
    )


@lru_cache
def _of_kind(kind: str) -> frozenset[str]:
    return frozenset(name for name, layout in LAYOUTS.items() if kind in layout.kinds)


@lru_cache(maxsize=4096)
def _by_columns(columns: tuple[str, ...]) -> str | None:
    names = set(columns)
    if pair_columns(columns) or names >= {"messages", "rejected_response"}:
        return "pairs"
    if answer_columns(columns):
        return "votes"
    if "messages" in names:
        return "messages"
    if names & {"conversations", "conversation"}:
        return "sharegpt"
    if names >= {"instruction", "instances"}:
        return "instances"
    if "instruction" in names and names.intersection(INSTRUCTION_RESPONSES):
        return "alpaca"
    if "turns" in names:
        return "turns"
    if names >= {"chat", "meta_instruction"}:
        return "moss"
    if is_message(names):
        return "message-tree"
    if prompt_and_response(columns):
        return "prompt-response"
    return "contents" if "contents" in names else None
