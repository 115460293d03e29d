"""Preference pairs from the ways they come: completions beside a prompt, or two conversations that begin alike."""

import re
from typing import Any

from snaketune.corpus.rows import Malformed, Message, Preference
from snaketune.corpus.turns import completion_turns, kind_of, prompt_turns

SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


def pair(prompt: Any, chosen: Any, rejected: Any) -> Preference:
    """A preference from its three columns; `prompt` may be None where the other two are whole conversations."""
    chosen, rejected = completion_turns(chosen, "chosen"), completion_turns(rejected, "rejected")
    if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
        row = _whole_pair(chosen, rejected)
        if prompt is not None and not _says(row.prompt, prompt):
            raise Malformed("different_prompts", "chosen and rejected are whole conversations without `prompt` in them")
        return row
    if prompt is None:
        raise Malformed("missing_column", "no column prompt, and chosen and rejected are no whole conversations")
    turns, notes = prompt_turns(prompt, "prompt")
    return Preference(prompt=turns, chosen=chosen, rejected=rejected, notes=notes)


def transcript_pair(chosen: Any, rejected: Any) -> Preference:
    """A preference from two transcripts."""
    return _whole_pair(transcript_turns(chosen, "chosen"), transcript_turns(rejected, "rejected"))


def transcript_turns(text: Any, where: str) -> list[Message]:
    r"""The turns of a text; the space after a speaker's name belongs to the name.

    >>> transcript_turns("\n\nHuman: Hi\n\nAssistant: Hello", "chosen")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{where} holds {kind_of(text)}, expected a text")
    before, *parts = SPEAKER.split(text)
    if before.strip() or not parts:
        raise Malformed("not_a_transcript", f"{where} doesn't begin with Human: or Assistant:")
    return [
        {"role": SPEAKER_ROLES[speaker], "content": content.removeprefix(" ")}
        for speaker, content in zip(parts[::2], parts[1::2])
    ]


def _whole_pair(chosen: list[Message], rejected: list[Message]) -> Preference:
    """Split two conversations after the last turn that they share.

    chosen    user A   assistant B   user C │ assistant D
    rejected  user A   assistant B   user C │ assistant E   user F   assistant G
              └────────── prompt ─────────┘
    """
    if chosen == rejected:
        raise Malformed("identical_chosen_and_rejected", "there is nothing to prefer")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared or any(turns[shared:] and turns[shared]["role"] == "user" for turns in (chosen, rejected)):
        raise Malformed("different_prompts", f"chosen and rejected part ways at turn {shared + 1}, which is the user's")
    return Preference(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def _says(turns: list[Message], prompt: Any) -> bool:
    """Whether `prompt`, a text or turns, is among `turns`."""
    if isinstance(prompt, str):
        return any(turn["content"].strip() == prompt.strip() for turn in turns)
    wanted, _ = prompt_turns(prompt, "prompt")
    return turns[: len(wanted)] == wanted
