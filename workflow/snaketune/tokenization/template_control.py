"""The control tokens that a template writes around turns, and which of them end a turn, by the roles of the turns.

<|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n

number           0              1           2                          3
ends a turn                     x                                      x
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.template import SHIPPED, Message, Refused, Span, Tools
from snaketune.tokenization.tool_calls import blank_message, shape, tools_omitted

MAX_CACHED = 4096


@dataclass(frozen=True)
class ControlFrame:
    """What a template writes around conversations of one shape, whatever their contents.

    Attributes:
        ids: int32, its control tokens.
        ends: the indices of the control tokens that end a turn.
        omitted: the indices of the turns that the template doesn't write.
    """

    ids: np.ndarray
    ends: list[int]
    omitted: list[int]


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

    def __init__(
        self,
        template: str,
        render: Callable[[Sequence[list[Message]], bool, Tools], tuple[list[str], list[list[Span]]]],
        encode: Callable[[str], Encoding],
        template_only: np.ndarray,
    ):
        """Set up with functions that render and encode, and bool by id: which tokens only a template can write."""
        self._template, self._render, self._encode, self._template_only = template, render, encode, template_only
        self._frames: dict[tuple, ControlFrame] = {}

    def frame(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> ControlFrame:
        """Return the frame of messages of this shape; SnaketuneError if the template omits the tools."""
        key = (add_generation_prompt, tools, *map(shape, messages))
        if key not in self._frames:
            # The cache has no natural bound, for example if every row has other tools.
            if len(self._frames) >= MAX_CACHED:
                self._frames.clear()
            self._frames[key] = self._find(messages, tools, add_generation_prompt)
        return self._frames[key]

    def _find(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> ControlFrame:
        left, right = unused_characters([self._template, tools or ""], 2)
        marks = [f"{left}{number}{right}" for number in range(len(messages))]
        marked = [blank_message(message, mark) for message, mark in zip(messages, marks)]
        (text,), (spans,) = self._render([marked], add_generation_prompt, [tools])
        if tools and text == self._render([marked], add_generation_prompt, [None])[0][0]:
            raise tools_omitted([message["role"] for message in messages], tools)
        encoding = self._encode(text)
        control = [
            (id, span) for id, span in zip(encoding.ids, encoding.offsets, strict=True) if self._template_only[id]
        ]
        starts = [*(text.find(mark) for mark in marks), len(text)]
        speaking = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        span_of = dict(zip(speaking, spans)) if len(spans) == len(speaking) else {}
        ends, omitted = [], []
        for number, (message, mark, start, following) in enumerate(zip(messages, marks, starts, starts[1:])):
            if start < 0:
                omitted.append(number)
            elif "tool_calls" in message:
                # There may be control tokens between the parts of a call, too.
                ends += [
                    at for at, (_, (_, end)) in enumerate(control) if number in span_of and end == span_of[number][1]
                ]
            else:
                after = [at for at, (_, (begin, _)) in enumerate(control) if start + len(mark) <= begin < following]
                ends += after[:1]
        return ControlFrame(np.array([id for id, _ in control], np.int32), ends, omitted)
