"""Rendering of chat templates: conversations to text, with the character spans that are supervised.

A template marks what the assistant generates with `{% generation %}`; rendering returns the text and the character spans of
those blocks. transformers' own renderer is used (about 30 microseconds per conversation; importing it takes a second and no
torch), so templates behave as everywhere else that the tokenizer is used.
"""

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, meta, nodes

from snaketune.errors import SnaketuneError

Message = dict[str, Any]
Span = tuple[int, int]
# The tools of each conversation as JSON, None if it has none; empty if no conversation has any.
Tools = Sequence[str | None]
# The role of the only turn of a document.
TEXT = "text"

# Variables of templates that transformers passes: those of the tokenizer, and those of the conversation.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PASSED = {*SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt"}

# Tests and filters of variables that may not be passed.
DEFAULTS = ("defined", "undefined", "default", "d")

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
SHIPPED = "resources/chat_templates"
# The limit of CPU time for one call of `render`; a thousand conversations take a twentieth of a second.
SECONDS = 60.0


class Refused(SnaketuneError):
    """A chat template can't render a row; other rows may be fine. `reason` is a short, stable name, for counts and lists."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def shipped_templates() -> str:
    """The paths of the shipped templates, for error messages."""
    folder = Path(__file__).resolve().parents[3] / SHIPPED
    paths = sorted(f"{SHIPPED}/{path.name}" for path in folder.glob("*.jinja"))
    return ", ".join(paths) or f"one of {SHIPPED}"


def parsed(template: str) -> tuple[Environment, nodes.Template]:
    """The environment in which transformers renders a template, and the template's syntax tree."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return environment, environment.parse(template)


def variable_names(template: str) -> set[str]:
    """The variables that a template uses, besides those that are always passed, and those that it sets itself and never tests.

    >>> variable_names("{% if not think is defined %}{% set think = 1 %}{% endif %}{{ messages }}{{ think }}{{ dict() }}")
    {'think'}
    """
    environment, tree = parsed(template)
    names = meta.find_undeclared_variables(tree) - environment.globals.keys() - PASSED
    # One that is set in some branches only counts as undeclared.
    stored, parameters = (
        {node.name for node in tree.find_all(nodes.Name) if node.ctx == kind} for kind in ("store", "param")
    )
    tests = (node.node for node in tree.find_all((nodes.Test, nodes.Filter)) if node.name in DEFAULTS)
    tested = {node.name for node in tests if isinstance(node, nodes.Name)}
    return names - parameters - (stored - tested)


def marks_generation(template: str) -> bool:
    """Whether the template marks what is generated.

    >>> marks_generation("{%- generation -%}{{ m }}{% endgeneration %}")
    True
    """
    return GENERATION_MARKER.search(template) is not None


def writes_date(template: str) -> bool:
    """Whether the template writes the date of its use."""
    return "strftime_now(" in template


def with_date(template: str, today: date) -> str:
    """A template with a fixed date instead of its calls of `strftime_now`; one whose format isn't a constant stays.

    >>> with_date("{{ strftime_now('%d %b %Y') }}", date(2026, 1, 31))
    "{{ '31 Jan 2026' }}"
    """
    return DATE_CALL.sub(lambda call: repr(today.strftime(call[2])), template)


class TemplateTimeout(BaseException):
    """A template takes longer than the limit; it may never end. No Exception, so that nothing on the way handles it."""


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
    Returns:
        The text of each conversation, and its generation spans (start, end) in characters.
    Raises:
        SnaketuneError: the template refuses a conversation (Refused), or takes longer than SECONDS.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    marked = marks_generation(template)
    rows = list(zip(conversations, tools or [None] * len(conversations), strict=True))

    def rendered(rows: list[tuple[list[Message], str | None]]) -> tuple[list[str], list[list[Span]]]:
        texts, spans = [], []
        # Runs of conversations with the same tools are rendered in one call.
        for own_tools, run in groupby(rows, key=itemgetter(1)):
            own_texts, own_spans = render_jinja_template(
                conversations=[conversation for conversation, _ in run],
                tools=json.loads(own_tools) if own_tools else None,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            texts += own_texts
            spans += own_spans if marked else [[] for _ in own_texts]
        return texts, spans

    try:
        with _time_limit():
            # A template is a program, so any exception can occur.
            try:
                return rendered(rows)
            except Exception as error:
                for row in rows:
                    try:
                        rendered([row])
                    except Exception as row_error:
                        raise _refused(row[0], row_error) from None
                raise SnaketuneError(f"the chat template fails: {error}") from None
    except TemplateTimeout:
        raise SnaketuneError(
            f"the chat template takes more than {SECONDS:.0f} s for {len(conversations)} conversations, and may never end; "
            f"name another one under `chat_template` ({SHIPPED} has some)"
        ) from None


def _refused(conversation: list[Message], error: Exception) -> Refused:
    roles = ", ".join(str(message.get("role")) for message in conversation)
    start = str(conversation[0].get("content"))[:80] if conversation else ""
    return Refused(
        "template_error",
        f"the chat template refuses a conversation: {error}. Its roles are [{roles}], it starts with {start!r}; drop such "
        f"rows from the corpus, or name another template under `chat_template` ({SHIPPED} has some)",
    )
