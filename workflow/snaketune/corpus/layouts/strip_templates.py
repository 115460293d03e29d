"""Chat templates taken off what users say, with the turns that are inside of them.

A model's own template goes around every prompt later, so one that is there already has to come off. It counts only if
it frames the whole prompt, from its first mark to the open turn at the end: a text that mentions `[INST]` stays as it
is. A framed prompt that can't be taken apart cleanly is refused, never templated twice.
"""

import re

from snaketune.corpus.layouts.roles import IN_TEMPLATES
from snaketune.corpus.layouts.templates import (
    SPECIAL_MARKS,
    SYSTEM_PART,
    TEMPLATES,
    Template,
    is_unknown,
    may_be_framed,
    without_end,
)
from snaketune.corpus.layouts.transcripts import cut
from snaketune.corpus.rows import Malformed, Message, Row


def unwrapped(prompt: str, *, alone: bool = False) -> tuple[list[Message], str] | None:
    r"""The turns inside a prompt with a template around it, and a note that names the template; None without one.

    >>> unwrapped("USER: Hi ASSISTANT:")
    ([{'role': 'user', 'content': 'Hi'}], 'unwrapped_vicuna_template')
    >>> unwrapped("USER: is what my log says. Why?")

    Args:
        alone: whether the prompt is all that there is before the response, so that a dialogue in it is the conversation;
            among other turns it is something that the user shows.
    Raises:
        Malformed: a template frames the prompt, and it can't be taken off cleanly.
    """
    if not may_be_framed(prompt):
        return None
    for template in TEMPLATES:
        opening = template.opens.match(prompt)
        if not opening or (template.plain and not alone):
            continue
        if not prompt.rstrip().endswith(template.closes):
            if template.special and any(
                IN_TEMPLATES.get(mark["speaker"].lower()) == "assistant" for mark in template.marks.finditer(prompt)
            ):
                raise Malformed(
                    "baked_in_template", f"the prompt begins with a {template.name} template and goes on after it"
                )
            continue
        turns = _turns(template, prompt, opening)
        is_open = bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip()
        if is_open:
            turns.pop()
        if template.plain and not (turns and _is_dialogue(turns, prompt, is_open) and _is_clean(template, turns)):
            continue
        if not turns or turns[-1]["role"] != "user" or not _is_clean(template, turns):
            raise Malformed("baked_in_template", f"a {template.name} template frames the prompt and can't be taken off")
        return turns, f"unwrapped_{template.name}_template"
    if is_unknown(prompt):
        raise Malformed("baked_in_template", "a template that isn't known here frames the prompt")
    return None


def unframe(row: Row) -> None:
    """Take the templates off what users say in a row, in place, and then the end-of-turn strings off the answers.

    A template around the first turn may hold further turns. One around a later turn that does would tell the
    conversation again, and is refused.
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
    for column in row.columns:
        notes += take_ends_off(getattr(row, column))
    row.notes += tuple(dict.fromkeys(notes))


def conversation_in(text: str) -> list[Message] | None:
    """The turns of a text that is a whole conversation in one of the templates, or None."""
    if not may_be_framed(text):
        return None
    for template in TEMPLATES:
        opening = None if template.plain else template.opens.match(text)
        turns = _turns(template, text, opening) if opening else None
        if turns and turns[-1]["role"] == "assistant" and _is_clean(template, turns):
            return turns
    return None


def take_ends_off(turns: list[Message]) -> tuple[str, ...]:
    """Take end-of-turn strings off the answers, in place; a note, if there were any."""
    notes: tuple[str, ...] = ()
    for i, turn in enumerate(turns):
        text = without_end(turn["content"]) if turn["role"] == "assistant" else turn["content"]
        if text != turn["content"]:
            turns[i], notes = {**turn, "content": text}, ("removed_end_of_turn",)
    return notes


def _turns(template: Template, text: str, opening: re.Match[str]) -> list[Message] | None:
    """What stands between the marks; None where a speaker is unknown or an input doesn't follow an instruction."""
    turns: list[Message] = []
    if said := opening.groupdict().get("system"):
        turns.append({"role": "system", "content": said.strip()})
    _, spoken = cut(text, template.marks)
    before = ""
    for speaker, content in spoken:
        role, goes_on = IN_TEMPLATES.get(speaker.lower()), speaker.lower() == "input" and before == "Instruction"
        content = _bare(template, content)
        before = speaker
        if goes_on:
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
    """Whether the user has the last word: before an open turn, or in one line after an answer. More lines may be about it."""
    # `user: alice`, in small letters, is as often a line of YAML.
    closed = len(turns) > 2 and "\n" not in turns[-1]["content"].strip() and not prompt.lstrip()[:1].islower()
    return turns[-1]["role"] == "user" and (is_open or closed)


def _bare(template: Template, content: str) -> str:
    content = content.strip(template.strips)
    for end in template.turn_ends:
        if content.rstrip().endswith(end):
            content = content.rstrip().removesuffix(end).strip(template.strips)
    return content


def _is_clean(template: Template, turns: list[Message]) -> bool:
    """Whether the turns alternate, each says something, and no mark is left in any."""
    spoken = turns[1:] if turns[0]["role"] == "system" else turns
    return (
        all(turn["role"] == ("user", "assistant")[number % 2] for number, turn in enumerate(spoken))
        and all(turn["content"].strip() for turn in turns)
        and not any(template.special and SPECIAL_MARKS.search(turn["content"]) for turn in turns)
    )
