"""Whole dialogues in one text, where the speaker's name is at the beginning of a line.

    User 1: Hi!                     user
    User 2: Hello, how are you?     assistant
    Fine, I hope.                   (continues)
    User 1: Great.                  user

The first speaker is the user and the second the assistant, unless their names or the config say otherwise.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from snaketune.corpus.rows import Malformed, Message
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.roles import DIALOGUE_SPEAKERS, Speakers, role_of


def dialogue_turns(text: Any, where: str, speakers: Speakers) -> list[Message]:
    r"""Return the turns of a dialogue.

    >>> dialogue_turns("User 1: Hi\nUser 2: Hello", "chat", {})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str):
        raise wrong_type(where, text)
    before, tagged_texts = split_at_tags(text, _tag(tuple(speakers)).finditer(text))
    if before.strip() or not tagged_texts:
        raise Malformed("not_a_dialogue", f"{where} doesn't begin with a speaker such as User 1:")
    roles = _roles([name for name, _ in tagged_texts], where, speakers)
    return [{"role": roles[name.casefold()], "content": content.strip()} for name, content in tagged_texts]


def is_dialogue(value: Any) -> bool:
    """Whether a text begins with one speaker and continues with another."""
    if not isinstance(value, str):
        return False
    before, tagged_texts = split_at_tags(value, _tag(()).finditer(value))
    return not before.strip() and len({name.casefold() for name, _ in tagged_texts}) > 1


def split_at_tags(text: str, tags: Iterable[re.Match[str]]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first tag, and then each tag's `speaker` with their text, unchanged."""
    tags = list(tags)
    ends = [tag.start() for tag in tags] + [len(text)]
    return text[: ends[0]], [(tag["speaker"], text[tag.end() : end]) for tag, end in zip(tags, ends[1:])]


def _roles(names: list[str], where: str, speakers: Speakers) -> dict[str, str]:
    roles_by_name = {name.casefold(): role for name, role in speakers.items()}
    roles: dict[str, str] = {}
    for name in dict.fromkeys(map(str.casefold, names)):
        free = [role for role in ("user", "assistant") if role not in roles.values()]
        role = roles_by_name.get(name) or role_of(name, {}) or (free[0] if free else None)
        if role is None:
            raise Malformed("unknown_role", f"{where} has a third speaker, {name[:40]!r}; map it with `speakers`")
        roles[name] = role
    return roles


@lru_cache(maxsize=64)
def _tag(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a speaker at the beginning of a line: plain, in bold, in italics, or in bold with spaces."""
    known = "|".join([*(re.escape(name) for name in sorted(names, key=len, reverse=True)), DIALOGUE_SPEAKERS])
    stars = r"(\* \* |\*\*?)?"
    return re.compile(
        rf"^[ \t]*{stars}(?P<speaker>{known})(?(1)(?::\*\*?|\*\*?:|: \* \*)|:)", re.MULTILINE | re.IGNORECASE
    )
