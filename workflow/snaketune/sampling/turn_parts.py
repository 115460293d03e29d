"""The parts of a generated turn: reasoning, content and tool calls, as the chat template of the model's family writes them.

The marks aren't listed by family: they are what the template writes around a known text.

    template    … <think>\\nREASONING\\n</think>\\n\\nCONTENT        reasoning ends at `</think>`, begins at `<think>`
    response    1 + 1 is 2.\\n</think>\\n\\n2                        the prompt ended with `<think>`
    parts       reasoning "1 + 1 is 2.", content "2"
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.chat_template import QUESTION
from snaketune.tokenization.reasoning import CALL, MARK
from snaketune.tokenization.template import Refused
from snaketune.tokenization.tool_calls import OPEN

# The form of rows, which templates without one of their own write unchanged.
THINK = ("<think>", "</think>")
CONTENT = "visible"
# What templates write around calls: tags, tokens in brackets, brackets and commas of lists.
MARKS = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|[\s\[\],;]")


class TurnParts(NamedTuple):
    """Reasoning and calls are None if the turn has none; calls are a JSON list of names and arguments. `unread`: whether the
    turn has the mark of calls, but none that can be read."""

    reasoning: str | None
    content: str
    tool_calls: str | None
    unread: bool = False


@dataclass(frozen=True)
class TurnForm:
    """How a chat template writes an assistant's turn.

    Attributes:
        opening, closing: the marks around reasoning.
        calls: the mark before tool calls; "" if the template writes them without one.
    """

    opening: str
    closing: str
    calls: str

    @classmethod
    def of(cls, chat: ChatTokenizer) -> "TurnForm":
        try:
            opening, closing = _reasoning_marks(chat)
        except (Refused, ValueError):
            opening, closing = THINK
        try:
            calls = _call_mark(chat) if chat.template.reads_calls else OPEN
        except (Refused, ValueError):
            calls = OPEN
        return cls(opening, closing, calls)

    def parts(self, prompt: str, turn: str) -> TurnParts:
        """Split a turn. Args: prompt, turn: with special tokens, the stop token excluded.

        >>> form = TurnForm("<think>", "</think>", "<tool_call>")
        >>> form.parts("Q <think>", "1 + 1</think>2")
        TurnParts(reasoning='1 + 1', content='2', tool_calls=None, unread=False)
        >>> form.parts("Q", 'Wait.<tool_call>{"name": "now", "arguments": {}}</tool_call>').tool_calls
        '[{"name": "now", "arguments": {}}]'
        """
        reasoning, content = self._reasoning(prompt, turn)
        before, mark, after = content.partition(self.calls) if self.calls else ("", "", content.strip())
        try:
            found = _calls_in(after) if mark or after.startswith("{") else []
        except ValueError:
            found = []
        if found:
            return TurnParts(reasoning, before.strip(), json.dumps(found, ensure_ascii=False))
        return TurnParts(reasoning, content, None, unread=bool(mark))

    def _reasoning(self, prompt: str, turn: str) -> tuple[str | None, str]:
        opened, visible = prompt.rstrip().endswith(self.opening), turn.lstrip()
        if not opened and not visible.startswith(self.opening):
            return None, turn
        reasoning, closed, content = visible.removeprefix(self.opening).partition(self.closing)
        # Without the closing mark, the turn ended while the model was thinking.
        return reasoning.strip(), content.lstrip("\n") if closed else ""


def _reasoning_marks(chat: ChatTokenizer) -> tuple[str, str]:
    """The marks around reasoning, without the whitespace beside them; ValueError if the template writes none."""
    keys = chat.template.reasoning_keys[False]
    if not keys:
        return THINK
    turn = {"role": "assistant", "content": CONTENT} | dict.fromkeys(keys, MARK)
    text = chat.template.write([QUESTION, turn])
    start = text.rindex(MARK)
    before, between = text[:start], text[start + len(MARK) : text.index(CONTENT, start)]
    closing = between.strip()
    # The opening one resembles it: </think>, [/THINK].
    opening = closing.replace("/", "", 1)
    if not closing or not before.rstrip().endswith(opening):
        opening = re.search(r"\S*$", before.rstrip())[0]
    if not closing or not opening:
        raise ValueError("no marks")
    return opening, closing


def _call_mark(chat: ChatTokenizer) -> str:
    """What the template writes between the prompt and the first call, without brackets of a list and whitespace."""
    prompt = chat.template.write([QUESTION], prompt=True)
    text = chat.template.write([QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    turn = text.removeprefix(prompt)
    before = turn[: turn.index(CALL["function"]["name"])]
    before, brace, _ = before.rpartition("{")
    mark = re.sub(r"[\s\[{]+$", "", before if brace else turn).strip()
    # An empty block of reasoning isn't part of it.
    return mark.rpartition(">\n")[2].strip() if "\n" in mark else mark


def _calls_in(text: str) -> list[dict[str, Any]]:
    """All calls in a text that holds nothing besides but marks; else ValueError."""
    calls, at, end = [], text.find("{"), 0
    between = ""
    while at >= 0:
        between += text[end:at]
        value, end = DECODER.raw_decode(text, at)
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError("no call")
        calls.append({"name": value["name"], "arguments": arguments})
        at = text.find("{", end)
    if MARKS.sub("", between + text[end:]):
        raise ValueError("text beside calls")
    return calls


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
