"""A prompt and its completions, each a text or turns."""

from collections.abc import Mapping
from typing import Any

from snaketune.corpus.layouts.columns import text_if_number
from snaketune.corpus.layouts.content_parts import text_of
from snaketune.corpus.layouts.messages import SPEAKER_KEYS, may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.roles import NO_SPEAKERS, Speakers
from snaketune.corpus.layouts.strip_templates import strip_template
from snaketune.corpus.layouts.templates import strip_end_of_turn
from snaketune.corpus.rows import Malformed, Message


def exchange(
    prompt: Any, completions: Mapping[str, Any], speakers: Speakers = NO_SPEAKERS
) -> tuple[list[Message], list[list[Message]], tuple[str, ...]]:
    """Return the turns of a prompt, those of each completion, and notes.

    A chat template around the prompt is removed, and then also the end-of-turn strings of the completions.

    Args:
        prompt: a text, or turns.
        completions: by the name of their column.
    """
    prompt = text_if_number(prompt)
    serialized = not isinstance(prompt, str) or may_be_serialized_turns(prompt)
    answers = [completion_turns(value, where, speakers, serialized=serialized) for where, value in completions.items()]
    if serialized:
        return turns_of(prompt, "prompt", speakers), answers, ()
    stripped = strip_template(prompt, whole_prompt=True)
    if stripped is None:
        return [{"role": "user", "content": prompt}], answers, ()
    turns, note = stripped
    notes = (note,)
    for answer in answers:
        text = strip_end_of_turn(answer[-1]["content"])
        if text != answer[-1]["content"]:
            answer[-1]["content"], notes = text, (note, "removed_end_of_turn")
        if not prompt[-1].isspace():
            # The space after "ASSISTANT:" belongs to the template.
            answer[0]["content"] = answer[0]["content"].removeprefix(" ")
    return turns, answers, notes


def completion_turns(
    value: Any, where: str, speakers: Speakers = NO_SPEAKERS, *, serialized: bool = False
) -> list[Message]:
    """Return a completion as turns, given as the assistant's text, as {text: …}, as one turn, or as turns.

    Args:
        serialized: whether a text that looks like serialized turns is parsed as turns; else an answer may be such JSON.
    """
    value = text_if_number(value)
    if isinstance(value, str) and not (serialized and may_be_serialized_turns(value)):
        return [{"role": "assistant", "content": value}]
    if value == []:
        raise Malformed("empty_completion", f"{where} has no turns")
    if isinstance(value, dict):
        if value.get("text") is not None and not any(value.get(key) is not None for key in SPEAKER_KEYS):
            return [{"role": "assistant", "content": text_of(value["text"], where)}]
        value = [value]
    return turns_of(value, where, speakers)
