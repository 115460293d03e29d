"""Spans of assistant turns: in characters for templates that don't mark them, and from characters to tokens for all.

Most models' own templates have no {% generation %} markers. In a template that treats reasoning, a turn is what follows its
prompt, as the model generates it (`generated_spans`). Else, or where a turn doesn't follow its prompt, the markers of TRL's
training template are used if there is one (`creation.check`) and it writes the same text.

For any other template, the conversation is rendered a second time with brackets
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
from itertools import accumulate

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.control import any_of, unused_characters
from snaketune.tokenization.reasoning import THOUGHT, check_reasoning, reasoning_of
from snaketune.tokenization.template import Message, Refused, Span, Tools
from snaketune.tokenization.tool_calls import check_written

# Variables with which the generation prompt of a template may lead to a turn: its default, with reasoning, without.
THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})


def bracketed_spans(
    conversations: Sequence[list[Message]],
    texts: Sequence[str],
    tools: Tools,
    control: Sequence[str],
    write: Callable[..., list[str]],
) -> list[list[Span]]:
    """The spans of assistant turns in `texts`, the rendered conversations, from brackets around their contents.

    Args:
        control: the strings of the control tokens. One that follows a content, optionally after spaces, ends the turn.
        write: renders conversations, given these and `tools`.
    Raises:
        SnaketuneError: the template refuses a conversation, or doesn't write each assistant content unchanged and once.
    """
    (bracket,) = unused_characters(texts, 1)
    marked = write([_add_brackets(messages, bracket, inside=False) for messages in conversations], tools=tools)
    ends = re.compile(f" *(?:{any_of(control)})")
    spans = []
    for messages, text, candidate, own_tools in zip(conversations, texts, marked, tools, strict=True):

        def rendered(conversation: list[Message], own_tools: str | None = own_tools) -> str:
            return write([conversation], tools=[own_tools])[0]

        if candidate.replace(bracket, "") != text:
            # With brackets inside the outer whitespace, a template that trims removes the same as before.
            candidate = rendered(_add_brackets(messages, bracket, inside=True))
        parts = sum(len(message.get("tool_calls", [0])) for message in messages if message["role"] == "assistant")
        if candidate.replace(bracket, "") != text or candidate.count(bracket) != 2 * parts:
            raise _text_changed(text)
        spans.append(_spans(messages, candidate, text, bracket, ends, rendered))
    return spans


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
    """The span of each assistant turn in `text`, which is `bracketed` without brackets."""
    positions = accumulate(map(len, bracketed.split(bracket)[:-1]))
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # All brackets of the turn: two for each call, or two.
        start, end, *_ = [next(positions) for _ in range(2 * len(message.get("tool_calls", [0])))]
        if "tool_calls" in message:
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
    start = next(
        (at for at, (character, other) in enumerate(zip(with_calls, with_text)) if character != other), len(with_text)
    )
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


def generated_spans(
    messages: list[Message],
    text: str,
    trained: Sequence[bool] | None,
    control: Sequence[str],
    rendered: Callable[..., str],
) -> list[Span | None] | None:
    """The span of each assistant turn in `text` as the model generates it: from the end of its prompt, as the template
    writes it for the turns before, to the end of turn.

    A span is None if `text` has another form of the turn than the one that is generated, as Qwen3's template drops the
    reasoning of earlier turns, or if an earlier turn isn't trained. The result is None if not even the last turn follows its
    prompt.

    Args:
        text: the rendered messages.
        trained: which assistant turns are trained; None for all.
        rendered: renders messages, with `prompt=True` also the generation prompt, with further variables of the template.
    """
    ends = re.compile(any_of(control))
    spans: list[Span | None] = []
    speaking = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for turn_number, number in enumerate(speaking):
        if trained is not None and not trained[turn_number] and number != speaking[-1]:
            spans.append(None)
            continue
        last = number == len(messages) - 1
        turn = text if last else rendered(messages[: number + 1])
        prompts = (rendered(messages[:number], prompt=True, **thinking) for thinking in THINKING)
        start = next((len(prompt) for prompt in prompts if turn.startswith(prompt)), None)
        if start is None:
            if number == speaking[-1]:
                return None
            spans.append(None)
            continue
        *_, closing = [None, *ends.finditer(turn, start)]
        end = closing.end() if closing else len(turn)
        spans.append((start, end) if last or text.startswith(turn[:end]) else None)
        if spans[-1] is not None:
            check_turn(messages[number], text[start:end])
    return spans


def as_generated(messages: list[Message], text: str, spans: list[Span | None]) -> list[Span | None]:
    """The spans without those of earlier turns whose reasoning isn't in them; refuse the row if it is the last turn."""
    speaking = [message for message in messages if message["role"] == "assistant"]
    if len(spans) != len(speaking):
        return spans
    checked = list(spans)
    for number, (message, span) in enumerate(zip(speaking, spans)):
        if span is None or reasoning_of(message) in text[slice(*span)]:
            continue
        if message is messages[-1]:
            check_reasoning(message, text[slice(*span)])
        checked[number] = None
    return checked


def check_turn(message: Message, turn: str) -> None:
    """Refuse an assistant's message of which the template doesn't write all in `turn`."""
    check_reasoning(message, turn)
    if "tool_calls" in message:
        check_written(message, turn)
    elif THOUGHT.sub("", message["content"]).strip() not in turn:
        raise _text_changed(turn)


def without_blanks(text: str, spans: list[Span], control: Sequence[str]) -> list[Span]:
    """Spans without the blanks after an end of turn: they are the template's, since the model stops before them."""
    closings = tuple(control)

    def end_of(start: int, end: int) -> int:
        turn = text[start:end].rstrip()
        return start + len(turn) if turn.endswith(closings) else end

    return [(start, end_of(start, end)) for start, end in spans]


def token_spans(encoding: Encoding, spans: list[Span | None], is_control: np.ndarray) -> list[Span | None]:
    """Return, for each span, the tokens (first, last + 1) that contain any of its characters; (0, 0) if none does,
    None for None.

        characters   0-12           12-21      21-22  22-24  24-27  27-37
        tokens       <|im_start|>   assistant  \\n     He     llo    <|im_end|>

    Here the characters (22, 37) are the tokens (3, 6). transformers' mask differs in three cases: it is empty if the
    span starts with whitespace and the tokenizer's post-processor trims offsets; it lacks the last tokens of a character that
    is encoded as several tokens at the span's end; and it includes the control token before the span if that token strips
    whitespace after it and the span starts with whitespace.

    Args:
        encoding: the encoding of the text, n tokens.
        is_control: bool[n], which of the tokens are control tokens.
    """
    converted: list[Span | None] = []
    for span in spans:
        if span is None:
            converted.append(None)
            continue
        start, end = span
        first = _first_token(encoding, range(start, end))
        last = _first_token(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            converted.append((0, 0))
            continue
        # `char_to_token` returns the first token of a character that is encoded as several.
        while last + 1 < len(is_control) and encoding.token_to_chars(last + 1)[0] < end:
            last += 1
        if is_control[first] and encoding.token_to_chars(first)[0] < start:
            first += 1
        converted.append((first, max(first, last + 1)))
    return converted


def _first_token(encoding: Encoding, characters: range) -> int | None:
    """The token of the first of `characters` that is in any token; None if none is."""
    return next((token for at in characters if (token := encoding.char_to_token(at)) is not None), None)
