"""Tool calls of assistants, as chat templates take them.

A row holds a call in the assistant's text. A template that reads `tool_calls` has a form of its own for calls, which its prompt
asks the model to write; such a template gets the calls apart from the text:

    row        {"content": "Wait.\\n<tool_call>\\n{"name": "now", "arguments": {"zone": "UTC"}}\\n</tool_call>"}
    template   {"content": "Wait.", "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "now", ...}}]}

Any other template writes the text as it is. Rows without tools whose system or user turn speaks of `<tool_call>` keep the
text too: it is the form that their prompt asks for.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from jinja2 import nodes

from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tools_argument import strings_in, with_strings

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OPENING, CLOSING = re.compile(rf"{OPEN}\s*"), re.compile(rf"\s*{CLOSE}\s*")
DECODER = json.JSONDecoder()
HARMLESS = "x"


@cache
def reads_calls(template: str) -> bool:
    """Whether the template looks at a message's `tool_calls`.

    >>> reads_calls("{% if message.tool_calls %}{% endif %}"), reads_calls("{# no tool_calls #}{{ messages[0].content }}")
    (True, False)
    """
    if "tool_calls" not in template:
        return False
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    return any(node.attr == "tool_calls" for node in tree.find_all(nodes.Getattr)) or any(
        node.value == "tool_calls" for node in tree.find_all(nodes.Const)
    )


def with_calls(messages: list[dict[str, Any]], tools: str | None) -> list[dict[str, Any]]:
    """The messages with the calls of assistants under `tool_calls`, and with each result the id and the name of its call.

    Ids are numbered through the conversation, in nine letters and digits, which is what Mistral's templates take.

    Raises:
        SnaketuneError: the conversation offers tools, and a turn has a call that can't be taken out of its text.
    """
    if not any(OPEN in message["content"] for message in messages if message["role"] == "assistant"):
        return messages
    if not tools and any(OPEN in message["content"] for message in messages if message["role"] in ("system", "user")):
        return messages
    changed: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    count = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            text, functions = _parts(message["content"])
            if tools and not functions and OPEN in text and CLOSE in text:
                raise _not_taken_out(number, text)
            waiting = [
                {"id": f"call{count + place:05d}", "type": "function", "function": function}
                for place, function in enumerate(functions, start=1)
            ]
            count += len(functions)
            message = {**message, "content": text, "tool_calls": list(waiting)} if functions else message
        elif message["role"] == "tool" and waiting:
            call = waiting.pop(0)
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        changed.append(message)
    return changed


def _parts(content: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the calls, and the calls that it ends with; all of it and none where it doesn't end with calls.

    >>> _parts('Wait.\\n<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>')
    ('Wait.', [{'name': 'now', 'arguments': {}}])
    """
    for opening in OPENING.finditer(content):
        functions = _calls_from(content, opening.start())
        if functions:
            text = content[: opening.start()]
            # A line break stands between text and calls; those after reasoning belong to it.
            return text if text.endswith("</think>\n\n") else text.removesuffix("\n"), functions
    return content, []


def _calls_from(content: str, at: int) -> list[dict[str, Any]]:
    """The calls that all of `content` from `at` on consists of; or none."""
    functions = []
    while opening := OPENING.match(content, at):
        try:
            function, end = DECODER.raw_decode(content, opening.end())
        except (ValueError, RecursionError):
            return []
        closing = CLOSING.match(content, end)
        if not closing or not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
            return []
        if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
            return []
        functions.append(function)
        at = closing.end()
    return functions if at == len(content) else []


def _not_taken_out(number: int, text: str) -> Refused:
    start = text.find(OPEN)
    return Refused(
        "tool_call_in_another_form",
        f"turn {number} of a row has a tool call in another form than a call's, or with text after it, so that the chat "
        f"template, which has its own form for calls, can't write it: {text[start : start + 160]!r}. Calls end a turn, each "
        'as <tool_call>, a line of JSON {"name": ..., "arguments": {...}} and </tool_call>; mend or drop such rows, or name '
        "a template that leaves calls as they are under tokenizers.NAME.chat_template (resources/chat_templates/chatml.jinja)",
    )


def said_in(message: dict[str, Any]) -> Iterator[str]:
    """All texts of a message: its content, the strings of its calls, the name of the function whose result it is."""
    yield message["content"]
    yield from strings_in([message.get("name"), [call["function"] for call in message.get("tool_calls", ())]])


def with_said(message: dict[str, Any], content: str, change: Callable[[str], str]) -> dict[str, Any]:
    """The message with another content, and with the strings beside it changed."""
    beside = {key: change(message[key]) for key in ("name",) if key in message}
    if "tool_calls" in message:
        calls = [{**call, "function": with_strings(call["function"], change)} for call in message["tool_calls"]]
        beside["tool_calls"] = calls
    return {**message, **beside, "content": content}


def harmless(message: dict[str, Any], text: str = HARMLESS) -> dict[str, Any]:
    """A message of the same kind that says nothing: `text`, and calls of functions `text` with arguments of the same types."""
    calls = message.get("tool_calls", ())
    beside: dict[str, Any] = {"name": HARMLESS} if "name" in message else {}
    if calls:
        beside["tool_calls"] = [
            {**call, "function": {"name": text, "arguments": _blank(call["function"]["arguments"])}} for call in calls
        ]
    return {**message, **beside, "content": HARMLESS * bool(message["content"]) if calls else text}


def _blank(value: Any) -> Any:
    match value:
        case dict():
            return {f"{HARMLESS}{number}": _blank(part) for number, part in enumerate(value.values())}
        case list():
            return [_blank(part) for part in value]
        case str():
            return HARMLESS
        case bool() | None:
            return value
    return 0


def shape(message: dict[str, Any]) -> str:
    """What a template may know of a message besides its texts.

    >>> shape({"role": "user", "content": "Hi"})
    'user'
    """
    if "tool_calls" not in message:
        return message["role"]
    blank = harmless(message)
    return json.dumps(
        [blank["role"], blank["content"], [call["function"]["arguments"] for call in blank["tool_calls"]]]
    )


def check_written(message: dict[str, Any], text: str) -> None:
    """Check that a turn with calls is written whole.

    Args:
        text: what the template writes for it.
    Raises:
        SnaketuneError: the text beside the calls, a name, or a part of the arguments is left out.
    """
    functions = [call["function"] for call in message["tool_calls"]]
    if (beside := message["content"].strip()) and beside not in text:
        raise _left_out(f"the text beside tool calls, {beside[:80]!r}", functions)
    for (value, _), count in Counter(_leaves(functions)).items():
        spelled = {str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}
        if isinstance(value, str):
            spelled = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        if max(map(text.count, spelled)) < count:
            raise _left_out(f"{value!r} of a tool call"[:120], functions)


def check_marked_calls(messages: list[dict[str, Any]], text: str, spans: list[tuple[int, int]]) -> None:
    """Check that a template with {% generation %} markers writes turns with calls whole, and within markers.

    Args:
        text, spans: what it writes, and what it marks.
    """
    if not any("tool_calls" in message for message in messages):
        return
    speaking = [message for message in messages if message["role"] == "assistant"]
    if len(spans) != len(speaking):
        raise Refused(
            "unmarked_turns",
            f"the chat template marks {len(spans)} generated blocks in a conversation with tool calls, in which the assistant "
            f"has {len(speaking)} turns; put one {{% generation %}} block around each of them, those with calls included",
        )
    for message, (start, end) in zip(speaking, spans):
        if "tool_calls" in message:
            check_written(message, text[start:end])


def _leaves(functions: list[dict[str, Any]]) -> Iterator[tuple[Any, type]]:
    """All that is said in calls: names, the keys of arguments and their values, each with its type, since 1 equals True."""
    waiting: list[Any] = [part for function in functions for part in (function["name"], function["arguments"])]
    while waiting:
        match waiting.pop():
            case dict() as some:
                waiting += [*some, *some.values()]
            case list() as some:
                waiting += some
            case leaf:
                yield leaf, type(leaf)


def _left_out(what: str, functions: list[dict[str, Any]]) -> Refused:
    names = ", ".join(function["name"] for function in functions)
    return Refused(
        "tool_call_left_out",
        f"the chat template doesn't write {what}, in a turn that calls {names[:80]}, so that the model would never learn it; "
        "drop such rows from the corpus, or name a template that writes all of it under tokenizers.NAME.chat_template "
        "(resources/chat_templates/chatml.jinja does)",
    )
