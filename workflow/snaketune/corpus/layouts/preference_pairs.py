"""Preference pairs: two completions of a prompt, or two conversations that begin alike."""

from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.completions import completion_turns, exchange
from snaketune.corpus.layouts.messages import may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.roles import NO_SPEAKERS, Speakers
from snaketune.corpus.layouts.transcripts import is_transcript, transcript_turns
from snaketune.corpus.rows import Malformed, Message, Preference, roles_and_texts

# Columns of whole conversations or of completions; the first is the better one.
PAIR_COLUMNS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
    ("accepted", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
    ("messages", "rejected_messages"),
)


@lru_cache(maxsize=4096)
def pair_columns(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the columns of the chosen and the rejected side, or None."""
    return next((pair for pair in PAIR_COLUMNS if set(pair) <= set(columns)), None)


def pair(prompt: Any, chosen: Any, rejected: Any, speakers: Speakers = NO_SPEAKERS) -> Preference:
    """Return a preference from its three columns; `prompt` may be None if the other two are whole conversations."""
    row = pair_of_conversations(chosen, rejected, speakers)
    return (
        pair_of_completions(prompt, chosen, rejected, speakers)
        if row is None
        else require_prompt(row, prompt, speakers)
    )


def pair_of_conversations(chosen: Any, rejected: Any, speakers: Speakers = NO_SPEAKERS) -> Preference | None:
    """Return a preference from two whole conversations; None if these are completions."""
    if is_transcript(chosen) and is_transcript(rejected):
        return transcript_pair(chosen, rejected)
    serialized = may_be_serialized_turns(chosen) and may_be_serialized_turns(rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and not serialized:
        return None
    turns = [
        completion_turns(value, where, speakers, serialized=serialized)
        for where, value in (("chosen", chosen), ("rejected", rejected))
    ]
    return _split_at_difference(*turns) if all(side[0]["role"] != "assistant" for side in turns) else None


def pair_of_completions(prompt: Any, chosen: Any, rejected: Any, speakers: Speakers = NO_SPEAKERS) -> Preference:
    """Return a preference from a prompt and two completions."""
    if prompt is None:
        raise Malformed(
            "missing_column",
            "no column holds the prompt (prompt, question, instruction, query, input, messages, conversations …), and "
            "chosen and rejected aren't whole conversations",
        )
    turns, (chosen, rejected), notes = exchange(prompt, {"chosen": chosen, "rejected": rejected}, speakers)
    return Preference(prompt=turns, chosen=chosen, rejected=rejected, notes=notes)


def pair_with_rejected_answer(messages: Any, rejected: Any, speakers: Speakers = NO_SPEAKERS) -> Preference:
    """Return a preference from a conversation and a worse text for its last turn."""
    turns = turns_of(messages, "messages", speakers)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise Malformed(f"ends_on_{turns[-1]['role']}", "the last turn of messages isn't an answer, so none is chosen")
    worse = completion_turns(rejected, "rejected_response", speakers)
    return Preference(prompt=turns[:-1], chosen=turns[-1:], rejected=worse)


def transcript_pair(chosen: Any, rejected: Any) -> Preference:
    """Return a preference from two transcripts."""
    return _split_at_difference(transcript_turns(chosen, "chosen"), transcript_turns(rejected, "rejected"))


def _split_at_difference(chosen: list[Message], rejected: list[Message]) -> Preference:
    """Split two conversations after the last turn that they share.

    chosen    user A   assistant B   user C │ assistant D
    rejected  user A   assistant B   user C │ assistant E   user F   assistant G
              └────────── prompt ─────────┘
    """
    if roles_and_texts(chosen) == roles_and_texts(rejected):
        raise Malformed("identical_chosen_and_rejected", "chosen and rejected are the same")
    shared = 0
    for ours, theirs in zip(roles_and_texts(chosen), roles_and_texts(rejected)):
        if ours != theirs:
            break
        shared += 1
    if not shared or any(turns[shared:] and turns[shared]["role"] == "user" for turns in (chosen, rejected)):
        raise Malformed(
            "different_prompts", f"chosen and rejected differ from turn {shared + 1} on, which is the user's"
        )
    return Preference(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def require_prompt(row: Preference, prompt: Any, speakers: Speakers) -> Preference:
    """Return `row`; raise Malformed unless `prompt` is None or among its turns."""
    if isinstance(prompt, str):
        contained = any(turn["content"].strip() == prompt.strip() for turn in row.prompt)
        if not contained and is_transcript(prompt):
            contained = [turn for turn in transcript_turns(prompt, "prompt") if turn["content"].strip()] == row.prompt
    else:
        wanted = [] if prompt is None else turns_of(prompt, "prompt", speakers)
        contained = roles_and_texts(row.prompt)[: len(wanted)] == roles_and_texts(wanted)
    if not contained:
        raise Malformed("different_prompts", "chosen and rejected are whole conversations that don't contain `prompt`")
    return row
