"""The tools that a prompt offers, as a chat template takes them.

A row holds them as JSON text (see `corpus.tools`); a template writes them somewhere into the prompt, and what stands in them
is as much somebody's text as what a user says.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from snaketune.tokenization.template_errors import Refused

# For each conversation its tools, or None where it has none; or nothing, where no conversation has any.
Tools = Sequence[str | None]


def parsed(tools: str | None) -> list[dict[str, Any]] | None:
    """As templates take them."""
    return json.loads(tools) if tools else None


def runs(conversations: Sequence[Any], tools: Tools) -> Iterator[tuple[list[Any], str | None]]:
    """Neighbours with the same tools, which can be rendered together."""
    if not tools:
        yield list(conversations), None
        return
    for own, pairs in groupby(zip(conversations, tools, strict=True), key=lambda pair: pair[1]):
        yield [conversation for conversation, _ in pairs], own


def texts_in(tools: str | None) -> Iterator[str]:
    """All strings in some tools, names of keys included."""
    return strings_in(parsed(tools))


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a value, names of keys included."""
    waiting: list[Any] = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as some:
                waiting += [*some, *some.values()]
            case list() as some:
                waiting += some


def with_texts(tools: str | None, change: Callable[[str], str]) -> str | None:
    """The tools with all their strings changed."""
    return json.dumps(with_strings(parsed(tools), change), ensure_ascii=False) if tools else None


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A value with all its strings changed."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): with_strings(part, change) for key, part in value.items()}
        case list():
            return [with_strings(part, change) for part in value]
    return value


def not_written(roles: list[str], tools: str) -> Refused:
    """What to say where a template leaves tools out."""
    names = ", ".join(tool["function"]["name"] for tool in parsed(tools) or [])
    return Refused(
        "tools_left_out",
        f"a row offers tools ({names[:80]}), and the chat template doesn't write them, so that the model would never see them; "
        f"its roles are [{', '.join(roles)}]. Name a template that writes `tools` under tokenizers.NAME.chat_template "
        "(resources/chat_templates/chatml.jinja does; or add them to a copy of the model's own), or take the column `tools` "
        "out of the source",
    )
