"""A prompt with several rated completions: objects with a text and a rating, or texts with a list of ratings beside them.

Each completion rated lower than the best gives a pair with it (`pairing: each`), so that the prompt and the best completion
are shared and computed once; or only the worst one does (`pairing: worst`).
"""

from operator import itemgetter
from typing import Any

from snaketune.corpus.rows import Dropped, Malformed, Outcome
from snaketune.corpus.values import completions
from snaketune.corpus.values.cells import first_value, may_be_number, number_of, wrong_type
from snaketune.corpus.values.completions import pair_of
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant

LISTS = "completions answers responses candidates outputs generations"
TEXTS = ("response", "answer", "text", "content", "completion", "output", "generation")
RANKS = {"rank", "ranks", "ranking", "rankings"}
# Of these, also the order of the completions.
ORDERS = {"ranking", "rankings"}
RATINGS = ("rank", "ranking", "overall_score", "score", "rating", "reward", "quality")


def _rating_key(items: list[Any]) -> str | None:
    return next((key for key in RATINGS if any(may_be_number(item.get(key)) for item in items)), None)


def _are_rated(value: Any) -> bool:
    objects = isinstance(value, list) and len(value) > 1 and all(isinstance(item, dict) for item in value)
    return objects and _rating_key(value) is not None


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _may_be_order(ratings: list[Any]) -> bool:
    """Whether these are numbers of all items, in an order that means something else than the same numbers as ranks.

    >>> _may_be_order([2, 0, 1]), _may_be_order([2, 3, 1]), _may_be_order([1, 0, 2]), _may_be_order([1, 1, 2])
    (True, True, False, False)
    """
    numbers = [number for rating in ratings if (number := number_of(rating)) is not None]
    first = min(numbers, default=0)
    places = [number - first for number in numbers]
    if first not in (0, 1) or sorted(places) != [*range(len(ratings))]:
        return False
    return any(places[int(place)] != number for number, place in enumerate(places))


def read(values: Values, file: RowFile) -> list[Outcome]:
    rated = _rated(values, file)
    first, best = max(rated, key=itemgetter(1))
    lower = sorted((other for other in rated if other[1] < best), key=itemgetter(1))
    if not lower:
        raise Dropped("tie")
    pairs: list[Outcome] = []
    for text, rating in lower[:1] if file.source.pairing == "worst" else lower:
        try:
            if best - rating < file.source.margin:
                raise Dropped("below_margin")
            pair = pair_of(values, first, text, file)
            pair.margin = best - rating
            pairs.append(pair)
        except (Malformed, Dropped) as error:
            pairs.append(error)
    return pairs


def _rated(values: Values, file: RowFile) -> list[tuple[Any, float]]:
    """Each completion that has a rating, with the rating, negated for ranks so that higher is better."""
    texts, name, ratings_name = values["answers"], file.names["answers"], file.names.get("ratings", "")
    if not isinstance(texts, list) or not texts:
        raise wrong_type(name, texts, "a list of completions")
    if "ratings" in values:
        ratings = values["ratings"]
        if not isinstance(ratings, list) or len(texts) != len(ratings):
            raise Malformed("unread_ratings", f"{name} and {ratings_name} aren't lists of the same length")
        if ratings_name in ORDERS and "ratings" not in file.stated and _may_be_order(ratings):
            what = "may be the rank of each completion, or the numbers of the completions from the best to the worst"
            raise Malformed(
                "ambiguous_ranking", f"{ratings_name} {what}; if they are ranks, name it in `fields.ratings`"
            )
    else:
        items = [item for item in texts if isinstance(item, dict)]
        ratings_name = _rating_key(items) or RATINGS[0]
        texts, ratings = [first_value(item, TEXTS) for item in items], [item.get(ratings_name) for item in items]
    sign = -1 if ratings_name in RANKS else 1
    rated = [(text, sign * number) for text, rating in zip(texts, ratings) if (number := number_of(rating)) is not None]
    if missing := next((text for text, _ in rated if not isinstance(text, (str, list))), ""):
        raise wrong_type(name, missing, "a text or turns")
    if len(rated) < 2:
        what = f"{name} has {len(rated)} completions with a rating ({ratings_name}); a pair needs two"
        raise Malformed("unread_ratings", what)
    return rated


BESIDE = Column("ratings", " ".join(f"{key}s {key}" for key in RATINGS), holds=_is_list)
SCHEMA = Schema(
    "rated",
    read,
    Variant("answers", Column("answers", LISTS, holds=_are_rated), *completions.PROMPT),
    Variant("answers ratings", Column("answers", LISTS, holds=_is_list), BESIDE, *completions.PROMPT),
    kinds=("preferences",),
)
