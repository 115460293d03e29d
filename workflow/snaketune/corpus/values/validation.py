"""Repairs of canonical rows, where the config says so, and their validity: the order of roles, and text in every turn.

Repairs run in the order of STEPS, because each can make work for the next. Rows with images, audio or video beside the text
are refused, because the text has another meaning without them.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import dropwhile
from typing import Any

from snaketune.corpus.rows import Conversation, Malformed, Message, Preference, Row

# Links to video and audio are mostly the source of a text.
MEDIA_KEY = re.compile(
    r"(?:image|picture|photo|img|audio|video)(?:s|_?\d+|_(?:paths?|files?|bytes))?|(?:image|picture|photo|img)_urls?",
    re.IGNORECASE,
)
# The placeholder of an image in a user's text; with an end tag it is markup.
PLACEHOLDER, END = "<image>", "</image>"
OTHER_PLACEHOLDERS = re.compile(r"<(?:image|video|audio)[ _]?\d+>|^\s*<(?:video|audio)>|<(?:video|audio)>\s*\Z")
# Values of empty cells in tables.
EMPTY_CELLS = ("", "nan", "none", "null", "[]", "{}", "false", "0")
OPEN_REASONING = "open-reasoning"
# The roles that may follow each role; None is the beginning.
MAY_FOLLOW = {
    None: {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}


def refuse_media(holder: Mapping[str, Any], where: str = "") -> None:
    """Raise Malformed if a row or a turn has a media key that isn't empty."""
    for key in media_keys(tuple(holder)):
        if _holds_any(holder[key]):
            what = "belongs to the text, which can't represent it; remove such rows, or the key if it isn't needed"
            raise Malformed("unsupported_part", f"{where}{key} {what}")


@lru_cache(maxsize=4096)
def media_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if MEDIA_KEY.fullmatch(key))


def _holds_any(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_holds_any, value.values()))
        case list():
            return any(map(_holds_any, value))
        case str():
            return value.strip().lower() not in EMPTY_CELLS
    return bool(value)


def _shows_media(text: str) -> bool:
    return (PLACEHOLDER in text and END not in text) or OTHER_PLACEHOLDERS.search(text) is not None


def check(row: Row) -> None:
    if isinstance(row, Conversation):
        turns = row.messages
        last = turns[-1]["role"] if turns else None
        if last != "assistant" and not any(turn["role"] == "assistant" for turn in turns):
            raise Malformed("no_assistant_turn", f"none of the {len(turns)} turns is the assistant's")
        _check_turns(turns)
        if last != "assistant":
            raise Malformed(f"ends_on_{last}", "the last turn isn't the assistant's, so it can't be trained on")
        return
    if not row.prompt:
        raise Malformed("empty_turn", "the prompt has no turns")
    for name in row.columns[1:]:
        for turn in getattr(row, name):
            if turn["content"] and not turn["content"].isspace():
                break
        else:
            raise Malformed("empty_completion", f"{name} has no text")
    if row.prompt[-1]["role"] not in ("user", "tool"):
        raise Malformed("turn_out_of_order", f"the prompt ends on {row.prompt[-1]['role']}, expected user")
    for name in row.columns[1:]:
        turns = getattr(row, name)
        _check_turns(row.prompt + turns, f"prompt + {name}: ")
        if (last := turns[-1]["role"]) != "assistant":
            raise Malformed(f"ends_on_{last}", f"the last turn of {name} isn't the assistant's")
    if isinstance(row, Preference) and len(row.chosen) == len(row.rejected):
        for ours, theirs in zip(row.chosen, row.rejected):
            if ours["content"] != theirs["content"] or ours["role"] != theirs["role"]:
                return
        raise Malformed("identical_chosen_and_rejected", "chosen and rejected are the same")


def _check_turns(turns: list[Message], where: str = "") -> None:
    before = None
    for number, turn in enumerate(turns, start=1):
        role, content = turn["role"], turn["content"]
        if where and turn.get("weight", 1) not in (0, 1):
            what = f"has weight {turn['weight']:g}; completions are compared as wholes, so expected 0 or 1"
            raise Malformed("unsupported_weight", f"{where}turn {number} {what}")
        # `isspace` stops at the first other character, and copies nothing.
        if not content or content.isspace():
            raise Malformed("empty_turn", f"{where}turn {number} ({role}) has no text")
        if role not in MAY_FOLLOW[before]:
            if role == before:
                raise Malformed("two_turns_in_a_row", f"{where}turns {number - 1} and {number} are both {role}")
            position = f"follows {before}" if before else "comes first"
            raise Malformed("turn_out_of_order", f"{where}turn {number} ({role}) {position}")
        if (
            role == "assistant"
            and "think>" in content
            and not turns[number - 2]["content"].rstrip().endswith("<think>")
        ):
            # A prompt may end in a template that opens the reasoning.
            _check_reasoning(content, f"{where}turn {number}")
        if role == "user" and "<" in content and _shows_media(content):
            what = f"has a placeholder of an image or audio (such as {PLACEHOLDER}); text can't represent it"
            raise Malformed("unsupported_part", f"{where}turn {number} {what}")
        before = role


def _check_reasoning(text: str, where: str) -> None:
    """Raise Malformed if reasoning is closed and not opened, or opened and not closed."""
    if "</think>" in text and "<think>" not in text:
        what = "closes reasoning that it doesn't open; `repair: [open-reasoning]` opens it at the beginning"
        raise Malformed("reasoning_not_opened", f"{where} {what}")
    if text.lstrip().startswith("<think>") and "</think>" not in text:
        what = "opens reasoning that it doesn't close: its answer is missing"
        raise Malformed("reasoning_not_closed", f"{where} {what}")


def drop_empty_system_turn(row: Row) -> None:
    """Remove a system turn without text at the beginning of `row`, and note it: it says nothing, like an empty column."""
    first = row.opening[0] if row.opening else {}
    if first.get("role") == "system" and (not first["content"] or first["content"].isspace()):
        del row.opening[0]
        row.notes += ("empty_system_turn",)


def repairs_for(row: Row) -> tuple[str, ...]:
    """Return the repairs that make `row` valid, which changes it; none if it can't be repaired."""
    repairs = (OPEN_REASONING, *STEPS)
    repair_row(row, repairs)
    try:
        check(row)
    except Malformed:
        return ()
    return tuple(name for name in repairs if _note(name) in row.notes)


def repair_row(row: Row, repair: tuple[str, ...]) -> None:
    """Apply the named repairs to `row`, and note each one that changed it.

    >>> row = Conversation(messages=[{"role": "user", "content": text} for text in ("a", "b")])
    >>> repair_row(row, ("merge-same-role",))
    >>> row.messages, row.notes
    ([{'role': 'user', 'content': 'a\\n\\nb'}], ('repaired_merge_same_role',))
    """
    if OPEN_REASONING in repair and _open_reasoning(row.turns):
        row.notes += (_note(OPEN_REASONING),)
    for name, step in STEPS.items():
        if name not in repair or (name == "drop-trailing-user" and not isinstance(row, Conversation)):
            continue
        repaired = step(row.opening)
        if len(repaired) != len(row.opening):
            row.opening[:] = repaired
            row.notes += (_note(name),)


def _note(repair: str) -> str:
    return f"repaired_{repair.replace('-', '_')}"


def _open_reasoning(turns: list[Message]) -> bool:
    """Open the reasoning that answers only close, in place; return whether there was any."""
    unopened = [
        turn
        for turn in turns
        if turn["role"] == "assistant" and "</think>" in turn["content"] and "<think>" not in turn["content"]
    ]
    for turn in unopened:
        turn["content"] = f"<think>\n{turn['content'].lstrip()}"
    return bool(unopened)


def _without_empty_turns(turns: list[Message]) -> list[Message]:
    return [turn for turn in turns if turn["content"].strip()]


def _merged(turns: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for turn in turns:
        # Results of two calls stay two turns; and one turn has one weight.
        last = merged[-1] if merged else {}
        if last.get("role") == turn["role"] != "tool" and last.get("weight", 1) == turn.get("weight", 1):
            merged[-1] = {**turn, "content": f"{last['content']}\n\n{turn['content']}"}
        else:
            merged.append(turn)
    return merged


def _without_leading_assistant(turns: list[Message]) -> list[Message]:
    """Remove the assistant's turns before the first user turn."""
    system = [turn for turn in turns[:1] if turn["role"] == "system"]
    return system + list(dropwhile(lambda turn: turn["role"] == "assistant", turns[len(system) :]))


def _without_trailing_user(turns: list[Message]) -> list[Message]:
    """Remove user turns without an answer at the end."""
    return list(dropwhile(lambda turn: turn["role"] == "user", turns[::-1]))[::-1]


STEPS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "drop-empty-turns": _without_empty_turns,
    "merge-same-role": _merged,
    "drop-leading-assistant": _without_leading_assistant,
    "drop-trailing-user": _without_trailing_user,
}
