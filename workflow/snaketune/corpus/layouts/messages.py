"""Turns from lists of messages, in all formats that data sets use."""

import json
import re
from collections.abc import Mapping
from typing import Any

from snaketune.corpus.layouts.call_order import RESULT_KEY, in_call_order
from snaketune.corpus.layouts.content_parts import CALLS_KEYS, REASONING_KEYS, calls_text, content_of, kind_of, text_of
from snaketune.corpus.layouts.loss_flags import KEYS as WEIGHT_KEYS
from snaketune.corpus.layouts.loss_flags import is_supervised
from snaketune.corpus.layouts.media import refuse_media
from snaketune.corpus.layouts.roles import CALLERS, NO_SPEAKERS, ROLES, Speakers, role_of
from snaketune.corpus.layouts.vendor_turns import has_tool_results, split_tool_results
from snaketune.corpus.rows import Malformed, Message

SPEAKER_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "utterance", "text")
# Items that are two turns: the user's, and the answer.
EXCHANGE_KEYS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
# Turns in a text, as in a CSV: as JSON, or as a Python literal.
SERIALIZED_TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|speaker|content|value|weight)["']\s*:""")


def turns_of(value: Any, where: str, speakers: Speakers = NO_SPEAKERS) -> list[Message]:
    """Return a list of {role, content}, {from, value} or {speaker, utterance} as turns with canonical roles.

    >>> turns_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "conversations")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]

    Args:
        speakers: roles of further speakers, or other roles for known ones.
    """
    if may_be_serialized_turns(value):
        value = parse_turns(value, where)
    if not isinstance(value, list):
        raise Malformed("wrong_type", f"{where} holds {kind_of(value)}, expected turns")
    if not value:
        raise Malformed("empty_turn", f"{where} has no turns")
    turns: list[Message] = []
    has_result_ids = False
    for number, item in enumerate(value, start=1):
        # A fast path for nearly all turns, at a third of the cost.
        if type(item) is dict and len(item) == 2 and not speakers:
            speaker, content = item.get("role") or item.get("from"), item.get("content")
            if content is None:
                content = item.get("value")
            if type(speaker) is str and type(content) is str and speaker in ROLES:
                turns.append({"role": ROLES[speaker], "content": content})
                continue
        if pair_keys := exchange_keys(item):
            system = item.get("system")
            # Each item may repeat the system turn of the first.
            if system and {"role": "system", "content": system} != (turns[0] if turns else None):
                turns.append({"role": "system", "content": text_of(system, f"{where}, item {number}, system")})
            for key, role in zip(pair_keys, ("user", "assistant")):
                turns.append({"role": role, "content": text_of(item[key], f"{where}, item {number}, {key}")})
            if not is_supervised(item, f"{where}, item {number}"):
                turns[-1]["supervised"] = False
            continue
        if has_tool_results(item):
            return turns_of(split_tool_results(value), where, speakers)
        turn = _turn(item, f"{where}, turn {number}", speakers)
        turns.append(turn if is_supervised(item, f"{where}, turn {number}") else turn | {"supervised": False})
        has_result_ids = has_result_ids or (turn["role"] == "tool" and RESULT_KEY in item)
    return in_call_order(value, turns, where) if has_result_ids else turns


def may_be_serialized_turns(value: Any) -> bool:
    """Return True if a value is a text that begins like a list of turns."""
    return type(value) is str and value[:1] in "[ \n" and SERIALIZED_TURNS.match(value) is not None


def parse_turns(text: str, where: str) -> list[Any]:
    """Parse the list of turns in a text, as JSON.

    Raises:
        Malformed: it isn't JSON but the repr of Python or numpy, which can't be read back without guessing.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise Malformed(
            "turns_as_text", f"{where} holds turns as a text that isn't valid JSON; write it with json.dumps"
        )
    return value


def _turn(item: Any, where: str, speakers: Speakers) -> Message:
    if not isinstance(item, dict):
        hint = (
            "; texts of alternating speakers are read if `fields.messages` names the column"
            if isinstance(item, str)
            else ""
        )
        raise Malformed(
            "wrong_type", f"{where} holds {kind_of(item)}, expected an object with speaker and content{hint}"
        )
    refuse_media(item, f"{where}: ")
    speaker_key, content_key = _keys(item)
    speaker = item[speaker_key] if speaker_key else ""
    if not isinstance(speaker, str):
        raise Malformed("wrong_type", f"{where}: {speaker_key} holds {kind_of(speaker)}, expected a text")
    if not speaker.strip():
        raise Malformed("missing_speaker", f"{where} doesn't name its speaker (role, from or speaker)")
    content = item[content_key] if content_key else None
    if speaker in CALLERS and speaker not in speakers:
        return {"role": "assistant", "content": calls_text(content, where)}
    role = role_of(speaker, speakers)
    if role is None:
        raise Malformed(
            "unknown_role",
            f"{where}: unknown speaker {speaker[:40]!r}; map it with `speakers`, or use {', '.join(ROLES)}",
        )
    if content_key is None and not any(item.get(key) for key in CALLS_KEYS):
        raise Malformed("missing_column", f"{where} has no content")
    return {"role": role, "content": content_of(item, content, role, where)}


def keys_read(turn: Mapping[str, Any]) -> set[str | None]:
    """Return the keys of a turn that are read: speaker, content, supervision, the first reasoning and the first calls."""
    others = (next((key for key in keys if turn.get(key)), None) for keys in (REASONING_KEYS, CALLS_KEYS))
    return {*_keys(turn), *others, *WEIGHT_KEYS, RESULT_KEY}


def _keys(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the keys of speaker and content; in tables, all turns have all keys, and some are null."""
    content = next((key for key in CONTENT_KEYS if turn.get(key) is not None), None)
    return (
        next((key for key in SPEAKER_KEYS if turn.get(key) is not None), None),
        content or next((key for key in CONTENT_KEYS if key in turn), None),
    )


def exchange_keys(item: Any) -> tuple[str, str] | None:
    """Return the keys of an item that is two turns, the user's and the answer; None if it is one turn."""
    if not isinstance(item, dict) or any(item.get(key) is not None for key in SPEAKER_KEYS):
        return None
    return next((keys for keys in EXCHANGE_KEYS if item.keys() >= set(keys)), None)
