"""Removal of chat templates from user turns, and extraction of the turns inside of them.

A model's own template is applied to every prompt later, so one that is already there has to be removed. It counts only if it
encloses the whole prompt, from its first tag to the open turn at the end: a text that mentions `[INST]` isn't changed. A
templated prompt that can't be split cleanly is refused, never templated twice.
"""

import re

from snaketune.corpus.layouts.roles import TEMPLATE_ROLES
from snaketune.corpus.layouts.templates import (
    SPECIAL_MARKS,
    SYSTEM_PART,
    TEMPLATES,
    Template,
    is_unknown_template,
    may_be_templated,
    strip_end_of_turn,
)
from snaketune.corpus.layouts.transcripts import split_at_speakers
from snaketune.corpus.rows import Malformed, Message, Row


def strip_template(prompt: str, *, whole_prompt: bool = False) -> tuple[list[Message], str] | None:
    r"""Return the turns inside a templated prompt, and a note that names the template; None if it isn't templated.

    >>> strip_template("USER: Hi ASSISTANT:")
    ([{'role': 'user', 'content': 'Hi'}], 'unwrapped_vicuna_template')
    >>> strip_template("USER: is what my log says. Why?")

    Args:
        whole_prompt: whether there are no turns before the response but this prompt; then a dialogue in it is the
            conversation, else it is a text that the user quotes.
    Raises:
        Malformed: the prompt is in a template that can't be removed cleanly.
    """
    if not may_be_templated(prompt):
        return None
    for template in TEMPLATES:
        start = template.opens.match(prompt)
        if not start or (template.plain and not whole_prompt):
            continue
        if not prompt.rstrip().endswith(template.closes):
            if template.special and any(
                TEMPLATE_ROLES.get(mark["speaker"].lower()) == "assistant" for mark in template.marks.finditer(prompt)
            ):
                raise Malformed(
                    "baked_in_template", f"the prompt begins with a {template.name} template and has text after it"
                )
            continue
        turns = _turns(template, prompt, start)
        is_open = bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip()
        if is_open:
            turns.pop()
        if template.plain and not (turns and _is_dialogue(turns, prompt, is_open) and _is_clean(template, turns)):
            continue
        if not turns or turns[-1]["role"] != "user" or not _is_clean(template, turns):
            raise Malformed(
                "baked_in_template", f"the prompt is in a {template.name} template that can't be removed cleanly"
            )
        return turns, f"unwrapped_{template.name}_template"
    if is_unknown_template(prompt):
        raise Malformed("baked_in_template", "the prompt is in an unknown chat template")
    return None


def strip_templates(row: Row) -> None:
    """Remove templates from the user turns of a row, in place, and then end-of-turn strings from the answers.

    A template around the first turn may contain further turns. One around a later turn that does would repeat the
    conversation, and is refused.
    """
    for turn in row.opening:
        if turn["role"] == "user" and may_be_templated(turn["content"]):
            break
    else:
        return
    if any(note.startswith("unwrapped_") for note in row.notes):
        return
    turns: list[Message] = []
    notes: list[str] = []
    for turn in row.opening:
        stripped = strip_template(turn["content"]) if turn["role"] == "user" else None
        if stripped is None:
            turns.append(turn)
            continue
        inner_turns, note = stripped
        if len(inner_turns) > 1 and any(earlier["role"] == "user" for earlier in turns):
            raise Malformed("baked_in_template", "a later turn of the user is in a chat template with several turns")
        turns += inner_turns
        notes.append(note)
    if not notes:
        return
    row.opening[:] = turns
    for column in row.columns:
        notes += strip_end_of_turns(getattr(row, column))
    row.notes += tuple(dict.fromkeys(notes))


def templated_conversation(text: str) -> list[Message] | None:
    """Return the turns of a text that is a whole conversation in a known template, or None."""
    if not may_be_templated(text):
        return None
    for template in TEMPLATES:
        start = None if template.plain else template.opens.match(text)
        turns = _turns(template, text, start) if start else None
        if turns and turns[-1]["role"] == "assistant" and _is_clean(template, turns):
            return turns
    return None


def strip_end_of_turns(turns: list[Message]) -> tuple[str, ...]:
    """Remove end-of-turn strings from the answers, in place; return a note if there were any."""
    notes: tuple[str, ...] = ()
    for i, turn in enumerate(turns):
        text = strip_end_of_turn(turn["content"]) if turn["role"] == "assistant" else turn["content"]
        if text != turn["content"]:
            turns[i], notes = {**turn, "content": text}, ("removed_end_of_turn",)
    return notes


def _turns(template: Template, text: str, start: re.Match[str]) -> list[Message] | None:
    """Return the turns between the tags; None if a speaker is unknown or an input doesn't follow an instruction."""
    turns: list[Message] = []
    if system_text := start.groupdict().get("system"):
        turns.append({"role": "system", "content": system_text.strip()})
    _, tagged_texts = split_at_speakers(text, template.marks)
    before = ""
    for speaker, content in tagged_texts:
        role, is_input = TEMPLATE_ROLES.get(speaker.lower()), speaker.lower() == "input" and before == "Instruction"
        content = _without_marks(template, content)
        before = speaker
        if is_input:
            turns[-1]["content"] += f"\n\n{content}" if content.strip() else ""
            continue
        if role is None:
            return None
        if template.name == "llama2" and role == "user" and (system := SYSTEM_PART.match(content)):
            turns.append({"role": "system", "content": system[1].strip()})
            content = content[system.end() :]
        turns.append({"role": role, "content": content})
    return turns


def _is_dialogue(turns: list[Message], prompt: str, is_open: bool) -> bool:
    """Return True if the user has the last turn, before an open turn, or in one line; several lines may be about a dialogue."""
    # `user: alice`, in lower case, is often a line of YAML.
    closed = len(turns) > 2 and "\n" not in turns[-1]["content"].strip() and not prompt.lstrip()[:1].islower()
    return turns[-1]["role"] == "user" and (is_open or closed)


def _without_marks(template: Template, content: str) -> str:
    content = content.strip(template.strips)
    for end in template.turn_ends:
        if content.rstrip().endswith(end):
            content = content.rstrip().removesuffix(end).strip(template.strips)
    return content


def _is_clean(template: Template, turns: list[Message]) -> bool:
    """Return True if the turns alternate, all have text, and no tag of a template is left in any."""
    after_system = turns[1:] if turns[0]["role"] == "system" else turns
    return (
        all(turn["role"] == ("user", "assistant")[number % 2] for number, turn in enumerate(after_system))
        and all(turn["content"].strip() for turn in turns)
        and not any(template.special and SPECIAL_MARKS.search(turn["content"]) for turn in turns)
    )
