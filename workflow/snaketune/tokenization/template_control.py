"""The control tokens that a template writes around turns: which ones, and which of them end a turn, by the turns' roles.

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
from snaketune.tokenization.tool_calls import harmless, shape
from snaketune.tokenization.tools_argument import Tools, not_written

Render = Callable[[Sequence[list[Message]], bool, Tools], tuple[list[str], list[list[Span]]]]
MAX_KNOWN = 4096


@dataclass(frozen=True)
class Turns:
    """What becomes of the turns of conversations of one shape.

    Attributes:
        count: how many control tokens the template writes.
        ends: the numbers of those that end a turn.
        left_out: the numbers of the turns that it doesn't write.
    """

    count: int
    ends: list[int]
    left_out: list[int]


class LeftOut(Refused):
    """A turn that a template doesn't write.

    Attributes:
        turn: the turn.
    """

    def __init__(self, turn: Message, template: str = "the chat template", rows: str = "a row"):
        self.turn = turn
        super().__init__(
            "turn_left_out",
            f"{template} leaves out the {turn['role']} turn of {rows} (of the first: {turn['content'][:80]!r}), so that the "
            f"model would never see it. Name a template that writes it under tokenizers.NAME.chat_template ({SHIPPED} has "
            "some), or take such turns out of the corpus",
        )


class TemplateControl:
    """Finds them out by rendering contents that hold none, and remembers."""

    def __init__(
        self,
        template: str,
        variables: dict[str, Any],
        render: Render,
        encode: Callable[[str], Encoding],
        telling: np.ndarray,
    ):
        """
        Args:
            variables: what the template can name.
            render: `ChatTokenizer.render`, which knows spans.
            encode: of rendered text.
            telling: bool, by id: which tokens only a template writes.
        """
        self._template, self._variables, self._render = template, variables, render
        self._encode, self._telling = encode, telling
        self._ids: dict[tuple, np.ndarray] = {}
        self._turns: dict[tuple, Turns] = {}

    def ids(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> np.ndarray:
        """int32: the control tokens around such messages, whatever they say.

        Raises:
            SnaketuneError: the template leaves the tools out.
        """
        key = (add_generation_prompt, tools, *map(shape, messages))
        if key not in self._ids:
            _make_room(self._ids)
            said = [harmless(message) for message in messages]
            text = self._text(said, tools, add_generation_prompt)
            if tools and text == self._text(said, None, add_generation_prompt):
                raise not_written([message["role"] for message in messages], tools)
            ids = np.array(self._encode(text).ids, np.int32)
            self._ids[key] = ids[self._telling[ids]]
        return self._ids[key]

    def turns(self, messages: list[Message], tools: str | None, add_generation_prompt: bool = False) -> Turns:
        """What becomes of the turns of such messages."""
        key = (add_generation_prompt, tools, *map(shape, messages))
        if key not in self._turns:
            _make_room(self._turns)
            self._turns[key] = self._found_turns(messages, tools, add_generation_prompt)
        return self._turns[key]

    def _found_turns(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> Turns:
        left, right = unused_characters([self._template, tools or ""], 2)
        marks = [f"{left}{number}{right}" for number in range(len(messages))]
        marked = [harmless(message, mark) for message, mark in zip(messages, marks)]
        (text,), (spans,) = self._render([marked], add_generation_prompt, [tools])
        encoding = self._encode(text)
        control = [span for span, id in zip(encoding.offsets, encoding.ids) if self._telling[id]]
        starts = [*(text.find(mark) for mark in marks), len(text)]
        speaking = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        said = dict(zip(speaking, spans)) if len(spans) == len(speaking) else {}
        ends, left_out = [], []
        for number, (message, mark, start, following) in enumerate(zip(messages, marks, starts, starts[1:])):
            if start < 0:
                left_out.append(number)
            elif "tool_calls" in message:
                # Control tokens may stand between the parts of a call, too.
                ends += [place for place, (_, end) in enumerate(control) if number in said and end == said[number][1]]
            else:
                ends += [place for place, (at, _) in enumerate(control) if start + len(mark) <= at < following][:1]
        return Turns(len(control), ends, left_out)

    def _text(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> str:
        (text,), _ = render(self._template, [messages], self._variables, add_generation_prompt, [tools])
        return text


def _make_room(known: dict[Any, Any]) -> None:
    """Forget all where there may be no end of them, as with tools that are another set in every row."""
    if len(known) >= MAX_KNOWN:
        known.clear()
