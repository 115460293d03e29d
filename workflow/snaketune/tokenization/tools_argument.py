"""The tools of a row in the form that chat templates expect.

A row stores them as JSON text (see `corpus.layouts.tools`). A template writes them into the prompt, so their strings are
untrusted text like a user's message.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from snaketune.tokenization.template_errors import Refused

# The tools of each conversation, None if it has none; empty if no conversation has any.
Tools = Sequence[str | None]


def parse(tools: str | None) -> list[dict[str, Any]] | None:
    """Return the tools as templates expect them."""
    return json.loads(tools) if tools else None


def group_by_tools(conversations: Sequence[Any], tools: Tools) -> Iterator[tuple[list[Any], str | None]]:
    """Yield runs of conversations with the same tools, which can be rendered in one call."""
    if not tools:
        yield list(conversations), None
        return
    for own, pairs in groupby(zip(conversations, tools, strict=True), key=lambda pair: pair[1]):
        yield [conversation for conversation, _ in pairs], own


def texts_in(tools: str | None) -> Iterator[str]:
    """Yield all strings in the tools, keys included."""
    return strings_in(parse(tools))


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a value, keys included."""
    pending: list[Any] = [value]
    while pending:
        match pending.pop():
            case str() as text:
                yield text
            case dict() as some:
                pending += [*some, *some.values()]
            case list() as some:
                pending += some


def with_texts(tools: str | None, change: Callable[[str], str]) -> str | None:
    """Return the tools with all strings changed by `change`."""
    return json.dumps(with_strings(parse(tools), change), ensure_ascii=False) if tools else None


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with all strings changed by `change`."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): with_strings(part, change) for key, part in value.items()}
        case list():
            return [with_strings(part, change) for part in value]
    return value


def tools_omitted(roles: list[str], tools: str) -> Refused:
    """Return the error for a template that omits the tools."""
    names = ", ".join(tool["function"]["name"] for tool in parse(tools) or [])
    return Refused(
        "tools_left_out",
        f"a row offers tools ({names[:80]}), and the chat template doesn't write them, so the model would never see them; "
        f"its roles are [{', '.join(roles)}]. Name a template that writes `tools` under tokenizers.NAME.chat_template "
        "(resources/chat_templates/chatml.jinja does; or add them to a copy of the model's own), or take the column `tools` "
        "out of the source",
    )
