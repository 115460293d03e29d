"""Tools of rows, and tool calls of assistants, in the form that chat templates expect.

A row stores its tools as JSON text (see `corpus.values.tools`). A template writes them into the prompt, so their strings are
untrusted text like a user's message.

In a row, a call is part of the assistant's text. A template that reads `tool_calls` writes calls in a form of its own, which
its prompt requests of the model; such a template gets the calls apart from the text:

    row        {"content": "Wait.\\n<tool_call>\\n{"name": "now", "arguments": {"zone": "UTC"}}\\n</tool_call>"}
    template   {"content": "Wait.", "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "now", ...}}]}

Any other template writes the text unchanged. In rows without tools whose system or user turn contains `<tool_call>`, the text
is unchanged too: it is the form that their prompt requests.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from jinja2 import nodes

from snaketune.tokenization.reasoning import KEYS
from snaketune.tokenization.template import Message, Refused, Span, parsed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OPENING, CLOSING = re.compile(rf"{OPEN}\s*"), re.compile(rf"\s*{CLOSE}\s*")
DECODER = json.JSONDecoder()
PLACEHOLDER = "x"


@cache
def reads_calls(template: str) -> bool:
    """Whether the template reads the key `tool_calls` of messages.

    >>> reads_calls("{% if message.tool_calls %}{% endif %}"), reads_calls("{# no tool_calls #}{{ messages[0].content }}")
    (True, False)
    """
    if "tool_calls" not in template:
        return False
    _, tree = parsed(template)
    names = (
        node.attr if isinstance(node, nodes.Getattr) else node.value
        for node in tree.find_all((nodes.Getattr, nodes.Const))
    )
    return "tool_calls" in names


def with_calls(messages: list[Message], tools: str | None) -> list[Message]:
    """Move the calls of assistants to `tool_calls`, and give each result the id and the name of its call.

    Ids are numbered through the conversation and have nine letters and digits, as Mistral's templates require.

    Raises:
        SnaketuneError: the row has tools, and a turn has a call that can't be extracted from its text.
    """
    roles = {message["role"] for message in messages if OPEN in message["content"]}
    if "assistant" not in roles or (not tools and roles & {"system", "user"}):
        return messages
    changed: list[Message] = []
    pending: list[dict[str, Any]] = []
    count = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            text, functions = _parts(message["content"])
            if tools and not functions and OPEN in text and CLOSE in text:
                raise _not_extracted(number, text)
            pending = [
                {"id": f"call{nth:05d}", "type": "function", "function": function}
                for nth, function in enumerate(functions, start=count + 1)
            ]
            count += len(functions)
            message = {**message, "content": text, "tool_calls": list(pending)} if functions else message
        elif message["role"] == "tool" and pending:
            call = pending.pop(0)
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        changed.append(message)
    return changed


def _parts(content: str) -> tuple[str, list[dict[str, Any]]]:
    """Split a content into its text and the calls that it ends with; if it doesn't end with calls, return it and no calls.

    >>> _parts('Wait.\\n<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>')
    ('Wait.', [{'name': 'now', 'arguments': {}}])
    """
    for opening in OPENING.finditer(content):
        if functions := _calls_from(content, opening.start()):
            text = content[: opening.start()]
            # The line break between text and calls belongs to neither; line breaks after reasoning belong to it.
            return text if text.endswith("</think>\n\n") else text.removesuffix("\n"), functions
    return content, []


def _calls_from(content: str, at: int) -> list[dict[str, Any]]:
    """The calls in `content[at:]` if it consists of calls only; else an empty list."""
    functions = []
    while opening := OPENING.match(content, at):
        try:
            function, end = DECODER.raw_decode(content, opening.end())
        except (ValueError, RecursionError):
            return []
        closing = CLOSING.match(content, end)
        match function:
            case {"name": str(), "arguments": dict()} if closing and len(function) == 2:
                functions.append(function)
            case _:
                return []
        at = closing.end()
    return functions if at == len(content) else []


def _not_extracted(number: int, text: str) -> Refused:
    start = text.find(OPEN)
    return Refused(
        "tool_call_in_another_form",
        f"turn {number} of a row has a tool call in an unknown form, or with text after it, so that the chat template, which "
        f"has its own form for calls, can't write it: {text[start : start + 160]!r}. Calls must end a turn, each as "
        '<tool_call>, a line of JSON {"name": ..., "arguments": {...}} and </tool_call>; correct or drop such rows, or name '
        "a template that leaves calls as they are under tokenizers.NAME.chat_template (resources/chat_templates/chatml.jinja)",
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all keys and values in a JSON value that aren't objects or lists themselves."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as mapping:
                pending += [*mapping, *mapping.values()]
            case list() as items:
                pending += items
            case leaf:
                yield leaf


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all strings changed by `change`, keys included."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): with_strings(part, change) for key, part in value.items()}
        case list():
            return [with_strings(part, change) for part in value]
    return value


def texts_in(tools: str | None) -> Iterator[str]:
    """Yield all strings in the tools of a row, keys included."""
    return (leaf for leaf in _leaves(json.loads(tools) if tools else None) if isinstance(leaf, str))


def message_texts(message: Message) -> Iterator[str]:
    """Yield all texts of a message: its content and reasoning, the strings of its calls, the name of the function whose result
    it is."""
    yield message["content"]
    others = [message.get("name"), *(message.get(key) for key in KEYS)]
    others.append([call["function"] for call in message.get("tool_calls", ())])
    yield from (leaf for leaf in _leaves(others) if isinstance(leaf, str))


def replace_texts(message: Message, content: str, change: Callable[[str], str]) -> Message:
    """The message with another content, and with all its other texts changed by `change`."""
    changed: Message = {key: change(message[key]) for key in ("name", *KEYS) if key in message}
    if "tool_calls" in message:
        calls = [{**call, "function": with_strings(call["function"], change)} for call in message["tool_calls"]]
        changed["tool_calls"] = calls
    return {**message, **changed, "content": content}


def blank_message(message: Message, text: str = PLACEHOLDER) -> Message:
    """A message of the same shape whose content and function names are `text`, with arguments of the same types."""
    calls = message.get("tool_calls", ())
    changed: Message = {key: PLACEHOLDER for key in ("name", *KEYS) if key in message}
    if calls:
        changed["tool_calls"] = [
            {**call, "function": {"name": text, "arguments": _blank_value(call["function"]["arguments"])}}
            for call in calls
        ]
    return {**message, **changed, "content": PLACEHOLDER * bool(message["content"]) if calls else text}


def _blank_value(value: Any) -> Any:
    match value:
        case dict():
            return {f"{PLACEHOLDER}{number}": _blank_value(part) for number, part in enumerate(value.values())}
        case list():
            return [_blank_value(part) for part in value]
        case str():
            return PLACEHOLDER
        case bool() | None:
            return value
    return 0


def check_written(message: Message, text: str) -> None:
    """Refuse a message with calls if its text, a name or a part of the arguments is missing in `text`, the turn as rendered."""
    functions = [call["function"] for call in message["tool_calls"]]
    if (content := message["content"].strip()) and content not in text:
        raise _omitted(f"the text beside tool calls, {content[:80]!r}", functions)
    values = [[function["name"], function["arguments"]] for function in functions]
    # Values are counted by type, since 1 equals True.
    for (value, _), count in Counter((leaf, type(leaf)) for leaf in _leaves(values)).items():
        forms = {str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}
        if isinstance(value, str):
            forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        if max(map(text.count, forms)) < count:
            raise _omitted(f"{value!r} of a tool call"[:120], functions)


def check_marked_calls(messages: list[Message], text: str, spans: list[Span]) -> None:
    """Refuse rendered messages, with marked spans, whose turns with calls aren't written completely and inside markers."""
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


def _omitted(what: str, functions: list[dict[str, Any]]) -> Refused:
    names = ", ".join(function["name"] for function in functions)
    return Refused(
        "tool_call_left_out",
        f"the chat template doesn't write {what}, in a turn that calls {names[:80]}, so the model would never learn it; "
        "drop such rows from the corpus, or name a template that writes all of it under tokenizers.NAME.chat_template "
        "(resources/chat_templates/chatml.jinja does)",
    )


def tools_omitted(roles: list[str], tools: str) -> Refused:
    names = ", ".join(tool["function"]["name"] for tool in json.loads(tools))
    return Refused(
        "tools_left_out",
        f"a row offers tools ({names[:80]}), and the chat template doesn't write them, so the model would never see them; "
        f"its roles are [{', '.join(roles)}]. Name a template that writes `tools` under tokenizers.NAME.chat_template "
        "(resources/chat_templates/chatml.jinja does; or add them to a copy of the model's own), or take the column `tools` "
        "out of the source",
    )
