"""Spans of assistant turns for templates that don't mark them.

Most models' own templates have no {% generation %} markers. For these, the conversation is rendered a second time with brackets
(a character that occurs in no text) around the content of each assistant turn; without the brackets, the text must be the same.
The content of a turn and the control token after it are supervised.

    with brackets   <|user|>\\nHi<|end|>\\n<|assistant|>\\n①Hello!①<|end|>\\n
    supervised                                           Hello! <|end|>

A turn with tool calls is written in the template's own form, in which only the names of functions are certain to occur
unchanged. These are bracketed, and the conversation up to the turn is rendered twice more, with the calls and with a text
instead of them: the turn starts where the two differ, and ends with its last control token.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from snaketune.tokenization.control import any_of, unused_characters
from snaketune.tokenization.template import Message, Span, render
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tool_calls import check_written
from snaketune.tokenization.tools_argument import Tools


def render_unmarked(
    template: str,
    conversations: Sequence[list[Message]],
    variables: dict[str, Any],
    add_generation_prompt: bool,
    control: Sequence[str],
    tools: Tools = (),
) -> tuple[list[str], list[list[Span]]]:
    """Return the result of `template.render`, with the spans of assistant turns.

    Args:
        control: the strings of the control tokens. One that follows a content, optionally after spaces, ends the turn.
    Raises:
        SnaketuneError: the template refuses a conversation, or doesn't write each assistant content unchanged and once.
    """

    def rendered(messages: list[Message], own_tools: Tools) -> str:
        ((text,), _) = render(template, [messages], variables, False, own_tools)
        return text

    texts, _ = render(template, conversations, variables, add_generation_prompt, tools)
    (bracket,) = unused_characters(texts, 1)
    bracketed = [_add_brackets(messages, bracket, inside=False) for messages in conversations]
    marked, _ = render(template, bracketed, variables, add_generation_prompt, tools)
    ends = re.compile(f" *(?:{any_of(control)})")
    spans = []
    for number, (messages, text, candidate) in enumerate(zip(conversations, texts, marked, strict=True)):
        own_tools = tools[number : number + 1]
        if candidate.replace(bracket, "") != text:
            # With brackets inside the outer whitespace, a template that trims removes the same as before.
            inside = _add_brackets(messages, bracket, inside=True)
            ((candidate,), _) = render(template, [inside], variables, add_generation_prompt, own_tools)
        parts = [len(message.get("tool_calls", [0])) for message in messages if message["role"] == "assistant"]
        if candidate.replace(bracket, "") != text or candidate.count(bracket) != 2 * sum(parts):
            raise _text_changed(text)
        spans.append(_spans(messages, candidate, text, bracket, ends, partial(rendered, own_tools=own_tools)))
    return texts, spans


def _text_changed(text: str) -> Refused:
    return Refused(
        "assistant_text_changed",
        f"the chat template changes what assistants say, or doesn't write it once, in {text[:200]!r}, so the supervised "
        "tokens aren't known; put {% generation %} markers into a copy of it and name that under `chat_template`, or "
        "drop such rows from the corpus",
    )


def _spans(
    messages: list[Message],
    bracketed: str,
    text: str,
    bracket: str,
    ends: re.Pattern[str],
    rendered: Callable[[list[Message]], str],
) -> list[Span]:
    positions, position = [], 0
    for part in bracketed.split(bracket)[:-1]:
        position += len(part)
        positions.append(position)
    remaining = iter(positions)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = next(remaining), next(remaining)
        if "tool_calls" in message:
            for _ in message["tool_calls"][1:]:
                next(remaining), next(remaining)
            before, turn = _turn_with_calls(messages[: number + 1], bracket, ends, rendered)
            check_written(message, turn)
            start -= before
            end = start + len(turn)
            if text[start:end] != turn:
                raise _text_changed(text)
        elif closing := ends.match(text, end):
            end = closing.end()
        spans.append((start, end))
    return spans


def _turn_with_calls(
    messages: list[Message], bracket: str, ends: re.Pattern[str], rendered: Callable[[list[Message]], str]
) -> tuple[int, str]:
    """Return, for the last turn, which has calls, the number of its characters before the first name, and its text."""
    *before, last = messages
    with_calls = rendered([*before, *_add_brackets([last], bracket, inside=False)])
    with_text = rendered([*before, {"role": "assistant", "content": bracket}]).split(bracket)[0]
    start = next((at for at, (one, other) in enumerate(zip(with_calls, with_text)) if one != other), len(with_text))
    if start < len(with_text):
        # `<tool_call>` and `<think>` begin alike, so the turn starts after the last control token or line break before.
        frame = with_calls[:start]
        start = max(frame.rfind("\n") + 1, *(mark.end() for mark in ends.finditer(frame)), 0)
    turn = with_calls[start:].replace(bracket, "")
    *_, closing = [None, *ends.finditer(turn)]
    if closing is None:
        raise Refused(
            "no_end_of_turn",
            f"the chat template ends a turn with tool calls without a control token, {turn[-80:]!r}, so the model would "
            "never stop; use a template that ends turns with one",
        )
    return with_calls.find(bracket) - start, turn[: closing.end()]


def _add_brackets(messages: list[Message], bracket: str, inside: bool) -> list[Message]:
    """Put brackets around assistant contents (`inside`: around their visible part), or for calls around the function names."""

    def around(content: str) -> str:
        visible = content.strip() if inside else content
        before, after = content.split(visible, 1) if visible else (content, "")
        return before + bracket + visible + bracket + after

    def changed(message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        if "tool_calls" not in message:
            return {**message, "content": around(message["content"])}
        functions = [call["function"] for call in message["tool_calls"]]
        named = [function | {"name": bracket + function["name"] + bracket} for function in functions]
        calls = [call | {"function": function} for call, function in zip(message["tool_calls"], named)]
        return {**message, "tool_calls": calls}

    return [changed(message) for message in messages]
