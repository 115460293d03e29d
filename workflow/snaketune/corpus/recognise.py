"""Which layout a row has, by its columns and, where they leave it open, by what they hold."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.dialogues import dialogue_column
from snaketune.corpus.mapped import columns_of
from snaketune.corpus.pairs import is_transcript
from snaketune.corpus.rows import Malformed
from snaketune.corpus.trees import is_message, is_nested_tree
from snaketune.corpus.unpaired import verdict
from snaketune.corpus.votes import answer_columns

PROMPT_AND_RESPONSE = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "response"),
    ("question", "completion"),
    ("question", "answer"),
    ("input", "output"),
    ("input", "target"),
)
# Beside these, a text that looks like a dialogue is what the row asks about.
ASKS = {"instruction", "prompt", "question", "input", "query", "response", "output", "answer", "completion"}
KINDS = {
    "messages": "conversations",
    "sharegpt": "conversations",
    "turns": "conversations",
    "dialogue": "conversations",
    "alpaca": "conversations",
    "instances": "conversations",
    "prompt-response": "conversations",
    "pairs": "preferences",
    "transcripts": "preferences",
    "votes": "preferences",
    "unpaired": "preferences",
}


def recognise(raw: dict[str, Any], speakers: Mapping[str, str], dialogues: dict[tuple[str, ...], str]) -> str:
    """The layout that `raw` has.

    >>> recognise({"question": "1 + 1?", "answer": "2"}, {}, {})
    'prompt-response'

    Args:
        raw: a row without null columns.
        dialogues: for the columns of earlier rows that were dialogues, which one held it; added to. A row with the
            same columns is one too, even if its text is damaged.
    Raises:
        Malformed: none is known.
    """
    columns = tuple(raw)
    layout = _by_columns(columns)
    if layout is None:
        if is_nested_tree(raw):
            return "message-tree"
        if columns not in dialogues:
            column = None if ASKS & raw.keys() else dialogue_column(raw, speakers)
            if column is None:
                raise Malformed("unknown_layout", f"{columns_of(raw)}; map them with `fields`")
            dialogues[columns] = column
        return "dialogue"
    if layout == "pairs" and is_transcript(raw["chosen"]) and not raw.keys() & {"prompt", "question", "instruction"}:
        return "transcripts"
    if layout == "prompt-response" and "prompt" in raw and verdict(raw.get("label")) is not None:
        # Taken for a plain exchange, the bad completions would be learned like the good ones.
        return "unpaired"
    return layout


def check_kind(layout: str, kind: str, raw: dict[str, Any]) -> None:
    """Raise Malformed if `layout` doesn't make rows of this kind; trees make both."""
    if KINDS.get(layout, kind) == kind:
        return
    hint = ""
    if kind == "conversations":
        for column, other in (("output", "alpaca"), ("messages", "messages"), ("label", "prompt-response")):
            if column in raw:
                hint = f"; set layout: {other} to read its {column if column != 'label' else 'completion all the same'}"
                break
    raise Malformed("wrong_kind", f"the row ({layout}) is one of {KINDS[layout]}, the corpus holds {kind}{hint}")


@lru_cache(maxsize=4096)
def prompt_and_response(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """The columns that hold a prompt and its response."""
    return next((pair for pair in PROMPT_AND_RESPONSE if set(pair) <= set(columns)), None)


@lru_cache(maxsize=4096)
def _by_columns(columns: tuple[str, ...]) -> str | None:
    names = set(columns)
    if names >= {"chosen", "rejected"}:
        return "pairs"
    if answer_columns(columns):
        return "votes"
    if "messages" in names:
        return "messages"
    if names & {"conversations", "conversation"}:
        return "sharegpt"
    if names >= {"instruction", "instances"}:
        return "instances"
    if "instruction" in names and names & {"output", "response"}:
        return "alpaca"
    if "turns" in names:
        return "turns"
    if is_message(names):
        return "message-tree"
    return "prompt-response" if prompt_and_response(columns) else None
