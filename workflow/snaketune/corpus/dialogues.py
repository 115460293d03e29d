"""A whole dialogue in one text: who speaks stands at the beginning of a line.

    User 1: Hi!                     user
    User 2: Hello, how are you?     assistant
    Fine, I hope.                   (goes on)
    User 1: Great.                  user

The first speaker is the user and the second the assistant, unless their names or the config say otherwise. A line of
asterisks, or a remark in brackets just before a turn (`[The next day]`), belongs to no speaker and is taken out.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.parts import kind_of
from snaketune.corpus.rows import Malformed, Message
from snaketune.corpus.templates import conversation_in
from snaketune.corpus.turns import role_of

NAMES = r"(?:User|Human|Speaker|Person|Participant|Character)[ _]?[12AB]|User|Human|Assistant|Chatbot|Bot|GPT|AI"
# Behind a turn: a rule of asterisks, or a line in brackets.
STAGE_DIRECTION = re.compile(r"\n[ \t]*(?:\*(?:[ \t]*\*){2,}|\[[^\[\]\n]*\]|\([^()\n]*\))[ \t]*\Z")


def dialogue_turns(text: Any, where: str, speakers: Mapping[str, str]) -> tuple[list[Message], tuple[str, ...]]:
    r"""The turns of a dialogue, and what there is to note.

    >>> dialogue_turns("User 1: Hi\nUser 2: Hello", "chat", {})[0]
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]

    Args:
        speakers: roles by name; other names than the usual ones are known only by it.
    Raises:
        Malformed: no dialogue, or a third speaker.
    """
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{where} holds {kind_of(text)}, expected a text")
    framed = conversation_in(text)
    if framed:
        return framed, ()
    before, *parts = _tag(tuple(speakers)).split(text)
    if before.strip() or not parts:
        raise Malformed("not_a_dialogue", f"{where} doesn't begin with a speaker such as User 1:")
    names = [" ".join(name.split()) for name in parts[::2]]
    roles = _roles(names, where, speakers)
    turns, notes = [], ()
    for number, (name, content) in enumerate(zip(names, parts[1::2]), start=1):
        said = content.strip()
        # After the last turn it may be the last thing said.
        while number < len(names) and (
            remark := STAGE_DIRECTION.search(said[said.rfind("\n") :] if "\n" in said else "")
        ):
            said, notes = said[: len(said) - len(remark[0])].rstrip(), ("removed_stage_direction",)
        turns.append({"role": roles[name], "content": said})
    return turns, notes


def dialogue_column(raw: dict[str, Any], speakers: Mapping[str, str]) -> str | None:
    """The first column whose text begins with one speaker and goes on with another."""
    tag = _tag(tuple(speakers))
    for column, value in raw.items():
        if isinstance(value, str):
            before, *parts = tag.split(value, maxsplit=8)
            if (not before.strip() and len({name.lower() for name in parts[::2]}) > 1) or conversation_in(value):
                return column
    return None


def _roles(names: list[str], where: str, speakers: Mapping[str, str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for name in dict.fromkeys(names):
        role = speakers.get(name) or role_of(name)
        free = [role for role in ("user", "assistant") if role not in roles.values()]
        if role is None and not free:
            raise Malformed("unknown_role", f"{where} has a third speaker, {name[:40]!r}; map it with `speakers`")
        roles[name] = role or free[0]
    return roles


@lru_cache(maxsize=64)
def _tag(names: tuple[str, ...]) -> re.Pattern[str]:
    known = "|".join([*(re.escape(name) for name in sorted(names, key=len, reverse=True)), NAMES])
    # Bold as Markdown has it, and as it looks after a tokenizer went over it: "* * User 1: * * Hi".
    return re.compile(
        rf"^[ \t]*(?:\*[ \t]?\*[ \t]?)?({known})(?:\*\*)?:(?:[ \t]?\*[ \t]?\*)?", re.MULTILINE | re.IGNORECASE
    )
