"""The known layout nearest to the columns of an unrecognised row, and the columns that it lacks."""

import re
from functools import lru_cache

from snaketune.corpus.layouts.readers import LAYOUTS

ADVICE = "map columns with `fields`"
# `fields` has no key for the label of a completion.
WITHOUT_FIELDS = frozenset({"unpaired"})


@lru_cache(maxsize=1024)
def nearest(columns: tuple[str, ...], layouts: frozenset[str]) -> str:
    """Return the nearest layout and what to do, as text.

    >>> nearest(("prompt", "chosen"), frozenset({"pairs", "votes"}))
    'nearest: pairs (prompt, chosen, rejected); `rejected` is missing; or map columns with `fields`'

    Args:
        layouts: those that give rows of the corpus' kind.
    """
    by_plain_name = {_plain(column): column for column in columns}
    best: tuple[int, int, str] | None = None
    for layout, needs in ((name, needs) for name in LAYOUTS if name in layouts for needs in LAYOUTS[name].needs):
        names_shown, missing, other = [], [], []
        for names in needs:
            name = next((name for name in names if name in columns), None)
            alike = None if name else next((name for name in names if _plain(name) in by_plain_name), None)
            names_shown.append(name or alike or names[0])
            if alike:
                other.append(f"`{by_plain_name[_plain(alike)]}` would have to be called `{alike}`")
            elif name is None:
                missing.append(f"`{names[0]}` is missing")
        if len(missing) == len(needs):
            continue
        # A column with another spelling counts as half a missing one.
        order = (2 * len(missing) + len(other), -len(needs))
        if best is None or order < best[:2]:
            best = (*order, f"nearest: {layout} ({', '.join(names_shown)}); {', '.join(missing + other)}")
    if layouts == WITHOUT_FIELDS:
        return best[2] if best else "expected prompt, completion, label"
    otherwise = f"{ADVICE}, or read documents by a corpus of kind text" if "text" in columns else ADVICE
    return f"{best[2]}; or {otherwise}" if best else otherwise


def _plain(name: str) -> str:
    """Return a name in lower case, without plural and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.casefold()).rstrip("s")
