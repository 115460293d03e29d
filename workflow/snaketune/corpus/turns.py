"""Turns from what rows hold: lists of messages in two spellings, bare texts, and texts with a template baked in."""

import math
import re
from typing import Any

from snaketune.corpus.rows import Malformed, Message

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
}
# The wrapping that Stanford Alpaca trained with, and that many data sets since have kept inside their prompts.
ALPACA_TEMPLATE = re.compile(
    r"Below is an instruction that describes a task[^\n]*\n\n### Instruction:\n(?P<instruction>.*?)"
    r"(?:\n\n### Input:\n(?P<input>.*?))?\n\n### Response:\s*",
    re.DOTALL,
)


def turns_of(value: Any, where: str) -> list[Message]:
    """A list of {role, content} or {from, value} as turns in our names of the roles.

    >>> turns_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "conversations")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(value, list):
        raise Malformed("wrong_type", f"{where} holds {kind_of(value)}, expected a list of turns")
    if not value:
        raise Malformed("empty_turn", f"{where} has no turns")
    return [_turn(item, f"{where}, turn {number}") for number, item in enumerate(value, start=1)]


def prompt_turns(value: Any, where: str) -> tuple[list[Message], tuple[str, ...]]:
    """A prompt, given as text or as turns, and what there is to note. An Alpaca template around a text is taken off."""
    if not isinstance(value, str):
        return turns_of(value, where), ()
    wrapped = ALPACA_TEMPLATE.fullmatch(value)
    if not wrapped:
        return [{"role": "user", "content": value}], ()
    given = wrapped["input"] or ""
    content = f"{wrapped['instruction']}\n\n{given}" if given.strip() else wrapped["instruction"]
    return [{"role": "user", "content": content}], ("unwrapped_alpaca_template",)


def completion_turns(value: Any, where: str) -> list[Message]:
    """A completion, given as the assistant's text or as turns."""
    if value == []:
        raise Malformed("empty_completion", f"{where} has no turns")
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else turns_of(value, where)


def plain_text(value: Any) -> str | None:
    """A text as it is, a number or truth value as one would write it down; None for anything else.

    >>> plain_text(51.0), plain_text(0.25), plain_text(True), plain_text([1])
    ('51', '0.25', 'true', None)
    """
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return str(int(value)) if value.is_integer() and abs(value) < 2**53 else str(value)
        case _:
            return None


def kind_of(value: Any) -> str:
    """The type of a value, for messages."""
    return "null" if value is None else type(value).__name__


def _turn(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise Malformed("wrong_type", f"{where} holds {kind_of(item)}, expected role and content")
    role_key, content_key = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    for key in (role_key, content_key):
        if key not in item:
            raise Malformed("missing_column", f"{where} has no {key}")
        if not isinstance(item[key], str):
            raise Malformed("wrong_type", f"{where}: {key} holds {kind_of(item[key])}, expected a text")
    if item[role_key] not in ROLES:
        raise Malformed("unknown_role", f"{where}: {item[role_key][:40]!r}; expected {', '.join(ROLES)}")
    if item.get("tool_calls"):
        raise Malformed("unsupported_turn", f"{where} has tool_calls, which plain turns can't hold")
    return {"role": ROLES[item[role_key]], "content": item[content_key]}
