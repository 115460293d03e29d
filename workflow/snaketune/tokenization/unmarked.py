"""Where assistants speak, in templates that don't mark it.

Most models' own templates have no {% generation %} markers. There, the conversation is rendered a second time with a
character that occurs nowhere around each assistant's content; taken out again, it must leave the text as it was. What is
supervised of a turn is its content and the control token after it.

    with brackets   <|user|>\\nHi<|end|>\\n<|assistant|>\\n①Hello!①<|end|>\\n
    supervised                                           Hello! <|end|>
"""

import re
from collections.abc import Sequence
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.tokenization.control import any_of, unused_characters
from snaketune.tokenization.offered import Tools
from snaketune.tokenization.template import Message, Span, render


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
    texts, _ = render(template, conversations, variables, add_generation_prompt, tools)
    (bracket,) = unused_characters(texts, 1)
    bracketed = [_bracketed(messages, bracket, inside=False) for messages in conversations]
    marked, _ = render(template, bracketed, variables, add_generation_prompt, tools)
    ends = re.compile(f" *(?:{any_of(control)})")
    spans = []
    for number, (messages, text, candidate) in enumerate(zip(conversations, texts, marked, strict=True)):
        if candidate.replace(bracket, "") != text:
            # A template that trims finds what to trim.
            inside = _bracketed(messages, bracket, inside=True)
            ((candidate,), _) = render(template, [inside], variables, add_generation_prompt, tools[number : number + 1])
        turns = sum(message["role"] == "assistant" for message in messages)
        if candidate.replace(bracket, "") != text or candidate.count(bracket) != 2 * turns:
            raise SnaketuneError(
                f"the chat template changes what assistants say, or doesn't write it once, in {text[:200]!r}, so it isn't "
                "known what is to be supervised; put {% generation %} markers into a copy of it and name that under "
                "`chat_template`, or drop such rows from the corpus"
            )
        spans.append(_spans(candidate, text, bracket, ends))
    return texts, spans


def _bracketed(messages: list[Message], bracket: str, inside: bool) -> list[Message]:
    """With a bracket at both ends of what assistants say, or of what is visible of it."""

    def around(content: str) -> str:
        visible = content.strip() if inside else content
        before, after = content.split(visible, 1) if visible else (content, "")
        return before + bracket + visible + bracket + after

    return [
        {**message, "content": around(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def _spans(bracketed: str, text: str, bracket: str, ends: re.Pattern[str]) -> list[Span]:
    places, position = [], 0
    for part in bracketed.split(bracket)[:-1]:
        position += len(part)
        places.append(position)
    spans = []
    for start, end in zip(places[::2], places[1::2]):
        closing = ends.match(text, end)
        spans.append((start, closing.end() if closing else end))
    return spans
