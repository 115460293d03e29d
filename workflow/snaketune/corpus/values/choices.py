"""Choices beside a question: their labels and texts, the lines that list them in the prompt, and the label that an index means.

Choices are [text, …], {label: text}, {text: […], label: […]}, [{label, text}, …], a list in a text, or a column for each.
"""

import ast
import json
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import first_value, is_blank, kind_of, plain_text
from snaketune.corpus.values.schema import Clue, Column, Samples

LABEL_KEYS, CHOICE_KEYS = ("label", "key", "id", "letter"), ("text", "value", "content", "choice", "option")
# Keys of API responses, which also have `choices`.
API_KEYS = {"finish_reason", "index", "logprobs", "message"}
LABEL = re.compile(r"[A-Za-z]|\d{1,2}")
NAMED_LABEL = re.compile(rf"(?:option|choice)?[ _]?({LABEL.pattern})", re.IGNORECASE)
MAX_LITERAL = 10_000
INTEGER = re.compile(r"-?\d{1,9}")
# The kind of number in clues, and what is found: an index, the text of a choice, either (and how it was read), or the number of
# choices.
KIND = "choice"
INDEX, TEXT, EITHER_INDEX, EITHER_TEXT, COUNT = "index", "text", "either, as index", "either, as text", "count"


class Choice(NamedTuple):
    """One choice; its label is "" if the text begins with it."""

    label: str
    text: str


def choices_of(value: Any, where: str = "choices") -> list[Choice]:
    """The choices in a value; of one text that lists them in any form, it alone; none if the value isn't of choices.

    >>> choices_of({"text": ["x", "y"], "label": ["1", "2"]})
    [Choice(label='1', text='x'), Choice(label='2', text='y')]
    """
    if not value or (is_blank(value) and not isinstance(value, list)):
        return []
    value = _parsed_list(value)
    labels: list[Any] = []
    match value:
        case str():
            return [Choice("", value)]
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
            labels, texts = ([first_value(item, keys) for item in value] for keys in (LABEL_KEYS, CHOICE_KEYS))
        case list():
            texts = value
        case _:
            return []
    as_text = ["" if text is None else plain_text(text) for text in texts]
    if None in as_text or (isinstance(value, list) and not any(as_text)):
        raise Malformed("unread_choices", f"{where} holds {kind_of(value)} without a text for each choice")
    if len(labels) != len(as_text) or not all(LABEL.fullmatch(str(label)) for label in labels):
        labels = _missing_labels(as_text)
    return [Choice(str(label), text) for label, text in zip(labels, as_text)]


def are_choices(value: Any) -> bool:
    try:
        return bool(choices_of(value))
    except Malformed:
        return True


def _letters(samples: Samples) -> list[tuple[str, ...]]:
    """The columns A, B, C and so on, of which two may also be two answers."""
    count = next((number for number, letter in enumerate(ascii_uppercase) if letter not in samples), 0)
    return [tuple(ascii_uppercase[:count])] if count > 2 else []


COLUMNS = (Column("choices", "choices options", holds=are_choices), Column("choices", _letters))


def listed(choices: list[Choice], prompt: str) -> str:
    """The lines of choices that follow a prompt; "" if there are none, or the prompt lists them."""
    if len(choices) == 1:
        return "" if choices[0].text.strip() in prompt else choices[0].text
    choices = [choice for choice in choices if choice.text.strip()]
    if len(choices) < 2 or all(label == text for label, text in choices):
        return ""
    if all(_is_listed_in(prompt, text) for _, text in choices):
        return ""
    return "\n".join(f"{label}. {text}" if label else text for label, text in choices)


def letter_of(value: Any, answer: Any, where: tuple[str, str], clues: set[Clue]) -> Any:
    """The label of the choice whose index, a number or a text of digits, is `answer`; else `answer`: a label, or a text.

    A number that is also the text of a choice is an index if it is an integer and the texts aren't numbers. `check_choices`
    compares that with the other rows of the file.

    >>> where, clues = ("choices", "answer"), set()
    >>> letter_of(["x", "y", "z"], "2", where, clues), letter_of([2, 4], 4, where, clues), letter_of(None, 2, where, clues)
    ('C', 4, 2)
    >>> letter_of(["2", "1"], 1, where, clues), letter_of(["2", "1"], "1", where, clues)
    ('B', '1')

    Args:
        value: the choices, in any form.
        where: the columns of the choices and of the answer.
    Raises:
        Malformed: a number that is none of the choices.
    """
    column, choices, number = where[1], choices_of(value, where[0]), plain_text(answer)
    if number is None or isinstance(answer, bool) or not INTEGER.fullmatch(number) or not choices:
        return answer
    if any(number == choice.label for choice in choices):
        return answer
    if isinstance(value, str) and len(choices) == 1:
        # One text lists all, perhaps with this number as a label or a text.
        if not re.search(rf"(?<![\d.-]){number}(?![\d.])", choices[0].text):
            raise Malformed(
                "unknown_choice", f"{column} is {number}, which {where[0]} doesn't hold; write the answer's letter"
            )
        return answer
    index, is_text = int(number), any(number == choice.text.strip() for choice in choices)
    if not 0 <= index < len(choices):
        if not is_text and index != len(choices):
            raise Malformed("unknown_choice", f"{column} is {number}, which is none of {len(choices)} choices")
        clues.add((column, KIND, TEXT if is_text else COUNT))
        return answer
    is_index = not is_text or not (isinstance(answer, str) or _holds_numbers(_parsed_list(value)))
    clues.add((column, KIND, (EITHER_INDEX if is_index else EITHER_TEXT) if is_text else INDEX))
    if not is_index:
        return answer
    return choices[index].label or (ascii_uppercase[index] if index < len(ascii_uppercase) else answer)


def check_choices(clues: set[Clue]) -> None:
    """Raise Malformed if the clues of all rows of a file contradict how numbers that choose an answer were read."""
    for column in sorted({column for column, kind, _ in clues if kind == KIND}):
        found = {value for name, kind, value in clues if (name, kind) == (column, KIND)}
        if COUNT in found:
            what = "a number that is the number of choices, so that numbers seem to count from 1"
        elif {EITHER_INDEX, TEXT} <= found or {EITHER_TEXT, INDEX} <= found:
            what = "numbers of which some can only be indexes of choices, others only their texts, and others either"
        else:
            continue
        raise Malformed(
            "ambiguous_choices", f"{column} holds {what}; write the letters of the choices, A for the first"
        )


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float)


def _is_listed_in(prompt: str, choice: str) -> bool:
    """Whether a choice is on a line of its own, or after a label or a bullet."""
    pattern = rf"(?:^|[\s(](?:{LABEL.pattern})\s?[).:]|[-*•])\s*{re.escape(choice.strip())}(?!\w)"
    return re.search(pattern, prompt, re.IGNORECASE | re.MULTILINE) is not None


def _parsed_list(value: Any) -> Any:
    """A list in a text, as JSON or as a Python literal; other values unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{") or len(value) > MAX_LITERAL:
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _missing_labels(texts: Sequence[str]) -> list[str]:
    """Letters; empty labels if each text begins with its own letter or number in order: `A) …`, `2. …`."""
    numbers = [str(number) for number in range(1, len(texts) + 1)]
    letters = [*ascii_uppercase[: len(texts)]] if len(texts) <= len(ascii_uppercase) else numbers
    lettered = all(
        re.match(rf"\s*\(?(?:{letter}|{letter.lower()}|{number})\s?[).:](?!\d)", text)
        for number, letter, text in zip(numbers, letters, texts)
    )
    return [""] * len(texts) if lettered else letters
