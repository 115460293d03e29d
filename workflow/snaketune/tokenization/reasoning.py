"""Reasoning of assistants: where a chat template reads it, and messages with or without it.

In a row, reasoning is a part of the assistant's text, `<think>\\n…\\n</think>\\n\\n`. A template that reads a key of its own
for it gets it there:

    row        {"content": "<think>\\n1 + 1\\n</think>\\n\\n2"}
    template   {"content": "2", "reasoning_content": "1 + 1"}

Any other template writes the text unchanged, or parses it itself.
"""

import re
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from snaketune.tokenization.template import Message, Refused

# In the order in which they are tried; templates of the field read one of them.
KEYS = ("reasoning_content", "reasoning", "thinking")
# For Python and Arrow alike.
BLOCK = r"(?s)^\s*<think>(.*?)</think>\s*"
THOUGHT = re.compile(BLOCK)
# What templates write for no reasoning; their generation prompt may have opened it.
EMPTY_BLOCK = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
MARK = "snaketune"
CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {}}}


def keys_read(rendered: Callable[[list[Message]], str], *, with_calls: bool) -> tuple[str, ...]:
    """The keys whose text a template writes in an assistant's last turn, with or without tool calls.

    A rendering tells more than the template's syntax, in which a typed part of a content has the same names.
    """
    question: Message = {"role": "user", "content": "x"}
    answer: Message = {"role": "assistant", "content": "" if with_calls else "x"}
    if with_calls:
        answer["tool_calls"] = [CALL]
    written = []
    for key in KEYS:
        try:
            written += [key] if MARK in rendered([question, answer | {key: MARK}]) else []
        except Refused:
            return ()
    return tuple(written)


def with_reasoning(messages: list[Message], keys: dict[bool, tuple[str, ...]]) -> list[Message]:
    """Move the reasoning of assistants from their text to `keys`, those that the template reads with and without tool calls.

    >>> keys = {False: ("thinking",), True: ()}
    >>> with_reasoning([{"role": "assistant", "content": "<think>\\n1 + 1\\n</think>\\n\\n2"}], keys)
    [{'role': 'assistant', 'content': '2', 'thinking': '1 + 1'}]
    """

    def moved(message: Message) -> Message:
        reasoning_keys = keys["tool_calls" in message]
        if message["role"] != "assistant" or not reasoning_keys or not (found := THOUGHT.match(message["content"])):
            return message
        return (
            message | {"content": message["content"][found.end() :]} | dict.fromkeys(reasoning_keys, found[1].strip())
        )

    return [moved(message) for message in messages]


def reasoning_of(message: Message) -> str:
    """The reasoning of a message, under a key or in its text; "" if it has none."""
    if found := THOUGHT.match(message["content"]):
        return found[1].strip()
    return next((message[key] for key in KEYS if key in message), "")


def with_marks(messages: list[Message], mark: str) -> list[Message]:
    """The messages with `mark` at the start of assistants' turns without reasoning: of their text, or of the first call."""

    def marked(message: Message) -> Message:
        if message["role"] != "assistant" or reasoning_of(message):
            return message
        content = THOUGHT.sub("", message["content"])
        if visible := content.lstrip():
            return message | {"content": content.removesuffix(visible) + mark + visible}
        first, *others = message.get("tool_calls", [CALL])
        function = first["function"] | {"name": mark + first["function"]["name"]}
        return message | {"content": content, "tool_calls": [first | {"function": function}, *others]}

    return [marked(message) for message in messages]


def without_reasoning(roles: pa.StringArray, contents: pa.StringArray) -> pa.StringArray:
    """The contents of turns, those of assistants without the reasoning that they start with."""
    return pc.if_else(
        pc.equal(roles, "assistant"), pc.replace_substring_regex(contents, BLOCK, "", max_replacements=1), contents
    )


def check_reasoning(message: Message, text: str) -> None:
    """Refuse a message whose reasoning is missing in `text`, its turn as rendered."""
    if (thought := reasoning_of(message)) and thought not in text:
        raise Refused(
            "reasoning_left_out",
            f"the chat template doesn't write an assistant's reasoning, {thought[:80]!r}, even in the last turn, so the "
            "model would never learn it; leave it out with corpora.NAME.reasoning: none, or name a template that writes it "
            "under tokenizers.NAME.chat_template",
        )
