"""Format numbers, and make untrusted text printable."""

import math
import re
from typing import Any

SHOWN_CHARACTERS = 2000
NOTHING = "–"
# Control characters (line breaks and tabs are part of a response and stay), lone surrogates, bidirectional controls, and two
# characters that XML forbids.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def whole(value: float | None) -> str:
    """An integer with thousands separators.

    >>> whole(1234567), whole(None)
    ('1,234,567', '–')
    """
    return NOTHING if not _known(value) else f"{value:,.0f}"


def short(value: float | None) -> str:
    """At most three digits before a unit.

    >>> short(28770.1), short(950), short(1.5e9), short(None)
    ('28.8 k', '950', '1.5 G', '–')
    """
    if not _known(value):
        return NOTHING
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def decimal(value: float | None) -> str:
    """Four significant digits.

    >>> decimal(6.01462), decimal(409.3696), decimal(-0.0), decimal(float("nan"))
    ('6.015', '409.4', '0', '–')
    """
    if not _known(value):
        return NOTHING
    # Adding zero turns -0.0 into 0.0.
    return f"{value + 0.0:.4g}" if 1e-4 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def percent(share: float | None, digits: int = 1) -> str:
    """
    >>> percent(0.96114), percent(1), percent(None)
    ('96.1%', '100%', '–')
    """
    if not _known(share):
        return NOTHING
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.83), duration(75), duration(7320)
    ('0.8 s', '1 min 15 s', '2 h 2 min')
    """
    if not _known(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def words(name: str) -> str:
    """An identifier with spaces in place of underscores.

    >>> words("nothing_supervised_in_a_row")
    'nothing supervised in a row'
    """
    return clean(name).replace("_", " ")


def clean(value: Any) -> str:
    """Replace lone surrogates, control characters and bidirectional controls, which HTML escaping keeps, by U+FFFD.

    >>> clean("a\\x00b\\u202ec\\n")
    'a�b�c\\n'
    """
    return UNSHOWABLE.sub("�", str(value).replace("\r\n", "\n"))


def clip(value: Any, limit: int = SHOWN_CHARACTERS) -> str:
    """`clean`, cut to `limit` characters with a note of how many were cut.

    >>> clip("abcdef", 4)
    'abcd … (2 more characters)'
    """
    text = clean(value)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
