"""Where assistants speak, in templates that don't mark it.

Most models' own templates have no {% generation %} markers. There, the conversation is rendered a second time with a
character that occurs nowhere around each assistant's content; taken out again, it must leave the text as it was. What is
supervised of a turn is its content and the control token after it.

    with brackets   <|user|>\\nHi<|end|>\\n<|assistant|>\\n①Hello!①<|end|>\\n
    supervised                                           Hello! <|end|>

A turn with tool calls is written in the template's own form, of which only the names of functions are known to stand there as
they are. These are bracketed, and the rest of the turn is found by rendering the conversation up to it, once with the calls and
once with a text in their place: the turn starts where the two part, and ends with its last control token.
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
    """What `template.render` returns, with the spans of assistant turns.

    Args:
        control: the strings of the control tokens. One that follows a content, perhaps after spaces, ends the turn.
    Raises:
        SnaketuneError: the template refuses a conversation, or doesn't write what assistants say as it is, once each.
    """

    def rendered(messages: list[Message], offered: Tools) -> str:
        ((text,), _) = render(template, [messages], variables, False, offered)
        return text

    texts, _ = render(template, conversations, variables, add_generation_prompt, tools)
    (bracket,) = unused_characters(texts, 1)
    bracketed = [_bracketed(messages, bracket, inside=False) for messages in conversations]
    marked, _ = render(template, bracketed, variables, add_generation_prompt, tools)
    ends = re.compile(f" *(?:{any_of(control)})")
    spans = []
    for number, (messages, text, candidate) in enumerate(zip(conversations, texts, marked, strict=True)):
        offered = tools[number : number + 1]
        if candidate.replace(bracket, "") != text:
            # A template that trims finds what to trim.
            inside = _bracketed(messages, bracket, inside=True)
            ((candidate,), _) = render(template, [inside], variables, add_generation_prompt, offered)
        parts = [len(message.get("tool_calls", [0])) for message in messages if message["role"] == "assistant"]
        if candidate.replace(bracket, "") != text or candidate.count(bracket) != 2 * sum(parts):
            raise _changed(text)
        spans.append(_spans(messages, candidate, text, bracket, ends, partial(rendered, offered=offered)))
    return texts, spans


def _changed(text: str) -> Refused:
    return Refused(
        "assistant_text_changed",
        f"the chat template changes what assistants say, or doesn't write it once, in {text[:200]!r}, so it isn't "
        "known what is to be supervised; put {% generation %} markers into a copy of it and name that under "
        "`chat_template`, or drop such rows from the corpus",
    )


def _spans(
    messages: list[Message],
    bracketed: str,
    text: str,
    bracket: str,
    ends: re.Pattern[str],
    rendered: Callable[[list[Message]], str],
) -> list[Span]:
    places, position = [], 0
    for part in bracketed.split(bracket)[:-1]:
        position += len(part)
        places.append(position)
    remaining = iter(places)
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
                raise _changed(text)
        elif closing := ends.match(text, end):
            end = closing.end()
        spans.append((start, end))
    return spans


def _turn_with_calls(
    messages: list[Message], bracket: str, ends: re.Pattern[str], rendered: Callable[[list[Message]], str]
) -> tuple[int, str]:
    """Of the last turn, which has calls: how many characters of it stand before the first name; and its text to its end."""
    *before, last = messages
    with_calls = rendered([*before, *_bracketed([last], bracket, inside=False)])
    with_text = rendered([*before, {"role": "assistant", "content": bracket}]).split(bracket)[0]
    start = next((at for at, (one, other) in enumerate(zip(with_calls, with_text)) if one != other), len(with_text))
    if start < len(with_text):
        # `<tool_call>` and `<think>` begin alike: the two part after a control token, or on a new line.
        frame = with_calls[:start]
        start = max(frame.rfind("\n") + 1, *(mark.end() for mark in ends.finditer(frame)), 0)
    turn = with_calls[start:].replace(bracket, "")
    *_, closing = [None, *ends.finditer(turn)]
    if closing is None:
        raise Refused(
            "no_end_of_turn",
            f"the chat template ends a turn with tool calls in no control token, {turn[-80:]!r}, so that the model would "
            "never stop; use a template that ends turns with one",
        )
    return with_calls.find(bracket) - start, turn[: closing.end()]


def _bracketed(messages: list[Message], bracket: str, inside: bool) -> list[Message]:
    """With a bracket at both ends of what assistants say, or of what is visible of it; of calls, of the function's name."""

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
