"""Comparison of answers, as text or as numbers."""

import re
from decimal import Decimal, InvalidOperation

# 1,234 and -12,345,678.5
GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


def same_answer(extracted: str, expected: str) -> bool:
    """Whether answers are equal as text or as numbers; commas count as thousands separators only.

    >>> same_answer("1,200", "1200.0"), same_answer("cat", "Cat"), same_answer("7", "7 "), same_answer("3,5", "35")
    (True, False, True, False)
    """
    number = _number(extracted)
    return extracted.strip() == expected.strip() or (number is not None and number == _number(expected))


def _number(text: str) -> Decimal | None:
    digits = text.strip().removeprefix("$").rstrip(".,")
    if GROUPED.fullmatch(digits):
        digits = digits.replace(",", "")
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return None
    # Decimal allows underscores between digits.
    return number if number.is_finite() and "_" not in digits else None
