"""Columns beside a prompt and its response that are part of them: the prompt's context and choices, the response's reasoning.

    question, context, answer          the context follows the question, as an instruction's input does
    question, choices, answer          so do the choices, one a line and lettered: `A. …`; also in columns A, B, C …
    question, reasoning, response      the reasoning stands in front of the response, as `<think>\\n…\\n</think>\\n\\n`

What the prompt or the response already holds isn't repeated.
"""

import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from snaketune.corpus.layouts.columns import plain_text
from snaketune.corpus.layouts.parts import kind_of, thought
from snaketune.corpus.layouts.turns import may_spell_turns, turns_of
from snaketune.corpus.rows import Malformed, Message, spoken

CONTEXT_COLUMNS = ("context", "passage", "article", "paragraph")
CHOICES_COLUMNS = ("choices", "options")
REASONING_COLUMNS = ("reasoning_content", "reasoning", "thinking", "cot", "chain_of_thought", "thinking_trajectories")
COLUMNS = frozenset((*CONTEXT_COLUMNS, *CHOICES_COLUMNS, *REASONING_COLUMNS, "A"))
# A reasoning column may say how to think, and not what was thought.
MODES = {"on", "off", "true", "false", "yes", "no", "none", "auto", "minimal", "low", "medium", "high"}
LETTERED = re.compile(r"\s*\(?[A-Z0-9][).:]")
LABEL_KEYS, TEXT_KEYS = ("label", "key", "id", "letter"), ("text", "value", "content", "choice", "option")
OTHERWISE = "write it as a text, or map columns with `fields`, which reads no others"


def add_to_prompt(raw: dict[str, Any], prompt: list[Message]) -> None:
    """Append context and choices to the last turn of a prompt, in place.

    Raises:
        Malformed: they are no texts.
    """
    # A context that nothing is asked about is no prompt.
    if COLUMNS.isdisjoint(raw) or not prompt or not prompt[-1]["content"].strip():
        return
    for text in (*_contexts(raw, prompt), *_choices(raw, prompt[-1]["content"])):
        prompt[-1] = prompt[-1] | {"content": f"{prompt[-1]['content']}\n\n{text}"}


def add_to_response(raw: dict[str, Any], response: list[Message]) -> None:
    """Put the reasoning in front of a response, in place, unless that begins with its own.

    Raises:
        Malformed: it is no text.
    """
    if COLUMNS.isdisjoint(raw):
        return
    for column in REASONING_COLUMNS:
        value = raw.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not value or isinstance(value, (bool, int, float)):
            continue
        if not isinstance(value, str):
            held = f"{len(value)} items" if isinstance(value, list) else kind_of(value)
            raise Malformed("unread_reasoning", f"{column} holds {held}; {OTHERWISE}")
        if value.isspace() or value.strip().lower() in MODES:
            continue
        _note_read(raw, column)
        text = response[0]["content"]
        if not text.lstrip().startswith("<think>"):
            response[0] = response[0] | {"content": thought(value, column) + text}
        return


def _contexts(raw: dict[str, Any], prompt: list[Message]) -> Iterator[str]:
    for column in CONTEXT_COLUMNS:
        value = raw.get(column)
        if not value or isinstance(value, (bool, int, float)):
            continue
        _note_read(raw, column)
        texts = value if isinstance(value, list) else [value]
        if may_spell_turns(value) or (texts is value and all(isinstance(item, dict) for item in texts)):
            # The conversation that the completions of a pair continue may be called so.
            earlier = spoken(turns_of(value, column))
            if spoken(prompt)[: len(earlier)] != earlier:
                raise Malformed(
                    "unread_context",
                    f"{column} holds turns that the prompt doesn't; call it history if they come before it",
                )
            continue
        if not all(isinstance(text, str) for text in texts):
            raise Malformed("unread_context", f"{column} holds {kind_of(value)}; {OTHERWISE}")
        text = "\n\n".join(text for text in texts if text.strip())
        if text and not any(text.strip() in turn["content"] for turn in prompt):
            yield text


def _choices(raw: dict[str, Any], prompt: str) -> Iterator[str]:
    column = next((column for column in CHOICES_COLUMNS if raw.get(column)), None)
    if column is None:
        letters = _letters(raw)
        choices = [(letter, plain_text(raw.get(letter))) for letter in letters]
    elif isinstance(raw[column], str):
        choices = [("", raw[column])]
    else:
        letters, choices = [], _labelled(raw[column], column)
    texts = [text for _, text in choices]
    if not choices or None in texts or all(text in prompt for text in texts):
        return
    for letter in letters if column is None else ():
        _note_read(raw, letter)
    yield "\n".join(f"{label}. {text}" if label else text for label, text in choices)


def _letters(raw: dict[str, Any]) -> Sequence[str]:
    """The columns A, B, C and so on of a row, if there are two or more."""
    count = next((number for number, letter in enumerate(ascii_uppercase) if letter not in raw), 0)
    return ascii_uppercase[:count] if count > 1 else ""


def _labelled(value: Any, column: str) -> list[tuple[str, str]]:
    """Each choice with its label, which is empty where the choice begins with it."""
    labels: Any = None
    match value:
        case {"text": list(texts)}:
            labels = value.get("label")
        case dict():
            labels, texts = list(value), list(value.values())
        case [dict(), *_] if all(isinstance(item, dict) for item in value):
            labels, texts = ([_first(item, keys) for item in value] for keys in (LABEL_KEYS, TEXT_KEYS))
            labels = None if None in labels else labels
        case list():
            texts = value
        case _:
            texts = [None]
    spelled = [plain_text(text) for text in texts]
    if None in spelled or (labels is not None and len(labels) != len(spelled)):
        raise Malformed(
            "unread_choices", f"{column} holds {kind_of(value)} without a text for each choice; {OTHERWISE}"
        )
    if labels is None:
        lettered = all(LETTERED.match(text) for text in spelled)
        labels = (
            [""] * len(spelled) if lettered else ascii_uppercase if len(spelled) <= 26 else range(1, len(spelled) + 1)
        )
    return [(str(label), text) for label, text in zip(labels, spelled, strict=False)]


def _first(item: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((item[key] for key in keys if item.get(key) is not None), None)


def _note_read(raw: dict[str, Any], column: str) -> None:
    raw[column]  # Noted by `Columns`.
