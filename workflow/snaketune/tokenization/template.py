"""Chat templates: conversation to text, and which characters of it are supervised.

A template marks what the assistant generates with `{% generation %}`; rendering gives the text and the character spans of
those blocks. transformers' own renderer does the work (about 30 microseconds per conversation; importing it takes a
second and no torch), so a template means here what it means wherever else the tokenizer is used.
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
from snaketune.tokenization.tools_argument import Tools, parsed, runs

Message = dict[str, Any]
Span = tuple[int, int]
# The role of a document's one turn.
TEXT = "text"

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SHIPPED = "resources/chat_templates"
# Of CPU time, for all conversations of one call; a thousand of them take a twentieth of one.
SECONDS = 60.0


def shipped() -> str:
    """The templates that ship, for messages."""
    folder = Path(__file__).resolve().parents[3] / SHIPPED
    found = sorted(f"{SHIPPED}/{path.name}" for path in folder.glob("*.jinja"))
    return ", ".join(found) or f"one of {SHIPPED}"


def marks_generation(template: str) -> bool:
    """Whether the template says what is generated.

    >>> marks_generation("{%- generation -%}{{ m }}{% endgeneration %}")
    True
    """
    return GENERATION_MARKER.search(template) is not None


class Endless(Exception):
    """A template that loops on and on."""


@contextmanager
def _in_time() -> Iterator[None]:
    """Raise Endless where this takes too long. Templates come with models, and their sandbox lets them loop.

    Signals arrive in the main thread alone; in others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Endless

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

    With ChatML, `[{"role": "assistant", "content": "Hi"}]` gives `<|im_start|>assistant\\nHi<|im_end|>\\n` and the span
    (22, 34), which is `Hi<|im_end|>`.

    Args:
        variables: what the template can name besides the messages: `bos_token`, `eos_token` and so on.
        tools: of each conversation, where there are any.
    Returns:
        Per conversation its text and its generation spans (start, end) in characters.
    Raises:
        SnaketuneError: the template refuses a conversation, or takes far too long.
    """
    try:
        with _in_time():
            return _rendered(template, conversations, variables, add_generation_prompt, tools)
    except Endless:
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

    def rendered(some: Sequence[list[Message]], offered: str | None) -> tuple[list[str], list[list[Span]]]:
        texts, spans = render_jinja_template(
            conversations=some,
            tools=parsed(offered),
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return texts, spans if marked else [[] for _ in texts]

    marked = marks_generation(template)

    # A template is a program, and can fail in every way that a program can.
    try:
        parts = [rendered(*run) for run in runs(conversations, tools)]
        return [text for texts, _ in parts for text in texts], [own for _, spans in parts for own in spans]
    except Endless:
        raise
    except Exception as error:
        for conversation, offered in zip(conversations, tools or [None] * len(conversations)):
            try:
                rendered([conversation], offered)
            except Endless:
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
