"""The choices of a multiple-choice prompt, as lines of it: `A. …`.

choices, options      [text, …], {label: text}, {text: […], label: […]}, [{label, text}, …], or a list in a text
A, B, C …             columns; two of them only where the response is one of their letters
"""

import ast
import json
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from snaketune.corpus.layouts.columns import is_blank, mark_read, plain_text
from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.rows import Malformed

CHOICES_COLUMNS = ("choices", "options")
LABEL_KEYS, TEXT_KEYS = ("label", "key", "id", "letter"), ("text", "value", "content", "choice", "option")
# Keys of API responses and requests, which also have `choices` and `options`.
API_KEYS = {"finish_reason", "index", "logprobs", "message"}
LABEL = re.compile(r"[A-Za-z]|\d{1,2}")
NAMED_LABEL = re.compile(rf"(?:option|choice)?[ _]?({LABEL.pattern})", re.IGNORECASE)
MAX_LITERAL = 10_000


def choices_text(raw: dict[str, Any], prompt: str, response: str) -> list[str]:
    """Return the choices of a row as one text for its prompt; an empty list if it has none, or its prompt already has them.

    Raises:
        Malformed: a choice has no text.
    """
    column = next((column for column in CHOICES_COLUMNS if not is_blank(raw.get(column))), None)
    if column is None:
        columns = _letters(raw, response)
        choices = [(letter, plain_text(raw[letter]) or "") for letter in columns]
    else:
        value = _parsed_list(raw.get(column))
        if isinstance(value, str):
            # One text with all choices, in any format.
            mark_read(raw, column)
            return [value] if value.strip() not in prompt else []
        columns, choices = [column], _labelled(value, column)
    choices = [(label, text) for label, text in choices if text.strip()]
    if len(choices) < 2 or all(label == text for label, text in choices):
        return []
    for column in columns:
        mark_read(raw, column)
    if all(_is_listed_in(prompt, text) for _, text in choices):
        return []
    return ["\n".join(f"{label}. {text}" if label else text for label, text in choices)]


def letter_of(raw: dict[str, Any], answer: int) -> int | str:
    """Return the letter of the choice with index `answer`; `answer` unchanged if there is none, or if it is a choice's text.

    >>> letter_of({"choices": ["x", "y", "z"]}, 2), letter_of({"choices": [2, 4]}, 4), letter_of({}, 2)
    ('C', 4, 2)
    """
    choices = next((raw[column] for column in CHOICES_COLUMNS if isinstance(raw.get(column), list)), [])
    texts = [plain_text(choice) for choice in choices]
    if None in texts or str(answer) in texts or not 0 <= answer < min(len(texts), len(ascii_uppercase)):
        return answer
    return ascii_uppercase[answer]


def _is_listed_in(prompt: str, choice: str) -> bool:
    """Return True if a choice is on a line of its own, or after a label or a bullet."""
    pattern = rf"(?:^|[\s(](?:{LABEL.pattern})\s?[).:]|[-*•])\s*{re.escape(choice.strip())}(?!\w)"
    return re.search(pattern, prompt, re.IGNORECASE | re.MULTILINE) is not None


def _letters(raw: dict[str, Any], response: str) -> list[str]:
    """Return the columns A, B, C and so on of a row that hold choices."""
    count = next((number for number, letter in enumerate(ascii_uppercase) if letter not in raw), 0)
    letters = [*ascii_uppercase[:count]]
    if count < 2 or any(plain_text(raw.get(letter)) is None for letter in letters):
        return []
    return letters if count > 2 or response.strip() in letters else []


def _parsed_list(value: Any) -> Any:
    """Parse a list in a text, as JSON or as a Python literal; return other values unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{") or len(value) > MAX_LITERAL:
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _labelled(value: Any, column: str) -> list[tuple[str, str]]:
    """Return label and text of each choice; "" if the text begins with its label; an empty list for other values."""
    labels: list[Any] = []
    match value:
        case {"text": list(texts)}:
            labels = value.get("label") or []
        case dict():
            matches = [NAMED_LABEL.fullmatch(str(key)) for key in value]
            if None in matches:
                return []
            labels, texts = [match[1] for match in matches], list(value.values())
        case [dict(), *_] if all(isinstance(item, dict) for item in value):
            if any(API_KEYS & item.keys() for item in value):
                return []
            labels, texts = ([_first(item, keys) for item in value] for keys in (LABEL_KEYS, TEXT_KEYS))
        case list():
            texts = value
        case _:
            return []
    as_text = ["" if text is None else plain_text(text) for text in texts]
    if None in as_text or (isinstance(value, list) and not any(as_text)):
        raise Malformed(
            "unread_choices",
            f"{column} holds {kind_of(value)} without a text for each choice; write them as texts, or map prompt and response "
            "with `fields`, which reads no other columns",
        )
    if len(labels) != len(as_text) or not all(LABEL.fullmatch(str(label)) for label in labels):
        labels = _missing_labels(as_text)
    return [(str(label), text) for label, text in zip(labels, as_text)]


def _missing_labels(texts: Sequence[str]) -> list[str]:
    """Return letters; empty labels if each text begins with its own letter or number in order: `A) …`, `2. …`."""
    letters = (
        [*ascii_uppercase]
        if len(texts) <= len(ascii_uppercase)
        else [str(number) for number in range(1, len(texts) + 1)]
    )
    lettered = all(
        re.match(rf"\s*\(?(?:{letter}|{letter.lower()}|{number})\s?[).:](?!\d)", text)
        for number, (letter, text) in enumerate(zip(letters, texts), start=1)
    )
    return [""] * len(texts) if lettered else letters


def _first(item: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((item[key] for key in keys if item.get(key) is not None), None)
