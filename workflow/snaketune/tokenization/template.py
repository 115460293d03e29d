"""Rendering of chat templates: conversations to text, with the character spans that are supervised.

A template marks what the assistant generates with `{% generation %}`; rendering returns the text and the character spans of
those blocks. transformers' own renderer is used (about 30 microseconds per conversation; importing it takes a second and no
torch), so templates behave as everywhere else that the tokenizer is used.
"""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tools_argument import Tools, group_by_tools, parse

Message = dict[str, Any]
Span = tuple[int, int]
# The role of the only turn of a document.
TEXT = "text"

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SHIPPED = "resources/chat_templates"
# The limit of CPU time for one call of `render`; a thousand conversations take a twentieth of a second.
SECONDS = 60.0


def shipped_templates() -> str:
    """Return the paths of the shipped templates, for error messages."""
    folder = Path(__file__).resolve().parents[3] / SHIPPED
    paths = sorted(f"{SHIPPED}/{path.name}" for path in folder.glob("*.jinja"))
    return ", ".join(paths) or f"one of {SHIPPED}"


def marks_generation(template: str) -> bool:
    """Whether the template marks what is generated.

    >>> marks_generation("{%- generation -%}{{ m }}{% endgeneration %}")
    True
    """
    return GENERATION_MARKER.search(template) is not None


class TemplateTimeout(Exception):
    """A template takes longer than the limit; it may never end."""


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TemplateTimeout if the block takes too long: templates come with models, and their sandbox lets them loop.

    Signals are delivered to the main thread only; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TemplateTimeout

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def render(
    template: str,
    conversations: Sequence[list[Message]],
    variables: dict[str, Any],
    add_generation_prompt: bool = False,
    tools: Tools = (),
) -> tuple[list[str], list[list[Span]]]:
    """Render conversations.

    With ChatML, `[{"role": "assistant", "content": "Hi"}]` becomes `<|im_start|>assistant\\nHi<|im_end|>\\n` and the span
    (22, 34), which is `Hi<|im_end|>`.

    Args:
        variables: the variables of the template besides the messages: `bos_token`, `eos_token` and so on.
        tools: the tools of each conversation, as JSON; empty if none has any.
    Returns:
        The text of each conversation, and its generation spans (start, end) in characters.
    Raises:
        SnaketuneError: the template refuses a conversation, or takes longer than SECONDS.
    """
    try:
        with _time_limit():
            return _rendered(template, conversations, variables, add_generation_prompt, tools)
    except TemplateTimeout:
        raise SnaketuneError(
            f"the chat template takes more than {SECONDS:.0f} s for {len(conversations)} conversations, and may never end; "
            f"name another one under `chat_template` ({SHIPPED} has some)"
        ) from None


def _rendered(
    template: str,
    conversations: Sequence[list[Message]],
    variables: dict[str, Any],
    add_generation_prompt: bool,
    tools: Tools,
) -> tuple[list[str], list[list[Span]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(some: Sequence[list[Message]], own_tools: str | None) -> tuple[list[str], list[list[Span]]]:
        texts, spans = render_jinja_template(
            conversations=some,
            tools=parse(own_tools),
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return texts, spans if marked else [[] for _ in texts]

    marked = marks_generation(template)

    # A template is a program, so any exception can occur.
    try:
        parts = [rendered(*run) for run in group_by_tools(conversations, tools)]
        return [text for texts, _ in parts for text in texts], [own for _, spans in parts for own in spans]
    except TemplateTimeout:
        raise
    except Exception as error:
        for conversation, own_tools in zip(conversations, tools or [None] * len(conversations)):
            try:
                rendered([conversation], own_tools)
            except TemplateTimeout:
                raise
            except Exception as own:
                roles = ", ".join(str(message.get("role")) for message in conversation)
                start = str(conversation[0].get("content"))[:80] if conversation else ""
                raise Refused(
                    "template_error",
                    f"the chat template refuses a conversation: {own}. Its roles are [{roles}], it starts with "
                    f"{start!r}; drop such rows from the corpus, or name another template under `chat_template` "
                    f"({SHIPPED} has some)",
                ) from None
        raise SnaketuneError(f"the chat template fails: {error}") from None
