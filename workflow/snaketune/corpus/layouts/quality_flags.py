"""Columns that mark a row as a bad one to train on: `is_correct: false`, `helpfulness: 0`."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.columns import plain_text

GOOD = "correct|safe|valid|verified|helpful|harmless|good|passed|approved|appropriate|successful|success|pass|resolved"
BAD = "incorrect|wrong|unsafe|toxic|harmful|invalid|bad|spam|flagged|hallucinations?|hallucinated"
RATINGS = "helpfulness|correctness|truthfulness|honesty|harmlessness|quality|safety|score|rating|reward"
# The values of such columns in bad rows.
BAD_VALUES = {
    re.compile(rf"(?:is_)?(?:{GOOD})", re.IGNORECASE): {"false", "no", "0", "fail", "failed"},
    re.compile(rf"(?:is_)?(?:{BAD})", re.IGNORECASE): {"true", "yes", "1"},
    re.compile(RATINGS, re.IGNORECASE): {"0"},
}


def bad_row_marks(raw: dict[str, Any], unread: Iterable[str]) -> tuple[str, ...]:
    """Return the unread columns that mark a row as bad, with their values.

    >>> bad_row_marks({"is_correct": False, "helpfulness": 0.0, "id": 0}, ("is_correct", "helpfulness", "id"))
    ('is_correct: false', 'helpfulness: 0')
    """
    candidates = ((name, plain_text(raw.get(name)), _bad_values(name)) for name in unread)
    return tuple(
        f"{name}: {text}"
        for name, text, bad_values in candidates
        if text is not None and _normalised(text) in bad_values
    )


def _normalised(text: str) -> str:
    return text.strip().lower().removesuffix(".0")


@lru_cache(maxsize=4096)
def _bad_values(name: str) -> frozenset[str]:
    return frozenset().union(*(values for names, values in BAD_VALUES.items() if names.fullmatch(name)))
