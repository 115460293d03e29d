"""The control tokens that a template writes around turns, and which of them end a turn, by the roles of the turns.

<|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n

number           0              1           2                          3
ends a turn                     x                                      x
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.template import SHIPPED, Message, Span, render
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tool_calls import blank_message, shape
from snaketune.tokenization.tools_argument import Tools, tools_omitted

Render = Callable[[Sequence[list[Message]], bool, Tools], tuple[list[str], list[list[Span]]]]
MAX_CACHED = 4096


@dataclass(frozen=True)
class TurnEnds:
    """The ends of turns in conversations of one shape.

    Attributes:
        count: how many control tokens the template writes.
        ends: the indices of the control tokens that end a turn.
        omitted: the indices of the turns that the template doesn't write.
    """

    count: int
    ends: list[int]
    omitted: list[int]


class OmittedTurn(Refused):
    """A turn that a template doesn't write.

    Attributes:
        turn: the turn.
    """

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
        variables: dict[str, Any],
        render: Render,
        encode: Callable[[str], Encoding],
        template_only: np.ndarray,
    ):
        """Set up for a template.

        Args:
            variables: the variables of the template.
            render: `ChatTokenizer.render`, which also returns spans.
            encode: encodes rendered text.
            template_only: bool, by id: which tokens only a template can write.
        """
        self._template, self._variables, self._render = template, variables, render
        self._encode, self._template_only = encode, template_only
        self._ids: dict[tuple, np.ndarray] = {}
        self._turns: dict[tuple, TurnEnds] = {}

    def ids(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> np.ndarray:
        """Return int32, the control tokens around messages of this shape, whatever their contents.

        Raises:
            SnaketuneError: the template omits the tools.
        """
        key = (add_generation_prompt, tools, *map(shape, messages))
        if key not in self._ids:
            _limit_size(self._ids)
            blank = [blank_message(message) for message in messages]
            text = self._text(blank, tools, add_generation_prompt)
            if tools and text == self._text(blank, None, add_generation_prompt):
                raise tools_omitted([message["role"] for message in messages], tools)
            ids = np.array(self._encode(text).ids, np.int32)
            self._ids[key] = ids[self._template_only[ids]]
        return self._ids[key]

    def turns(self, messages: list[Message], tools: str | None, add_generation_prompt: bool = False) -> TurnEnds:
        """Return the ends of turns of messages of this shape."""
        key = (add_generation_prompt, tools, *map(shape, messages))
        if key not in self._turns:
            _limit_size(self._turns)
            self._turns[key] = self._find_turns(messages, tools, add_generation_prompt)
        return self._turns[key]

    def _find_turns(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> TurnEnds:
        left, right = unused_characters([self._template, tools or ""], 2)
        marks = [f"{left}{number}{right}" for number in range(len(messages))]
        marked = [blank_message(message, mark) for message, mark in zip(messages, marks)]
        (text,), (spans,) = self._render([marked], add_generation_prompt, [tools])
        encoding = self._encode(text)
        control = [span for span, id in zip(encoding.offsets, encoding.ids) if self._template_only[id]]
        starts = [*(text.find(mark) for mark in marks), len(text)]
        speaking = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        span_of = dict(zip(speaking, spans)) if len(spans) == len(speaking) else {}
        ends, omitted = [], []
        for number, (message, mark, start, following) in enumerate(zip(messages, marks, starts, starts[1:])):
            if start < 0:
                omitted.append(number)
            elif "tool_calls" in message:
                # There may be control tokens between the parts of a call, too.
                ends += [at for at, (_, end) in enumerate(control) if number in span_of and end == span_of[number][1]]
            else:
                ends += [at for at, (begin, _) in enumerate(control) if start + len(mark) <= begin < following][:1]
        return TurnEnds(len(control), ends, omitted)

    def _text(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> str:
        (text,), _ = render(self._template, [messages], self._variables, add_generation_prompt, [tools])
        return text


def _limit_size(cache: dict[Any, Any]) -> None:
    """Clear a full cache; it has no natural bound, for example if every row has other tools."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
