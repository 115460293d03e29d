"""Preference pairs: two completions of a prompt, two conversations that begin alike, or several rated completions.

    completions   [{response, overall_score}, …]     also answers, responses, candidates, outputs, generations
    answers       [{answer, rank}, …]                a lower rank is better
    generations   [text, …] with ratings [4, 2, …]   also scores, rewards, ranks

Each completion rated lower than the best gives a pair with it (`pairing: each`), so that the prompt and the best completion
are shared and computed once; or only the worst one does (`pairing: worst`).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.exchanges import completion_turns, earlier_turns, exchange, prompt_conversation, prompt_of
from snaketune.corpus.layouts.messages import may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.prompt_columns import add_to_prompt
from snaketune.corpus.layouts.roles import Speakers
from snaketune.corpus.layouts.templates import is_transcript, transcript_turns
from snaketune.corpus.layouts.values import Raw, first_value, mark_read, number_of, wrong_type
from snaketune.corpus.rows import Dropped, Malformed, Message, Outcome, Preference, roles_and_texts

# Columns of whole conversations or of completions; the first is the better one.
PAIR_COLUMNS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
    ("accepted", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
    ("messages", "rejected_messages"),
)
SIDE = re.compile(r"(?:^|(?<=[-_. ]))(chosen|rejected)(?=$|[-_. ])")
RATING = re.compile(r"(?:^|[-_. ])(?:rating|score|reward|grade)s?(?:$|[-_. ])")
# Ratings of something else, and ratings where lower is better.
NOT_RATINGS = re.compile(r"rank|num|count|toxic|harm|unsafe|bias|length", re.IGNORECASE)
UNRATED = -1
COMPLETIONS = ("completions", "answers", "responses", "candidates", "outputs", "generations")
COMPLETION_KEYS = ("response", "answer", "text", "content", "completion", "output", "generation")
RATING_KEYS = ("rank", "ranking", "overall_score", "score", "rating", "reward", "quality")
# Columns with the ratings of a list of texts.
RATING_LISTS = tuple(f"{name}{ending}" for name in RATING_KEYS for ending in ("s", ""))
RANKS = {"rank", "ranks", "ranking", "rankings"}


@lru_cache(maxsize=4096)
def pair_columns(columns: tuple[str, ...]) -> tuple[str, str] | None:
    return next((pair for pair in PAIR_COLUMNS if set(pair) <= set(columns)), None)


def pair_in_row(raw: Raw, chosen: Any, rejected: Any, speakers: Speakers) -> Preference:
    """Return a pair, with the prompt from whichever columns hold it."""
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(value, int | float) and not isinstance(value, bool):
            what = (
                f"{name} is the number {value}, which may be the index of an answer or a vote; write the answer's text"
            )
            raise Malformed("verdicts_as_completions", what)
    row = _pair_of_conversations(chosen, rejected, speakers)
    prompt, notes = prompt_of(raw)
    if row is None:
        row = pair_with_context(raw, prompt, chosen, rejected, speakers)
    else:
        _require_prompt(row, prompt, speakers)
    row.notes += notes
    return row


def pair_with_context(raw: Raw, prompt: Any, chosen: Any, rejected: Any, speakers: Speakers) -> Preference:
    """Return a pair of completions with the context and history that its row has for the prompt."""
    row = _pair_of_completions(prompt_conversation(raw, prompt, speakers), chosen, rejected, speakers)
    add_to_prompt(raw, row.prompt, row.chosen[0]["content"])
    if not isinstance(raw.get("history"), str) or prompt is not None:
        row.prompt[:0] = earlier_turns(raw, speakers)
    return row


def pair_of_values(prompt: Any, chosen: Any, rejected: Any, speakers: Speakers) -> Preference:
    """Return a pair from three values; `prompt` may be None if the other two are whole conversations."""
    row = _pair_of_conversations(chosen, rejected, speakers)
    if row is None:
        return _pair_of_completions(prompt, chosen, rejected, speakers)
    _require_prompt(row, prompt, speakers)
    return row


def pair_with_rejected_answer(messages: Any, rejected: Any, speakers: Speakers) -> Preference:
    """Return a preference from a conversation and a worse text for its last turn."""
    turns = turns_of(messages, "messages", speakers)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise Malformed(f"ends_on_{turns[-1]['role']}", "the last turn of messages isn't an answer, so none is chosen")
    worse = completion_turns(rejected, "rejected_response", speakers)
    return Preference(prompt=turns[:-1], chosen=turns[-1:], rejected=worse)


def pair_of_transcripts(chosen: Any, rejected: Any) -> Preference:
    return _split_at_difference(transcript_turns(chosen, "chosen"), transcript_turns(rejected, "rejected"))


def _pair_of_conversations(chosen: Any, rejected: Any, speakers: Speakers) -> Preference | None:
    """Return a preference from two whole conversations; None if these are completions."""
    if is_transcript(chosen) and is_transcript(rejected):
        return pair_of_transcripts(chosen, rejected)
    serialized = may_be_serialized_turns(chosen) and may_be_serialized_turns(rejected)
    if isinstance(chosen, str) and isinstance(rejected, str) and not serialized:
        return None
    better = completion_turns(chosen, "chosen", speakers, serialized=serialized)
    worse = completion_turns(rejected, "rejected", speakers, serialized=serialized)
    if "assistant" in (better[0]["role"], worse[0]["role"]):
        return None
    return _split_at_difference(better, worse)


def _pair_of_completions(prompt: Any, chosen: Any, rejected: Any, speakers: Speakers) -> Preference:
    if prompt is None:
        raise Malformed(
            "missing_column",
            "no column holds the prompt (prompt, question, instruction, query, input, messages, conversations …), and "
            "chosen and rejected aren't whole conversations",
        )
    turns, (chosen, rejected), notes = exchange(prompt, {"chosen": chosen, "rejected": rejected}, speakers)
    return Preference(prompt=turns, chosen=chosen, rejected=rejected, notes=notes)


def _split_at_difference(chosen: list[Message], rejected: list[Message]) -> Preference:
    """Split two conversations after the last turn that they share.

    chosen    user A   assistant B   user C │ assistant D
    rejected  user A   assistant B   user C │ assistant E   user F   assistant G
              └────────── prompt ─────────┘
    """
    better, worse = roles_and_texts(chosen), roles_and_texts(rejected)
    if better == worse:
        raise Malformed("identical_chosen_and_rejected", "chosen and rejected are the same")
    differences = (number for number, (ours, theirs) in enumerate(zip(better, worse)) if ours != theirs)
    shared = next(differences, min(len(better), len(worse)))
    if not shared or any(turns[shared:] and turns[shared]["role"] == "user" for turns in (chosen, rejected)):
        what = f"chosen and rejected differ from turn {shared + 1} on, which is the user's"
        raise Malformed("different_prompts", what)
    return Preference(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def _require_prompt(row: Preference, prompt: Any, speakers: Speakers) -> None:
    """Raise Malformed unless `prompt` is None or among the turns of `row`."""
    if isinstance(prompt, str):
        contained = any(turn["content"].strip() == prompt.strip() for turn in row.prompt)
        if not contained and is_transcript(prompt):
            contained = [turn for turn in transcript_turns(prompt, "prompt") if turn["content"].strip()] == row.prompt
    else:
        wanted = [] if prompt is None else turns_of(prompt, "prompt", speakers)
        contained = roles_and_texts(row.prompt)[: len(wanted)] == roles_and_texts(wanted)
    if not contained:
        raise Malformed("different_prompts", "chosen and rejected are whole conversations that don't contain `prompt`")


def check_ratings(raw: Raw, margin: float = 0) -> None:
    """Raise unless the ratings of a pair and its status, if it has any, agree with what was chosen.

    >>> check_ratings({"chosen": "x", "rejected": "y", "chosen-rating": 4, "rejected-rating": 2})

    Args:
        margin: the least difference of two ratings that gives a pair.
    Raises:
        Malformed: the rejected completion is rated higher.
        Dropped: the ratings are equal or differ by less than the margin, or the row's status is a tie.
    """
    status = raw.get("status")
    if isinstance(status, str) and status.strip().lower() == "tie":
        raise Dropped("tie")
    differences = []
    for better, worse in _rated_columns(tuple(raw)):
        higher, lower = number_of(raw.get(better)), number_of(raw.get(worse))
        if higher is not None and lower is not None:
            mark_read(raw, better, worse)
            if not higher == lower == UNRATED:
                differences.append((higher - lower, better, worse))
    if not differences:
        return
    # One of several that agrees is enough: a better answer needn't be better in every respect.
    largest, better, worse = max(differences)
    if largest == 0:
        raise Dropped("tie")
    if 0 < largest < margin:
        raise Dropped("below_margin")
    if largest < 0:
        raise Malformed(
            "rating_contradicts",
            f"{better} is {raw[better]}, {worse} is {raw[worse]}: the rejected completion is rated higher; swap them, or "
            "remove these columns if a lower rating is better",
        )


@lru_cache(maxsize=4096)
def _rated_columns(columns: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of columns that rate the chosen and the rejected completion.

    >>> _rated_columns(("chosen", "rejected", "score_rejected", "score_chosen", "chosen_length"))
    (('score_chosen', 'score_rejected'),)
    """
    rated = (
        column for column in columns if "chosen" in column and RATING.search(column) and not NOT_RATINGS.search(column)
    )
    pairs = ((column, SIDE.sub("rejected", column)) for column in rated)
    return tuple((better, worse) for better, worse in pairs if worse != better and worse in columns)


def rating_columns(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the column of a list of completions, and the key or column of their ratings; None if there are none."""
    for column in COMPLETIONS:
        items = raw.get(column)
        if not isinstance(items, list) or len(items) < 2:
            continue
        if all(isinstance(item, dict) for item in items):
            key = next(
                (key for key in RATING_KEYS if any(number_of(item.get(key)) is not None for item in items)), None
            )
            if key and any(isinstance(item.get(text), (str, list)) for item in items for text in COMPLETION_KEYS):
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
        texts, ratings = [first_value(item, COMPLETION_KEYS) for item in texts], [item.get(key) for item in texts]
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
