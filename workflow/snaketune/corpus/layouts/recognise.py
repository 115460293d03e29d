"""Recognition of a row's layout, by its columns and, where they are ambiguous, by their values; else the nearest layout."""

import re
from functools import lru_cache

from snaketune.corpus.layouts.dialogues import dialogue_column
from snaketune.corpus.layouts.exchanges import INSTRUCTION_RESPONSES, prompt_and_response
from snaketune.corpus.layouts.message_trees import is_nested_tree
from snaketune.corpus.layouts.messages import may_be_serialized_turns
from snaketune.corpus.layouts.pairs import pair_columns, rating_columns
from snaketune.corpus.layouts.readers import LAYOUTS, RowFile
from snaketune.corpus.layouts.templates import is_transcript
from snaketune.corpus.layouts.unpaired import LABEL_COLUMNS, is_labelled, label_value
from snaketune.corpus.layouts.values import Raw, columns_of
from snaketune.corpus.layouts.vendor_turns import is_contents
from snaketune.corpus.layouts.votes import answer_columns, only_scored
from snaketune.corpus.rows import Malformed

# Beside these columns, a text that looks like a dialogue is part of the question.
PROMPT_COLUMNS = {"instruction", "prompt", "question", "input", "query", "response", "output", "answer", "completion"}
ADVICE = "map columns with `fields`"
# Layouts of another kind of corpus that a row would have without one column, and what that column is.
OTHER_LAYOUTS = (
    ("output", "alpaca", "output"),
    ("messages", "messages", "messages"),
    ("conversations", "sharegpt", "conversations"),
    *((label, "prompt-response", "completion all the same") for label in LABEL_COLUMNS),
)


def recognise(raw: Raw, file: RowFile) -> str:
    """Return the layout of `raw`, a row without null columns; the column of a dialogue is recorded in `file`.

    >>> from snaketune.config.corpus_sources import Source
    >>> recognise({"question": "1 + 1?", "answer": "2"}, RowFile("conversations", Source(files=("x",))))
    'prompt-response'
    """
    columns = tuple(raw)
    layout = _by_columns(columns)
    if layout == "sharegpt" and isinstance(raw.get("conversation"), str) and "conversations" not in raw:
        layout = "sharegpt" if may_be_serialized_turns(raw["conversation"]) else None
    elif layout == "turns" and not isinstance(raw["turns"], (list, str)):
        # The number of turns.
        layout = _by_columns(tuple(column for column in columns if column != "turns"))
    elif layout == "votes" and file.kind != "preferences" and only_scored(columns):
        layout = _by_columns(tuple(column for column in columns if column not in only_scored(columns)))
    if layout == "contents" and not is_contents(raw["contents"]):
        layout = None
    may_be_rated = file.kind == "preferences" and layout not in ("pairs", "votes") and rating_columns(raw)
    if may_be_rated and all(label_value(raw.get(column)) is None for column in LABEL_COLUMNS):
        return "rated"
    if layout is None:
        if is_nested_tree(raw):
            return "message-tree"
        if columns not in file.dialogues:
            column = None if PROMPT_COLUMNS & raw.keys() else dialogue_column(raw, file.speakers)
            if column is None:
                raise Malformed("unknown_layout", f"{columns_of(raw)}; {nearest(columns, _of_kind(file.kind))}")
            file.dialogues[columns] = column
        return "dialogue"
    if layout == "pairs" and is_transcript(raw.get("chosen")):
        return layout if raw.keys() & {"prompt", "question", "instruction"} else "transcripts"
    may_be_labelled = layout in ("messages", "sharegpt", "alpaca", "prompt-response")
    return "unpaired" if may_be_labelled and (file.kind == "unpaired" or is_labelled(raw, layout)) else layout


def check_kind(layout: str, kind: str, raw: Raw) -> None:
    """Raise Malformed if `layout` doesn't give rows of this kind."""
    kinds = LAYOUTS[layout].kinds
    if kind in kinds:
        return
    hint = f"; {columns_of(raw)}; {nearest(tuple(raw), _of_kind(kind))}"
    if kind == "conversations":
        others = (f"; set layout: {other} to read its {what}" for column, other, what in OTHER_LAYOUTS if column in raw)
        hint = next(others, "")
    what = f"rows of layout {layout} are for kind {kinds[0]}, and the corpus is of kind {kind}{hint}"
    raise Malformed("wrong_kind", what)


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
    if names >= {"message_id", "role"}:
        # `parent_id` and `text` may be missing.
        return "message-tree"
    if prompt_and_response(columns):
        return "prompt-response"
    return "contents" if "contents" in names else None


@lru_cache(maxsize=1024)
def nearest(columns: tuple[str, ...], layouts: frozenset[str]) -> str:
    """Return the nearest layout, the columns that it lacks, and what to do, as text.

    >>> nearest(("prompt", "chosen"), frozenset({"pairs", "votes"}))
    'nearest: pairs (prompt, chosen, rejected); `rejected` is missing; or map columns with `fields`'
    """
    by_plain_name = {_plain(column): column for column in columns}
    candidates: list[tuple[int, int, str]] = []
    for layout, needs in ((name, needs) for name in LAYOUTS if name in layouts for needs in LAYOUTS[name].needs):
        names_shown, missing, other = [], [], []
        for names in needs:
            name = next((name for name in names if name in columns), None)
            alike = None if name else next((name for name in names if _plain(name) in by_plain_name), None)
            names_shown.append(name or alike or names[0])
            if alike:
                other.append(f"`{by_plain_name[_plain(alike)]}` would have to be called `{alike}`")
            elif name is None:
                missing.append(f"`{names[0]}` is missing")
        if len(missing) < len(needs):
            what = f"nearest: {layout} ({', '.join(names_shown)}); {', '.join(missing + other)}"
            # A column with another spelling counts as half a missing one.
            candidates.append((2 * len(missing) + len(other), -len(needs), what))
    best = min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else ""
    if layouts == _of_kind("unpaired"):
        # `fields` has no key for the label of a completion.
        return best or "expected prompt, completion, label"
    otherwise = f"{ADVICE}, or read documents by a corpus of kind text" if "text" in columns else ADVICE
    return f"{best}; or {otherwise}" if best else otherwise


def nearest_beside(columns: tuple[str, ...], kind: str, layout: str) -> str:
    """The nearest layout of a kind of corpus apart from the one that was recognised, as text."""
    return nearest(columns, _of_kind(kind) - {layout})


def _plain(name: str) -> str:
    """Return a name in lower case, without plural and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.casefold()).rstrip("s")
