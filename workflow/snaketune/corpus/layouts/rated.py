"""Preference pairs from several rated completions of one prompt.

    completions   [{response, overall_score}, …]     also answers, responses, candidates, outputs, generations
    answers       [{answer, rank}, …]                a lower rank is better
    generations   [text, …] with ratings [4, 2, …]   also scores, rewards, ranks

Each completion rated lower than the best gives a pair with it (`pairing: each`), so that the prompt and the best completion
are shared and computed once; or only the worst one does (`pairing: worst`).
"""

from collections.abc import Mapping
from typing import Any

from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.exchanges import pair_with_context, prompt_of
from snaketune.corpus.layouts.ratings import number_of
from snaketune.corpus.layouts.roles import NO_SPEAKERS, Speakers
from snaketune.corpus.rows import Dropped, Malformed, Row

COMPLETIONS = ("completions", "answers", "responses", "candidates", "outputs", "generations")
TEXTS = ("response", "answer", "text", "content", "completion", "output", "generation")
RATINGS = ("rank", "ranking", "overall_score", "score", "rating", "reward", "quality")
# Columns with the ratings of a list of texts.
RATING_LISTS = tuple(f"{name}{ending}" for name in RATINGS for ending in ("s", ""))
RANKS = {"rank", "ranks", "ranking", "rankings"}


def is_rated(raw: Mapping[str, Any]) -> bool:
    """Return True if a row holds a list of completions with ratings."""
    return _columns(raw) is not None


def rated_pairs(
    raw: dict[str, Any], speakers: Speakers = NO_SPEAKERS, *, pairing: str = "each", margin: float = 0
) -> list[Row | Malformed | Dropped]:
    """Return the pairs of one row, the largest difference first.

    Args:
        margin: the least difference of two ratings that gives a pair; equal ones never do.
    Raises:
        Malformed: no list of completions with ratings, or two lists of different lengths.
    """
    columns = _columns(raw)
    if columns is None:
        raise Malformed(
            "missing_column", f"expected a list of completions ({', '.join(COMPLETIONS)}) with a rating for each"
        )
    rated = _rated(raw, *columns)
    best = max(rating for _, rating in rated)
    first = next(text for text, rating in rated if rating == best)
    lower = sorted(((text, rating) for text, rating in rated if rating < best), key=lambda one: one[1])
    if not lower:
        return [Dropped("tie")]
    if pairing == "worst":
        lower = lower[:1]
    prompt, notes = prompt_of(raw)
    pairs: list[Row | Malformed | Dropped] = []
    for text, rating in lower:
        if best - rating < margin:
            pairs.append(Dropped("below_margin"))
            continue
        try:
            row = pair_with_context(raw, prompt, first, text, speakers)
        except Malformed as error:
            pairs.append(error)
            continue
        row.notes += notes
        pairs.append(row)
    return pairs


def _columns(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the column of the completions, and the key or column of their ratings; None if there are none."""
    for column in COMPLETIONS:
        items = raw.get(column)
        if not isinstance(items, list) or len(items) < 2:
            continue
        if all(isinstance(item, dict) for item in items):
            key = next((key for key in RATINGS if any(number_of(item.get(key)) is not None for item in items)), None)
            if key and any(any(isinstance(item.get(text), (str, list)) for text in TEXTS) for item in items):
                return column, key
        elif ratings := next((name for name in RATING_LISTS if isinstance(raw.get(name), list)), None):
            return column, ratings
    return None


def _rated(raw: dict[str, Any], column: str, key: str) -> list[tuple[Any, float]]:
    """Return each completion that has a rating, with the rating, negated for ranks so that higher is better."""
    items = raw[column]
    if isinstance(items[0], dict):
        texts = [next((item[name] for name in TEXTS if item.get(name) is not None), None) for item in items]
        ratings = [item.get(key) for item in items]
    else:
        texts, ratings = items, raw[key]
        if len(texts) != len(ratings):
            raise Malformed("unread_ratings", f"{column} holds {len(texts)} texts, {key} {len(ratings)} ratings")
    sign = -1 if key in RANKS else 1
    rated = [(text, sign * number) for text, rating in zip(texts, ratings) if (number := number_of(rating)) is not None]
    if missing := next((text for text, _ in rated if not isinstance(text, (str, list))), ""):
        raise Malformed("wrong_type", f"{column} holds {kind_of(missing)}, expected a text or turns")
    if len(rated) < 2:
        raise Malformed(
            "unread_ratings", f"{column} has {len(rated)} completions with a rating ({key}); a pair needs two"
        )
    return rated
