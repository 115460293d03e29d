"""The control tokens that a template writes around turns: which ones, and which of them end a turn, by the turns' roles.

<|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n

number           0              1           2                          3
ends a turn                     x                                      x
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.offered import not_written
from snaketune.tokenization.template import Message, render

HARMLESS = "x"
MAX_KNOWN = 4096


class TemplateControl:
    """Finds them out by rendering contents that hold none, and remembers."""

    def __init__(
        self, template: str, variables: dict[str, Any], encode: Callable[[str], Encoding], telling: np.ndarray
    ):
        """
        Args:
            variables: what the template can name.
            encode: of rendered text.
            telling: bool, by id: which tokens only a template writes.
        """
        self._template, self._variables, self._encode, self._telling = template, variables, encode, telling
        self._ids: dict[tuple, np.ndarray] = {}
        self._turn_ends: dict[tuple, tuple[int, list[int]]] = {}

    def ids(self, roles: Sequence[str], tools: str | None, add_generation_prompt: bool) -> np.ndarray:
        """int32: the control tokens around turns of these roles.

        Raises:
            SnaketuneError: the template leaves the tools out.
        """
        key = (add_generation_prompt, tools, *roles)
        if key not in self._ids:
            _make_room(self._ids)
            harmless = [{"role": role, "content": HARMLESS} for role in roles]
            text = self._rendered(harmless, tools, add_generation_prompt)
            if tools and text == self._rendered(harmless, None, add_generation_prompt):
                raise not_written(list(roles), tools)
            ids = np.array(self._encode(text).ids, np.int32)
            self._ids[key] = ids[self._telling[ids]]
        return self._ids[key]

    def turn_ends(self, roles: Sequence[str], tools: str | None) -> tuple[int, list[int]]:
        """How many control tokens there are around such turns, and the numbers of those that end one."""
        key = (tools, *roles)
        if key not in self._turn_ends:
            _make_room(self._turn_ends)
            self._turn_ends[key] = self._found_turn_ends(roles, tools)
        return self._turn_ends[key]

    def _found_turn_ends(self, roles: Sequence[str], tools: str | None) -> tuple[int, list[int]]:
        left, right = unused_characters([self._template, tools or ""], 2)
        marks = [f"{left}{number}{right}" for number in range(len(roles))]
        text = self._rendered([{"role": role, "content": mark} for role, mark in zip(roles, marks)], tools, False)
        encoding = self._encode(text)
        control = [start for (start, _), id in zip(encoding.offsets, encoding.ids) if self._telling[id]]
        starts = [*(text.find(mark) for mark in marks), len(text)]
        ends = []
        for mark, start, following in zip(marks, starts, starts[1:]):
            after = [number for number, at in enumerate(control) if start + len(mark) <= at < following]
            ends += after[:1] if start >= 0 else []
        return len(control), ends

    def _rendered(self, messages: list[Message], tools: str | None, add_generation_prompt: bool) -> str:
        (text,), _ = render(self._template, [messages], self._variables, add_generation_prompt, [tools])
        return text


def _make_room(known: dict[Any, Any]) -> None:
    """Forget all where there may be no end of them, as with tools that are another set in every row."""
    if len(known) >= MAX_KNOWN:
        known.clear()
