"""Preference pairs from several rated completions of one prompt.

    completions   [{response, overall_score}, …]     also answers, responses, candidates, outputs, generations
    answers       [{answer, rank}, …]                a lower rank is better
    generations   [text, …] with ratings [4, 2, …]   also scores, rewards, ranks

Each completion rated lower than the best gives a pair with it (`pairing: each`), so that the prompt and the best completion
are shared and computed once; or only the worst one does (`pairing: worst`).
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.exchanges import prompt_of
from snaketune.corpus.layouts.pairs import pair_with_context
from snaketune.corpus.layouts.values import Raw, first_value, number_of, wrong_type
from snaketune.corpus.rows import Dropped, Malformed, Outcome

COMPLETIONS = ("completions", "answers", "responses", "candidates", "outputs", "generations")
TEXTS = ("response", "answer", "text", "content", "completion", "output", "generation")
RATINGS = ("rank", "ranking", "overall_score", "score", "rating", "reward", "quality")
# Columns with the ratings of a list of texts.
RATING_LISTS = tuple(f"{name}{ending}" for name in RATINGS for ending in ("s", ""))
RANKS = {"rank", "ranks", "ranking", "rankings"}


def rating_columns(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the column of a list of completions, and the key or column of their ratings; None if there are none."""
    for column in COMPLETIONS:
        items = raw.get(column)
        if not isinstance(items, list) or len(items) < 2:
            continue
        if all(isinstance(item, dict) for item in items):
            key = next((key for key in RATINGS if any(number_of(item.get(key)) is not None for item in items)), None)
            if key and any(isinstance(item.get(text), (str, list)) for item in items for text in TEXTS):
                return column, key
        elif ratings := next((name for name in RATING_LISTS if isinstance(raw.get(name), list)), None):
            return column, ratings
    return None


def rated_pairs(raw: Raw, source: Source) -> list[Outcome]:
    """Return the pairs of one row, the largest difference first, as the pairing and the margin of `source` say."""
    columns = rating_columns(raw)
    if columns is None:
        what = f"expected a list of completions ({', '.join(COMPLETIONS)}) with a rating for each"
        raise Malformed("missing_column", what)
    rated = _rated(raw, *columns)
    first, best = max(rated, key=itemgetter(1))
    lower = sorted((one for one in rated if one[1] < best), key=itemgetter(1))
    if not lower:
        return [Dropped("tie")]
    prompt, notes = prompt_of(raw)
    pairs: list[Outcome] = []
    for text, rating in lower[:1] if source.pairing == "worst" else lower:
        if best - rating < source.margin:
            pairs.append(Dropped("below_margin"))
            continue
        try:
            row = pair_with_context(raw, prompt, first, text, source.speakers)
            row.notes += notes
            pairs.append(row)
        except Malformed as error:
            pairs.append(error)
    return pairs


def _rated(raw: Raw, column: str, key: str) -> list[tuple[Any, float]]:
    """Return each completion that has a rating, with the rating, negated for ranks so that higher is better."""
    texts = raw[column]
    if isinstance(texts[0], dict):
        texts, ratings = [first_value(item, TEXTS) for item in texts], [item.get(key) for item in texts]
    else:
        ratings = raw[key]
        if len(texts) != len(ratings):
            raise Malformed("unread_ratings", f"{column} holds {len(texts)} texts, {key} {len(ratings)} ratings")
    sign = -1 if key in RANKS else 1
    rated = [(text, sign * number) for text, rating in zip(texts, ratings) if (number := number_of(rating)) is not None]
    if missing := next((text for text, _ in rated if not isinstance(text, (str, list))), ""):
        raise wrong_type(column, missing, "a text or turns")
    if len(rated) < 2:
        what = f"{column} has {len(rated)} completions with a rating ({key}); a pair needs two"
        raise Malformed("unread_ratings", what)
    return rated
