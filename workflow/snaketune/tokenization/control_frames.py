"""The control tokens that a chat template writes around turns, by the shape of a conversation."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.chat_template import ChatTemplate
from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.reasoning import KEYS
from snaketune.tokenization.template import SHIPPED, Message, Refused
from snaketune.tokenization.tool_calls import blank_message

MAX_CACHED = 4096


@dataclass(frozen=True)
class ControlFrame:
    """The control tokens that a template writes around conversations of one shape, whatever their contents.

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n      ends [1, 3]

    Attributes:
        ids: int32, its control tokens.
        ends: for each turn, the index of the control token that ends it; None if none does.
        omitted: the indices of the turns that the template doesn't write.
        writes_tools: whether it writes the tools, where there are any.
    """

    ids: np.ndarray
    ends: list[int | None]
    omitted: list[int]
    writes_tools: bool


class OmittedTurn(Refused):
    """A turn that a template doesn't write."""

    def __init__(self, turn: Message, template: str = "the chat template", rows: str = "a row"):
        self.turn = turn
        super().__init__(
            "turn_left_out",
            f"{template} omits the {turn['role']} turn of {rows} (first: {turn['content'][:80]!r}), so the model "
            f"would never see it. Name a template that writes it under tokenizers.NAME.chat_template ({SHIPPED} has some), "
            "or remove such turns from the corpus",
        )


class TemplateControl:
    """Determines the control tokens of a template by rendering contents without any, and caches them by shape."""

    def __init__(self, template: ChatTemplate, encode: Callable[[str], Encoding], template_only: np.ndarray):
        """Set up with a function that encodes text, and bool by id: which tokens only a template can write."""
        self._template, self._encode, self._template_only = template, encode, template_only
        self._frames: dict[tuple, ControlFrame] = {}

    def frame(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> ControlFrame:
        """The frame of messages of this shape."""
        shape = (
            json.dumps(blank_message(message)) if message.keys() & {"tool_calls", *KEYS} else message["role"]
            for message in messages
        )
        key = (add_generation_prompt, tools, *shape)
        if key not in self._frames:
            # The cache has no natural bound, for example if every row has other tools.
            if len(self._frames) >= MAX_CACHED:
                self._frames.clear()
            self._frames[key] = self._find(messages, tools, add_generation_prompt)
        return self._frames[key]

    def _find(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> ControlFrame:
        left, right = unused_characters([self._template.text, tools or ""], 2)
        marks = [f"{left}{number}{right}" for number in range(len(messages))]
        marked = [blank_message(message, mark) for message, mark in zip(messages, marks)]
        (text,), (spans,) = self._template.render([marked], add_generation_prompt, [tools])
        # A template may write calls only where there are tools, which rendering by `ChatTokenizer` would refuse.
        without = self._template.write(marked, add_generation_prompt) if tools else None
        encoding = self._encode(text)
        control = [
            (id, span) for id, span in zip(encoding.ids, encoding.offsets, strict=True) if self._template_only[id]
        ]
        starts = [*(text.find(mark) for mark in marks), len(text)]
        speaking = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        span_of = dict(zip(speaking, spans)) if len(spans) == len(speaking) else {}
        ends, omitted = [None] * len(messages), []
        for number, (message, mark, start, following) in enumerate(zip(messages, marks, starts, starts[1:])):
            if start < 0:
                omitted.append(number)
            elif "tool_calls" in message:
                # There may be control tokens between the parts of a call, too.
                span = span_of.get(number)
                ends[number] = next((at for at, (_, (_, end)) in enumerate(control) if span and end == span[1]), None)
            else:
                after = (at for at, (_, (begin, _)) in enumerate(control) if start + len(mark) <= begin < following)
                ends[number] = next(after, None)
        ids = np.array([id for id, _ in control], np.int32)
        return ControlFrame(ids, ends, omitted, writes_tools=text != without)
