"""Columns that mark good and bad rows, by their names: `is_correct`, `toxic`, `label`."""

import re
from collections.abc import Iterable
from functools import lru_cache

from snaketune.corpus.values.cells import Raw, plain_text

GOOD = "correct|safe|valid|verified|helpful|harmless|good|passed|approved|appropriate|successful|success|pass|resolved"
BAD = "incorrect|wrong|unsafe|toxic|harmful|invalid|bad|spam|flagged|hallucinations?|hallucinated"
MARKS = re.compile(rf"(?:is_)?(?:{GOOD}|{BAD})|labels?", re.IGNORECASE)
RATINGS = "helpfulness|correctness|truthfulness|honesty|harmlessness|quality|safety|score|rating|reward"
# The values of such columns in bad rows.
BAD_VALUES = {
    re.compile(rf"(?:is_)?(?:{GOOD})", re.IGNORECASE): {"false", "no", "0", "fail", "failed"},
    re.compile(rf"(?:is_)?(?:{BAD})", re.IGNORECASE): {"true", "yes", "1"},
    re.compile(RATINGS, re.IGNORECASE): {"0"},
}


def bad_row_marks(raw: Raw, columns: Iterable[str]) -> tuple[str, ...]:
    """The columns that mark the row as bad, with their values.

    >>> bad_row_marks({"is_correct": False, "helpfulness": 0.0, "id": 0}, ("is_correct", "helpfulness", "id"))
    ('is_correct: false', 'helpfulness: 0')
    """
    texts = ((name, plain_text(raw.get(name)) or "") for name in columns)
    return tuple(
        f"{name}: {text}" for name, text in texts if text.strip().lower().removesuffix(".0") in bad_values(name)
    )


@lru_cache(maxsize=4096)
def marks_rows(path: str) -> bool:
    """Whether a column's name says that its values tell good rows from bad ones: `is_correct`, `label`."""
    return any(map(MARKS.fullmatch, path.split(".")))


@lru_cache(maxsize=4096)
def bad_values(name: str) -> frozenset[str]:
    return frozenset().union(*(values for names, values in BAD_VALUES.items() if names.fullmatch(name)))
