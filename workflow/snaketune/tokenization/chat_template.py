"""A tokenizer's chat template: conversations to text, with the spans of what assistants generate.

Templates are taken as their models' families wrote them. Three things are made up for, so that the rest of the code sees one
kind: a fixed date for today's; contents as lists of typed parts, for templates that read nothing else; and the end of a last
turn that only the next turn would write (GLM's `<|user|>`).
"""

import json
import re
from collections.abc import Sequence
from datetime import date
from functools import cached_property, partial
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.tokenization import tool_calls
from snaketune.tokenization.assistant_spans import (
    as_generated,
    bracketed_spans,
    generated_spans,
    without_blanks,
)
from snaketune.tokenization.control import any_of, substitute, unused_characters
from snaketune.tokenization.reasoning import (
    CALL,
    EMPTY_BLOCK,
    check_reasoning,
    keys_read,
    reasoning_of,
    with_marks,
    with_reasoning,
)
from snaketune.tokenization.template import (
    Message,
    Refused,
    Span,
    Tools,
    marks_generation,
    render,
    variable_names,
    with_date,
)

QUESTION: Message = {"role": "user", "content": tool_calls.PLACEHOLDER}
ANSWER: Message = {"role": "assistant", "content": tool_calls.PLACEHOLDER}
# An assistant's turn without and with calls, and the turn that follows it.
FOLLOWED: dict[bool, tuple[Message, Message]] = {
    False: (ANSWER, QUESTION),
    True: (
        ANSWER | {"content": "", "tool_calls": [CALL]},
        {
            "role": "tool",
            "content": tool_calls.PLACEHOLDER,
            "tool_call_id": CALL["id"],
            "name": CALL["function"]["name"],
        },
    ),
}
# Put before a template that reads contents as lists of typed parts only.
TYPED = (
    "{%- set typed = namespace(messages=[]) %}{%- for message in messages %}{%- set typed.messages = typed.messages + "
    "[dict(message, content=[{'type': 'text', 'text': message['content']}])] %}{%- endfor %}"
    # A block would remove a line break that the template begins with.
    "{%- set messages = typed.messages %}{{ '' }}"
)


class ChatTemplate:
    """A chat template with its variables.

    Attributes:
        text: the template's source; "" if the tokenizer has none.
        training_text: that of TRL's template with markers for the same text, "" if there is none; for an unmarked template.
        marked: whether the template marks what is generated.
        variables: the variables that it is rendered with, besides messages and tools.
        empty_reasoning: what becomes of the block that it writes for no reasoning: mask, supervise or omit.
    """

    def __init__(
        self,
        text: str,
        training_text: str,
        variables: dict[str, Any],
        control: Sequence[str],
        today: date | None = None,
        empty_reasoning: str = "mask",
    ):
        """Build from the sources, the strings of the control tokens, and the date that the template writes as today's."""
        self.empty_reasoning = empty_reasoning
        if today:
            text, training_text = with_date(text, today), with_date(training_text, today)
        self.variables, self._control = variables, list(control)
        if text and not _writes_content(text, variables) and _writes_content(TYPED + text, variables):
            text, training_text = TYPED + text, training_text and TYPED + training_text
        self.text, self.marked = text, marks_generation(text)
        self.training_text = "" if self.marked else training_text

    def with_variables(self, values: dict[str, Any]) -> "ChatTemplate":
        """This template with further variables; Refused if it doesn't use one that isn't empty."""
        names = self._variable_names
        unused = [name for name, value in values.items() if name not in names and value not in (None, "", [], {})]
        if unused:
            raise Refused(
                "unused_template_variable",
                f"the chat template doesn't use the variable {unused[0]!r} of template_variables; it uses "
                f"{', '.join(sorted(names)) or 'none'}. Correct or remove it in the source, or name another template under "
                "tokenizers.NAME.chat_template",
            )
        used = {name: value for name, value in values.items() if name in names}
        # Without thinking, the block is part of the prompt.
        treatment = "mask" if used.get("enable_thinking") is False else self.empty_reasoning
        return self._with(self.variables | used, treatment)

    def _with(self, variables: dict[str, Any], empty_reasoning: str) -> "ChatTemplate":
        return ChatTemplate(self.text, self.training_text, variables, self._control, empty_reasoning=empty_reasoning)

    @cached_property
    def _variable_names(self) -> set[str]:
        return variable_names(self.text)

    @cached_property
    def empty_block(self) -> str:
        """What the template writes for reasoning at the start of a turn without any, up to where its generation prompt
        without thinking ends; "" if nothing.

            <|im_start|> assistant \n <think> \n\n </think> \n\n Hello <|im_end|>      Qwen3: all up to `Hello`
        """
        if not self.treats_reasoning:
            return ""
        try:
            (text,), (spans,) = self._render([[QUESTION, ANSWER]], [None], [None])
            turn = self.write([QUESTION, ANSWER], enable_thinking=False)
            prompt = self.write([QUESTION], prompt=True, enable_thinking=False)
        except SnaketuneError:
            return ""
        if len(spans) != 1 or spans[0] is None:
            return ""
        start, end = spans[0][0], len(text) - len(turn.removeprefix(prompt))
        if not (turn.startswith(prompt) and start < end and text.endswith(turn.removeprefix(prompt))):
            found = EMPTY_BLOCK.match(text, start)
            end = found.end() if found else start
        return text[start:end]

    @cached_property
    def _omitted_block(self) -> str:
        """`empty_block` with what the generation prompt opens of it, if it is omitted; else ""."""
        if self.empty_reasoning != "omit":
            return ""
        plain = self._with(self.variables, "supervise")
        if not plain.empty_block:
            return ""
        return re.search(r"(?:<think>\s*)?\Z", plain.write([QUESTION], prompt=True))[0] + plain.empty_block

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the template has a form of its own for tool calls."""
        return tool_calls.reads_calls(self.text)

    @cached_property
    def reasoning_keys(self) -> dict[bool, tuple[str, ...]]:
        """The keys in which the template reads reasoning, without (False) and with tool calls (True)."""
        return {
            with_calls: keys_read(self._plain, with_calls=with_calls) if with_calls <= self.reads_calls else ()
            for with_calls in (False, True)
        }

    def _plain(self, messages: list[Message]) -> str:
        return render(self.text, [messages], self.variables)[0][0]

    @cached_property
    def treats_reasoning(self) -> bool:
        """Whether the template treats reasoning apart from other text."""
        return "think" in self.text or any(self.reasoning_keys.values())

    @cached_property
    def closings(self) -> dict[bool, str]:
        """The control token that ends an assistant's turn, without (False) and with tool calls (True), if it is the next turn
        that writes it; else "". In an unmarked template, the last turn gets it too, else the model wouldn't learn to stop."""
        return {with_calls: self._closing(with_calls) for with_calls in (False, True)}

    def _closing(self, with_calls: bool) -> str:
        if self.marked or not self.text or (with_calls and not self.reads_calls):
            return ""
        answer, following = FOLLOWED[with_calls]
        try:
            (alone, whole), _ = render(self.text, [[QUESTION, answer], [QUESTION, answer, following]], self.variables)
        except Refused:
            return ""
        control = any_of(self._control)
        if re.search(rf"(?:{control})\s*$", alone) or not whole.startswith(alone):
            return ""
        following_token = re.compile(control).match(whole, len(alone))
        return following_token[0] if following_token else ""

    @cached_property
    def _prompt_blank(self) -> str:
        """The whitespace that the generation prompt ends with."""
        prompt = self.write([QUESTION], prompt=True)
        return prompt[len(prompt.rstrip()) :]

    @cached_property
    def _prompt_gap(self) -> tuple[int, str] | None:
        """How many characters after the start of an assistant's span its generation prompt ends (negative: before it), and the
        text between the two; None if the template has no generation prompt that leads to a turn."""
        try:
            (text,), (spans,) = self._render([[QUESTION, ANSWER]], [None], [None])
            prompt = self.write([QUESTION], prompt=True)
        except SnaketuneError:
            return None
        if len(spans) != 1 or spans[0] is None or not text.startswith(prompt):
            return None
        start, end = spans[0][0], len(prompt)
        between = text[min(start, end) : max(start, end)]
        return (end - start, between) if end >= start or not between.strip() else None

    def prompt_end(self, text: str, start: int) -> int:
        """Where the prompt of an assistant's turn ends in `text`, in characters, given the start of its span."""
        if self._prompt_gap is not None:
            length, between = self._prompt_gap
            end = start + length
            if end >= 0 and text.startswith(between, min(start, end)):
                return end
        # A space before an answer belongs to its first word.
        return len(text[:start].rstrip(" "))

    def check_prompt(self, messages: list[Message], text: str, tools: str | None) -> None:
        """Refuse a row whose variables state whether there is reasoning, and whose last turn in `text` doesn't follow that
        generation prompt."""
        if "enable_thinking" in self.variables and not text.startswith(self.write(messages[:-1], True, tools)):
            raise Refused(
                "reasoning_contradicts_variables",
                "the last turn doesn't follow the generation prompt with its template_variables: enable_thinking is false, "
                "and the turn has reasoning, or the other way round; correct the variable, or leave reasoning out with "
                "corpora.NAME.reasoning: none",
            )

    def prompt_ends(
        self, messages: list[Message], text: str, spans: list[Span | None], trained: Sequence[bool] | None
    ) -> dict[int, int]:
        """`prompt_end` of the trained turns (default all), by number of their span; {} if spans aren't one per turn."""
        if len(spans) != sum(message["role"] == "assistant" for message in messages):
            return {}
        return {
            number: self.prompt_end(text, span[0])
            for number, span in enumerate(spans)
            if span and (trained is None or trained[number])
        }

    def write(self, messages: list[Message], prompt: bool = False, tools: str | None = None, **variables: Any) -> str:
        """The text of one conversation, with further variables of the template."""
        return self.write_all([messages], prompt, [tools], **variables)[0]

    def write_all(
        self, conversations: Sequence[list[Message]], prompt: bool = False, tools: Tools = (), **variables: Any
    ) -> list[str]:
        """The text of conversations; SnaketuneError if the template refuses one."""
        texts, _ = self._written(self.text, conversations, prompt, tools, **variables)
        return (
            texts
            if prompt
            else [text + self._end(messages) for messages, text in zip(conversations, texts, strict=True)]
        )

    def _end(self, messages: list[Message]) -> str:
        """What a conversation's text lacks at its end."""
        last = messages[-1] if messages else {"role": ""}
        return self.closings["tool_calls" in last] if last["role"] == "assistant" else ""

    def render(
        self,
        conversations: Sequence[list[Message]],
        add_generation_prompt: bool = False,
        tools: Tools = (),
        trained: Sequence[Sequence[bool] | None] = (),
    ) -> tuple[list[str], list[list[Span | None]]]:
        """Render conversations; return the text of each, and the character spans of its assistant turns (None if a turn isn't
        written as it is generated).

        Args:
            trained: for each conversation, which of its assistant turns are trained, default all; the span of another turn may
                be None, since each span costs renderings of its prompt.
        """
        if not self.text:
            raise SnaketuneError(
                "the tokenizer has no chat template, so conversations can't be rendered; name one under "
                "tokenizers.NAME.chat_template (resources/chat_templates has some). Only corpora of kind text need none"
            )
        tools = list(tools) or [None] * len(conversations)
        if add_generation_prompt:
            # In a prompt, nothing is supervised.
            texts = self.write_all(conversations, True, tools)
            return texts, [[] for _ in texts]
        texts, spans = self._render(conversations, tools, list(trained) or [None] * len(conversations))
        if self.empty_reasoning == "mask" and self.empty_block:
            spans = [self._behind_empty_block(*row) for row in zip(conversations, texts, spans, strict=True)]
        return texts, spans

    def _render(
        self, conversations: Sequence[list[Message]], tools: Tools, trained: Sequence[Sequence[bool] | None]
    ) -> tuple[list[str], list[list[Span | None]]]:
        """`render`, with empty reasoning in the spans."""
        if self.marked:
            texts, spans = self._render_marked(self.text, conversations, tools)
        else:
            texts, spans = self._render_unmarked(conversations, tools, trained)
        rows = zip(conversations, texts, spans, strict=True)
        return texts, [as_generated(*row) if self.treats_reasoning else row[2] for row in rows]

    def _behind_empty_block(self, messages: list[Message], text: str, spans: list[Span | None]) -> list[Span | None]:
        """The spans without the empty reasoning that turns without any begin with."""
        speaking = [message for message in messages if message["role"] == "assistant"]
        if len(spans) != len(speaking):
            return spans
        block = self.empty_block
        return [
            (span[0] + len(block), span[1])
            if span and text.startswith(block, span[0]) and not reasoning_of(message)
            else span
            for message, span in zip(speaking, spans)
        ]

    def _written(
        self, source: str, conversations: Sequence[list[Message]], prompt: bool, tools: Tools, **variables: Any
    ) -> tuple[list[str], list[list[Span]]]:
        """Text and marked spans of conversations, without empty reasoning if it is omitted.

        Turns without reasoning get a mark, so that the blocks before them differ from what users write.
        """
        variables = self.variables | variables
        if not self._omitted_block:
            return render(source, conversations, variables, prompt, tools)
        (mark,) = unused_characters([json.dumps([conversations, tools, variables], ensure_ascii=False)], 1)
        marked = [with_marks(messages, mark) for messages in conversations]
        # A turn is within a pair of control tokens.
        before = rf"(?=(?:(?!{any_of(self._control)}).)*?{mark})"
        pattern = re.compile(f"{re.escape(self._omitted_block)}{before}|{mark}", re.DOTALL)
        rows = zip(*render(source, marked, variables, prompt, tools), strict=True)
        texts, spans = zip(*(substitute(pattern, lambda _: "", *row) for row in rows))
        return list(texts), list(spans)

    def prepared(self, messages: list[Message], tools: str | None) -> list[Message]:
        """The messages with tool calls and reasoning under the keys that the template reads, if it does."""
        if self.reads_calls:
            messages = tool_calls.with_calls(messages, tools)
        return with_reasoning(messages, self.reasoning_keys)

    def rewritten(self, messages: list[Message], ends: Sequence[int], tools: str | None = None) -> list[int]:
        """Those of `ends` (numbers of leading turns) up to which the text changes where other turns follow."""
        earlier = [end for end in ends if end < len(messages)]
        if not earlier:
            return []
        conversations = [self.prepared(messages[:end], tools) for end in (*earlier, len(messages))]
        *views, whole = self.write_all(conversations, tools=[tools] * len(conversations))
        return [end for end, view in zip(earlier, views) if not whole.startswith(view)]

    def _render_unmarked(
        self, conversations: Sequence[list[Message]], tools: Tools, trained: Sequence[Sequence[bool] | None]
    ) -> tuple[list[str], list[list[Span | None]]]:
        """Render with a template that marks nothing."""
        texts = self.write_all(conversations, tools=tools)
        spans = [self._known_spans(*row) for row in zip(conversations, tools, texts, trained, strict=True)]
        if rest := [number for number, row_spans in enumerate(spans) if row_spans is None]:
            columns = ([column[number] for number in rest] for column in (conversations, texts, tools))
            known = bracketed_spans(*columns, self._control, self.write_all)
            for number, row_spans in zip(rest, known, strict=True):
                spans[number] = row_spans
        return texts, spans

    def _render_marked(
        self, template: str, conversations: Sequence[list[Message]], tools: Tools
    ) -> tuple[list[str], list[list[Span]]]:
        """Render with a template that marks what is generated."""
        texts, marked = self._written(template, conversations, False, tools)
        spans = [without_blanks(text, row_spans, self._control) for text, row_spans in zip(texts, marked, strict=True)]
        for messages, text, row_spans in zip(conversations, texts, spans, strict=True):
            tool_calls.check_marked_calls(messages, text, row_spans)
        return texts, spans

    def _known_spans(
        self, messages: list[Message], tools: str | None, text: str, trained: Sequence[bool] | None
    ) -> list[Span | None] | None:
        """The spans in `text`, the rendered messages, without changing them; None if they can't be known so."""
        if self.treats_reasoning and "add_generation_prompt" in self.text:
            generated = generated_spans(messages, text, trained, self._control, partial(self.write, tools=tools))
            if generated is not None:
                return generated
        if self.training_text:
            try:
                (same,), (spans,) = self._render_marked(self.training_text, [messages], [tools])
            except Refused:
                return None
            # Some mark a turn in several blocks.
            if same == text and len(spans) == sum(message["role"] == "assistant" for message in messages):
                # One begins with the blanks that the prompt ends with.
                blank = self._prompt_blank
                return [
                    (start + len(blank) * (text.startswith(blank, start) and not text.endswith(blank, 0, start)), end)
                    for start, end in spans
                ]
        if self.treats_reasoning:
            check_reasoning(messages[-1], text)
        return None


def _writes_content(template: str, variables: dict[str, Any]) -> bool:
    """Whether a template writes the text of a user's turn."""
    mark = "snaketune"
    try:
        (text,), _ = render(template, [[QUESTION | {"content": mark}]], variables)
    except Refused:
        return False
    return mark in text
