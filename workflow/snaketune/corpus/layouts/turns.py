"""Turns from what rows hold: lists of messages in several spellings, bare texts, and texts with a template baked in."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from snaketune.corpus.layouts.parts import CALLS_KEYS, REASONING_KEYS, calls_text, content_of, kind_of, text_of
from snaketune.corpus.layouts.supervision import KEYS as WEIGHT_KEYS
from snaketune.corpus.layouts.supervision import is_supervised
from snaketune.corpus.layouts.templates import may_be_framed, unwrapped, without_end
from snaketune.corpus.rows import Conversation, Malformed, Message, Row

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function response": "tool",
    "ipython": "tool",
}
# Speakers whose text is nothing but a call, which the assistant makes.
CALLERS = ("function_call", "tool_call")
SPEAKER_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "utterance", "text")
# Items that are two turns: what the user says, and the answer.
EXCHANGE_KEYS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
# Turns written into a text, as a CSV has to: as JSON, or in Python's spelling.
SPELLED_TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|speaker|content|value|weight)["']\s*:""")
Speakers = Mapping[str, str]
NO_SPEAKERS: Speakers = {}


def turns_of(value: Any, where: str, speakers: Mapping[str, str] = NO_SPEAKERS) -> list[Message]:
    """A list of {role, content}, {from, value} or {speaker, utterance} as turns in our names of the roles.

    >>> turns_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "conversations")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]

    Args:
        speakers: roles of further speakers, or other roles of known ones.
    """
    if may_spell_turns(value):
        value = spelled_turns(value, where)
    if not isinstance(value, list):
        raise Malformed("wrong_type", f"{where} holds {kind_of(value)}, expected turns")
    if not value:
        raise Malformed("empty_turn", f"{where} has no turns")
    turns: list[Message] = []
    for number, item in enumerate(value, start=1):
        # Nearly every turn there is, at a third of the cost.
        if type(item) is dict and len(item) == 2 and not speakers:
            speaker, content = item.get("role") or item.get("from"), item.get("content")
            if content is None:
                content = item.get("value")
            if type(speaker) is str and type(content) is str and speaker in ROLES:
                turns.append({"role": ROLES[speaker], "content": content})
                continue
        if both := exchange_keys(item):
            for key, role in zip(both, ("user", "assistant")):
                turns.append({"role": role, "content": text_of(item[key], f"{where}, item {number}, {key}")})
            continue
        turn = _turn(item, f"{where}, turn {number}", speakers)
        turns.append(turn if is_supervised(item, f"{where}, turn {number}") else turn | {"supervised": False})
    return turns


def may_spell_turns(value: Any) -> bool:
    """Whether a value is a text with a list of turns in it, going by how it begins."""
    return type(value) is str and value[:1] in "[ \n" and SPELLED_TURNS.match(value) is not None


def spelled_turns(text: str, where: str) -> list[Any]:
    """The list of turns that is written into a text, as JSON.

    Raises:
        Malformed: it is no JSON: Python's own spelling, or that of numpy, which can't be read back without guessing.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise Malformed(
            "turns_as_text", f"{where} holds a text that spells turns but is no JSON; write it with json.dumps"
        )
    return value


def role_of(speaker: str, speakers: Mapping[str, str] = NO_SPEAKERS) -> str | None:
    """The role of a speaker, or None; how it is capitalised matters only in `speakers`."""
    return speakers.get(speaker) or ROLES.get(speaker) or ROLES.get(speaker.lower())


def exchange(
    prompt: Any, completions: Mapping[str, Any], speakers: Mapping[str, str] = NO_SPEAKERS
) -> tuple[list[Message], list[list[Message]], tuple[str, ...]]:
    """A prompt and what completes it, and what there is to note.

    A template around the prompt is taken off, and then the end-of-turn strings of the completions too.

    Args:
        prompt: a text, or turns.
        completions: by the column that each comes from.
    """
    spelled = not isinstance(prompt, str) or may_spell_turns(prompt)
    answers = [completion_turns(value, where, speakers, spelled=spelled) for where, value in completions.items()]
    if spelled:
        return turns_of(prompt, "prompt", speakers), answers, ()
    found = unwrapped(prompt)
    if found is None:
        return [{"role": "user", "content": prompt}], answers, ()
    turns, note = found
    notes = (note,)
    for answer in answers:
        bare = without_end(answer[-1]["content"])
        if bare != answer[-1]["content"]:
            answer[-1]["content"], notes = bare, (note, "removed_end_of_turn")
        if not prompt[-1].isspace():
            # After "ASSISTANT:", the space belongs to the template.
            answer[0]["content"] = answer[0]["content"].removeprefix(" ")
    return turns, answers, notes


def unframe(row: Row) -> None:
    """Take the templates off what users say in a row, in place, and then the end-of-turn strings off the answers.

    A template around the first turn may hold further turns. One around a later turn that does would tell the
    conversation anew, and is refused.
    """
    for turn in row.opening:
        if turn["role"] == "user" and may_be_framed(turn["content"]):
            break
    else:
        return
    if any(note.startswith("unwrapped_") for note in row.notes):
        return
    bare: list[Message] = []
    notes: list[str] = []
    for turn in row.opening:
        found = unwrapped(turn["content"]) if turn["role"] == "user" else None
        if found is None:
            bare.append(turn)
            continue
        inside, note = found
        if len(inside) > 1 and any(earlier["role"] == "user" for earlier in bare):
            raise Malformed("baked_in_template", "a template frames a later turn of the user, and holds several turns")
        bare += inside
        notes.append(note)
    if not notes:
        return
    row.opening[:] = bare
    parts = (row.messages,) if isinstance(row, Conversation) else (row.prompt, row.chosen, row.rejected)
    for part in parts:
        for i, turn in enumerate(part):
            text = without_end(turn["content"]) if turn["role"] == "assistant" else turn["content"]
            if text != turn["content"]:
                part[i] = {**turn, "content": text}
                notes.append("removed_end_of_turn")
    row.notes += tuple(dict.fromkeys(notes))


def completion_turns(
    value: Any, where: str, speakers: Mapping[str, str] = NO_SPEAKERS, *, spelled: bool = False
) -> list[Message]:
    """A completion, given as the assistant's text, as {text: …}, as one turn, or as turns.

    Args:
        spelled: whether a text that spells turns is taken for them. An answer may well be some JSON with roles in it.
    """
    if isinstance(value, str) and not (spelled and may_spell_turns(value)):
        return [{"role": "assistant", "content": value}]
    if value == []:
        raise Malformed("empty_completion", f"{where} has no turns")
    if isinstance(value, dict):
        if value.get("text") is not None and not any(value.get(key) is not None for key in SPEAKER_KEYS):
            return [{"role": "assistant", "content": text_of(value["text"], where)}]
        value = [value]
    return turns_of(value, where, speakers)


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


def _turn(item: Any, where: str, speakers: Mapping[str, str]) -> Message:
    if not isinstance(item, dict):
        raise Malformed("wrong_type", f"{where} holds {kind_of(item)}, expected who speaks and what")
    speaker_key, content_key = _keys(item)
    speaker = item[speaker_key] if speaker_key else ""
    if not isinstance(speaker, str):
        raise Malformed("wrong_type", f"{where}: {speaker_key} holds {kind_of(speaker)}, expected a text")
    if not speaker.strip():
        raise Malformed("missing_speaker", f"{where} doesn't say who speaks (role, from or speaker)")
    content = item[content_key] if content_key else None
    if speaker in CALLERS and speaker not in speakers:
        return {"role": "assistant", "content": calls_text(content, where)}
    role = role_of(speaker, speakers)
    if role is None:
        raise Malformed("unknown_role", f"{where}: {speaker[:40]!r}; map it with `speakers`, or use {', '.join(ROLES)}")
    if content_key is None and not any(item.get(key) for key in CALLS_KEYS):
        raise Malformed("missing_column", f"{where} has no content")
    return {"role": role, "content": content_of(item, content, role, where)}


def keys_read(turn: Mapping[str, Any]) -> set[str | None]:
    """The keys of a turn that are read: who speaks, what, whether it is supervised, and the first of reasoning and of calls
    that isn't empty."""
    others = (next((key for key in keys if turn.get(key)), None) for keys in (REASONING_KEYS, CALLS_KEYS))
    return {*_keys(turn), *others, *WEIGHT_KEYS}


def _keys(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The keys that say who speaks, and what; in tables, all turns have all keys, and some are null."""
    content = next((key for key in CONTENT_KEYS if turn.get(key) is not None), None)
    return (
        next((key for key in SPEAKER_KEYS if turn.get(key) is not None), None),
        content or next((key for key in CONTENT_KEYS if key in turn), None),
    )


def exchange_keys(item: Any) -> tuple[str, str] | None:
    """The keys of an item that is two turns, what the user says and the answer; None if it is one turn."""
    if not isinstance(item, dict) or any(item.get(key) is not None for key in SPEAKER_KEYS):
        return None
    return next((keys for keys in EXCHANGE_KEYS if item.keys() >= set(keys)), None)
