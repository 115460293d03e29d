"""Suggestions for unknown names in error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(name: str, known: Iterable[str]) -> str:
    """A suffix for an error message: `; did you mean 'x'?`, or the list of known names if none is similar.

    >>> unknown("learning_rte", ["learning_rate", "epochs"])
    "; did you mean 'learning_rate'?"
    >>> unknown("q", ["a", "b"])
    '; known: a, b'
    """
    known = sorted(str(name) for name in known)
    near = get_close_matches(str(name), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; none is defined"
