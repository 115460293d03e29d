"""A prompt with a better and a worse completion, or two whole conversations that begin alike, also as transcripts.

Ratings of both and a status must agree with what was chosen; pairs with equal ratings, or a tie as status, are dropped.
"""

import re

from snaketune.corpus.rows import Dropped, Malformed, Preference
from snaketune.corpus.values import completions
from snaketune.corpus.values.cells import may_be_number, number_of
from snaketune.corpus.values.completions import pair_of
from snaketune.corpus.values.prompts import completion_turns
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Samples, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of
from snaketune.corpus.values.verdicts import MAX_VERDICT, is_verdict, two_answers

SIDE = re.compile(r"(?:^|(?<=[-_. ]))(chosen|rejected)(?=$|[-_. ])")
RATING = re.compile(r"(?:^|[-_. ])(?:rating|score|reward|grade)s?(?:$|[-_. ])")
# Ratings of something else, and ratings where lower is better.
NOT_RATINGS = re.compile(r"rank|num|count|toxic|harm|unsafe|bias|length", re.IGNORECASE)
UNRATED = -1


def _ratings(samples: Samples) -> list[tuple[str, ...]]:
    """All columns that rate the chosen and the rejected completion, in pairs.

    >>> _ratings(dict.fromkeys(("chosen", "rejected", "score_rejected", "score_chosen", "chosen_length"), ()))
    [('score_chosen', 'score_rejected')]
    """
    rated = [name for name in samples if "chosen" in name and RATING.search(name) and not NOT_RATINGS.search(name)]
    pairs = ((name, SIDE.sub("rejected", name)) for name in rated)
    found = [name for better, worse in pairs if worse != better and worse in samples for name in (better, worse)]
    return [tuple(found)] if found else []


def read(values: Values, file: RowFile) -> Preference:
    margin = _check_ratings(values, file) if "ratings" in values or "status" in values else None
    pair = _pair(values, file)
    pair.margin = margin
    return pair


def _pair(values: Values, file: RowFile) -> Preference:
    chosen, rejected = values["chosen"], values["rejected"]
    for key, value in (("chosen", chosen), ("rejected", rejected)):
        if type(value) in (int, float) and key not in file.stated:
            what = "may be the index of an answer or a vote; write the answer's text"
            raise Malformed("verdicts_as_completions", f"{key} is the number {value}, which {what}")
    short = type(chosen) is str and len(chosen) < MAX_VERDICT
    if short and is_verdict(chosen) and is_verdict(rejected) and two_answers(file.columns):
        what = "only name the better and the worse of the row's answers; rename chosen to winner, and remove rejected"
        raise Malformed("verdicts_as_completions", f"chosen and rejected, {chosen!r} and {rejected!r}, {what}")
    if file.names["chosen"] == "messages" and file.names["rejected"] == "rejected_response":
        return _with_rejected_answer(values, file)
    return pair_of(values, chosen, rejected, file)


def _with_rejected_answer(values: Values, file: RowFile) -> Preference:
    """A preference from a conversation and a worse text for its last turn."""
    turns = turns_of(values["chosen"], "messages", file.speakers)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise Malformed(f"ends_on_{turns[-1]['role']}", "the last turn of messages isn't an answer, so none is chosen")
    worse = completion_turns(values["rejected"], "rejected_response", file.speakers)
    return Preference(prompt=turns[:-1], chosen=turns[-1:], rejected=worse)


def _check_ratings(values: Values, file: RowFile) -> float | None:
    """By how much the chosen completion is rated higher; None if that is unclear, since none or several columns rate it.

    Raises Malformed if the rejected completion is rated higher, Dropped if the ratings don't differ enough.
    """
    status = values.get("status")
    if isinstance(status, str) and status.strip().lower() == "tie":
        raise Dropped("tie")
    numbers, names = [number_of(value) for value in values.get("ratings", ())], file.bound.get("ratings", ())
    differences = [
        (higher - lower, position)
        for position, (higher, lower) in enumerate(zip(numbers[::2], numbers[1::2]))
        if higher is not None and lower is not None and not higher == lower == UNRATED
    ]
    if not differences:
        return None
    # One of several that agrees is enough: a better answer needn't be better in every respect.
    largest, position = max(differences)
    if largest == 0:
        raise Dropped("tie")
    if 0 < largest < file.source.margin:
        raise Dropped("below_margin")
    if largest < 0:
        rated = ", ".join(f"{names[i]} is {numbers[i]:g}" for i in (2 * position, 2 * position + 1))
        what = "swap the completions, or name these columns under `ignore` if a lower rating is better"
        raise Malformed("rating_contradicts", f"{rated}: the rejected completion is rated higher; {what}")
    return largest if len(names) == 2 else None


CHOSEN = "chosen chosen_response chosen_messages accepted preferred_output response_j"
REJECTED = "rejected rejected_response rejected_messages non_preferred_output response_k"
WORSE = "rejected_response rejected_messages"
BESIDE = (Column("ratings", _ratings, holds=may_be_number), Column("status", "status"))
SCHEMA = Schema(
    "pairs",
    read,
    Variant("chosen rejected", Column("chosen", CHOSEN), Column("rejected", REJECTED), *completions.PROMPT, *BESIDE),
    Variant("chosen rejected", Column("chosen", "messages"), Column("rejected", WORSE), *BESIDE),
    kinds=("preferences",),
)
