"""Several completions of one prompt with a rating each, to preference pairs.

    completions   [{response, overall_score}, …]     also answers, responses, candidates, outputs, generations
    answers       [{answer, rank}, …]                a rank is better the lower it is
    generations   [text, …] with ratings [4, 2, …]   also scores, rewards, ranks

Each completion that is rated lower than the best makes a pair with it (`pairing: each`), so that the prompt and the best one
are shared and computed once; or only the worst does (`pairing: worst`).
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
# Of lists of texts, the list of ratings beside them.
RATING_LISTS = tuple(f"{name}{ending}" for name in RATINGS for ending in ("s", ""))
RANKS = {"rank", "ranks", "ranking", "rankings"}


def is_rated(raw: Mapping[str, Any]) -> bool:
    """Whether a row holds a list of completions, and ratings of them."""
    return _columns(raw) is not None


def rated_pairs(
    raw: dict[str, Any], speakers: Speakers = NO_SPEAKERS, *, pairing: str = "each", margin: float = 0
) -> list[Row | Malformed | Dropped]:
    """The pairs of one row, the largest difference first.

    Args:
        margin: the least difference of two ratings that makes a pair; equal ones never do.
    Raises:
        Malformed: no list of completions with ratings, or two lists of different lengths.
    """
    columns = _columns(raw)
    if columns is None:
        raise Malformed("missing_column", f"no list of completions ({', '.join(COMPLETIONS)}) with a rating for each")
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
    """The column of the completions, and the key or the column of their ratings."""
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
    """Each completion that has a rating, with it; a higher one is better."""
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
            "unread_ratings", f"{column} has {len(rated)} completions with a rating ({key}); two make a pair"
        )
    return rated
