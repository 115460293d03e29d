"""Whole dialogues in one text, where the speaker's name is at the beginning of a line.

    User 1: Hi!                     user
    User 2: Hello, how are you?     assistant
    Fine, I hope.                   (continues)
    User 1: Great.                  user

The first speaker is the user and the second the assistant, unless their names or the config say otherwise. A line of
asterisks just before a turn belongs to no speaker and is removed, and so is a stage direction in brackets (`[The next day]`):
prose after a complete sentence. Other lines in brackets (`[1, 2]`, or after a colon) are part of the turn.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from snaketune.corpus.rows import Malformed, Message
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.roles import DIALOGUE_SPEAKERS, Speakers, role_of

# Lines between turns: a rule of asterisks, or a stage direction in brackets or in italics.
RULE = re.compile(r"\*(?:[ \t]*\*){2,}")
REMARK = re.compile(r"\[([^\[\]]*)\]|\(([^()]*)\)|\*([^*]+)\*")
# Begins like a sentence, and has a word that isn't a name: "The next day", but neither "B" nor "Anna, Ben".
PROSE = re.compile(r"(?=(?:Later|At|In|On|After|Before)\b|.*\s[a-z]{2})[A-Z][\w\s.,!'’-]*")
# What may precede a stage direction: on the next line, a complete sentence; after a blank line, any text that doesn't
# announce it.
BEFORE_REMARK = {False: re.compile(r"[^\w\s:,;=(\[{-]\Z"), True: re.compile(r"[^\s:,;=(\[{-]\Z")}


def dialogue_turns(text: Any, where: str, speakers: Speakers) -> tuple[list[Message], tuple[str, ...]]:
    r"""Return the turns of a dialogue, and notes.

    >>> dialogue_turns("User 1: Hi\nUser 2: Hello", "chat", {})[0]
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str):
        raise wrong_type(where, text)
    before, tagged_texts = _split_dialogue(text, speakers)
    if _without_remarks(before) or not tagged_texts:
        raise Malformed("not_a_dialogue", f"{where} doesn't begin with a speaker such as User 1:")
    roles = _roles([name for name, _ in tagged_texts], where, speakers)
    # After the last turn, such a line may be part of it.
    contents = [_without_remarks(content, keep=1) for _, content in tagged_texts[:-1]] + [tagged_texts[-1][1]]
    turns = [{"role": roles[name], "content": content} for (name, _), content in zip(tagged_texts, contents)]
    notes = ("removed_stage_direction",) if contents != [content for _, content in tagged_texts] else ()
    return turns, notes


def is_dialogue(value: Any) -> bool:
    """Whether a text begins with one speaker and continues with another."""
    if not isinstance(value, str):
        return False
    before, tagged_texts = _split_dialogue(value, {})
    names = {name for name, _ in tagged_texts if not _is_tool(name)}
    return len(names) > 1 and not _without_remarks(before)


def split_at_tags(text: str, tags: Iterable[re.Match[str]]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first tag, and then each tag's `speaker` with their text, unchanged."""
    tags = list(tags)
    ends = [tag.start() for tag in tags] + [len(text)]
    return text[: ends[0]], [(tag["speaker"], text[tag.end() : end]) for tag, end in zip(tags, ends[1:])]


def _split_dialogue(text: str, speakers: Speakers) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first speaker, and then each speaker, in lower case, with their text.

    `Tool:` is a tag only between two turns of the same speaker; elsewhere it is part of the text.
    """
    tags = list(_tag(tuple(speakers)).finditer(text))
    if not speakers and any(_is_tool(tag["speaker"]) for tag in tags):
        marks, tags = tags, []
        for number, mark in enumerate(marks):
            if _is_tool(mark["speaker"]):
                before, after = _next_speaker(reversed(tags)), _next_speaker(marks[number:])
                if before is None or before != after:
                    continue
            tags.append(mark)
    before, tagged_texts = split_at_tags(text, tags)
    return before, [(name.casefold(), content.strip()) for name, content in tagged_texts]


def _is_tool(speaker: str) -> bool:
    """Return True for tags that may also be the first word of a line: `Tool:`, unlike `Tool output:`."""
    return speaker.casefold() in ("tool", "function", "observation")


def _next_speaker(marks: Iterable[re.Match[str]]) -> str | None:
    return next((mark["speaker"].casefold() for mark in marks if role_of(mark["speaker"], {}) != "tool"), None)


def _roles(names: list[str], where: str, speakers: Speakers) -> dict[str, str]:
    roles_by_name = {name.casefold(): role for name, role in speakers.items()}
    roles: dict[str, str] = {}
    for name in dict.fromkeys(names):
        free = [role for role in ("user", "assistant") if role not in roles.values()]
        role = roles_by_name.get(name) or role_of(name, {}) or (free[0] if free else None)
        if role is None:
            raise Malformed("unknown_role", f"{where} has a third speaker, {name[:40]!r}; map it with `speakers`")
        roles[name] = role
    return roles


def _without_remarks(text: str, *, keep: int = 0) -> str:
    """Remove the lines at the end of `text` that belong to no speaker; the first `keep` lines are never removed."""
    lines = text.split("\n")
    end = len(lines)
    while end > keep and (not lines[end - 1].strip() or _is_between_turns(lines[end - 1].strip())):
        end -= 1
    before, after = "\n".join(lines[:end]), [line.strip() for line in lines[end:]]
    if before.strip() and any(line and not RULE.fullmatch(line) for line in after):
        return before if BEFORE_REMARK[after[0] == ""].search(before.rstrip()) else text
    return before


def _is_between_turns(line: str) -> bool:
    remark = REMARK.fullmatch(line)
    return RULE.fullmatch(line) is not None or (
        remark is not None and PROSE.fullmatch("".join(filter(None, remark.groups())).strip()) is not None
    )


@lru_cache(maxsize=64)
def _tag(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a speaker at the beginning of a line: plain, in bold, in italics, or in bold with spaces."""
    known = "|".join([*(re.escape(name) for name in sorted(names, key=len, reverse=True)), DIALOGUE_SPEAKERS])
    stars = r"(\* \* |\*\*?)?"
    return re.compile(
        rf"^[ \t]*{stars}(?P<speaker>{known})(?(1)(?::\*\*?|\*\*?:|: \* \*)|:)", re.MULTILINE | re.IGNORECASE
    )
