"""The table of layouts, and a reader for each: one raw row to the canonical row or rows that it gives by itself."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.columns import column_of, columns_of
from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.dialogues import dialogue_column, dialogue_turns
from snaketune.corpus.layouts.exchanges import (
    INSTRUCTION_RESPONSES,
    PROMPT_AND_RESPONSE,
    PROMPT_TURNS,
    Raw,
    instruction_exchange,
    pair_with_context,
    prompt_of,
    question_exchange,
)
from snaketune.corpus.layouts.message_trees import rows_of_tree
from snaketune.corpus.layouts.messages import turns_of
from snaketune.corpus.layouts.preference_pairs import (
    PAIR_COLUMNS,
    pair_columns,
    pair_of_conversations,
    pair_with_rejected_answer,
    require_prompt,
    transcript_pair,
)
from snaketune.corpus.layouts.rated import COMPLETIONS, RATINGS, rated_pairs
from snaketune.corpus.layouts.ratings import check_ratings
from snaketune.corpus.layouts.roles import SYSTEM_ANSWERS, Speakers
from snaketune.corpus.layouts.unpaired import LABEL_COLUMNS
from snaketune.corpus.layouts.vendor_turns import SYSTEM_KEYS, messages_of_contents, messages_of_moss
from snaketune.corpus.layouts.votes import (
    ANSWER_COLUMNS,
    STRENGTH_COLUMNS,
    VERDICT_COLUMNS,
    answer_columns,
    check_margin,
    is_verdict,
    two_answers,
    winner,
)
from snaketune.corpus.rows import Conversation, Dropped, Malformed, Row


def rows_of(
    layout: str, raw: Raw, kind: str, source: Source, dialogues: dict[tuple[str, ...], str]
) -> Iterable[Row | Malformed | Dropped]:
    """Return the rows that one raw row gives by itself."""
    speakers = source.speakers
    if layout in ("pairs", "transcripts"):
        check_ratings(raw, source.margin)
    if layout == "votes":
        check_margin(raw, source.margin)
    if layout == "rated":
        return rated_pairs(raw, speakers, pairing=source.pairing, margin=source.margin)
    if layout == "instances":
        return _instances(raw, speakers)
    if layout == "message-tree":
        return rows_of_tree(raw, kind, speakers)
    if layout == "dialogue":
        column = dialogues.get(tuple(raw)) or dialogue_column(raw, speakers)
        if column is None:
            raise Malformed("not_a_dialogue", f"no column begins with a speaker such as User 1:; {columns_of(raw)}")
        turns, notes = dialogue_turns(raw[column], column, speakers)
        return (Conversation(messages=turns, notes=notes),)
    return (LAYOUTS[layout].read(raw, speakers),)


def _messages(raw: Raw, speakers: Speakers) -> Row:
    return Conversation(messages=turns_of(column_of(raw, "messages"), "messages", speakers))


def _sharegpt(raw: Raw, speakers: Speakers) -> Row:
    column = "conversation" if "conversation" in raw and "conversations" not in raw else "conversations"
    return Conversation(messages=turns_of(column_of(raw, column), column, speakers))


def _contents(raw: Raw, speakers: Speakers) -> Row:
    key = next((key for key in SYSTEM_KEYS if raw.get(key)), None)
    messages = messages_of_contents(column_of(raw, "contents"), raw[key] if key else None)
    return Conversation(messages=turns_of(messages, "contents", speakers))


def _moss(raw: Raw, speakers: Speakers) -> Row:
    system = raw["meta_instruction"] if raw.get("meta_instruction") else None
    return Conversation(messages=turns_of(messages_of_moss(column_of(raw, "chat"), system), "chat", speakers))


def _turns(raw: Raw, speakers: Speakers) -> Row:
    return Conversation(messages=turns_of(column_of(raw, "turns"), "turns", SYSTEM_ANSWERS | speakers))


def _alpaca(raw: Raw, speakers: Speakers) -> Row:
    prompt, answer, notes = instruction_exchange(raw, speakers)
    return Conversation(messages=prompt + answer, notes=notes)


def _instances(raw: Raw, speakers: Speakers) -> Iterator[Row | Malformed]:
    instances = column_of(raw, "instances")
    if not isinstance(instances, list):
        raise Malformed("wrong_type", f"instances holds {kind_of(instances)}, expected a list of input and output")
    if not instances:
        raise Malformed("no_instances", "instances is empty, so there is no response")

    def read(instance: Any, number: int) -> Row | Malformed:
        if not isinstance(instance, dict):
            return Malformed("wrong_type", f"instance {number} holds {kind_of(instance)}, expected input and output")
        present = {column: value for column, value in instance.items() if value is not None}
        try:
            return _alpaca({"instruction": column_of(raw, "instruction")} | present, speakers)
        except Malformed as error:
            return Malformed(error.reason, f"instance {number}: {error.detail}")

    return (read(instance, number) for number, instance in enumerate(instances, start=1))


def _prompt_response(raw: Raw, speakers: Speakers) -> Row:
    prompt, answer, notes = question_exchange(raw, speakers)
    return Conversation(messages=prompt + answer, notes=notes)


def _pairs(raw: Raw, speakers: Speakers) -> Row:
    columns = pair_columns(tuple(raw))
    if columns is None and "messages" in raw and "rejected_response" in raw:
        return pair_with_rejected_answer(raw["messages"], raw["rejected_response"], speakers)
    better, worse = columns or ("chosen", "rejected")
    chosen, rejected = column_of(raw, better), column_of(raw, worse)
    if (answers := two_answers(tuple(raw))) and is_verdict(chosen) and is_verdict(rejected):
        raise Malformed(
            "verdicts_as_completions",
            f"chosen and rejected, {chosen[:40]!r} and {rejected[:40]!r}, only name the better and the worse of the "
            f"answers in {' and '.join(answers)}; rename chosen to winner, and remove rejected",
        )
    return _pair(raw, chosen, rejected, speakers)


def _transcripts(raw: Raw, speakers: Speakers) -> Row:
    return transcript_pair(column_of(raw, "chosen"), column_of(raw, "rejected"))


def _votes(raw: Raw, speakers: Speakers) -> Row:
    columns = answer_columns(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"expected two answers and a verdict on them; {columns_of(raw)}")
    first, second = (raw[column] for column in columns)
    best = winner(raw)
    if best == 0:
        raise Dropped("tie")
    return _pair(raw, first, second, speakers) if best == 1 else _pair(raw, second, first, speakers)


def _pair(raw: Raw, chosen: Any, rejected: Any, speakers: Speakers) -> Row:
    """Return a pair, with the prompt from whichever columns hold it."""
    row = pair_of_conversations(chosen, rejected, speakers)
    prompt, notes = prompt_of(raw)
    row = (
        pair_with_context(raw, prompt, chosen, rejected, speakers)
        if row is None
        else require_prompt(row, prompt, speakers)
    )
    row.notes += notes
    return row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout.

    Attributes:
        kinds: the kinds of corpora that its rows suit.
        needs: the sets of columns that identify it, and for each column its possible names; the error for an unrecognised row
            names the nearest layout, the first in the order of this table. Empty: never the nearest.
        read: one raw row to one canonical row; None if `rows_of` or `canonical_rows` does it.
    """

    kinds: tuple[str, ...]
    needs: Sequence[Sequence[Sequence[str]]] = ()
    read: Callable[[Raw, Speakers], Row] | None = None


PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PROMPT_AND_RESPONSE))
RESPONSES = ("completion", "response", *INSTRUCTION_RESPONSES)
PROMPT_COLUMNS = (*PROMPTS, "instruction", *PROMPT_TURNS)
JUDGEMENT_COLUMNS = (*VERDICT_COLUMNS, *STRENGTH_COLUMNS)

LAYOUTS = {
    "pairs": Layout(
        kinds=("preferences",),
        needs=[(PROMPT_COLUMNS, (chosen,), (rejected,)) for chosen, rejected in PAIR_COLUMNS],
        read=_pairs,
    ),
    "votes": Layout(
        kinds=("preferences",),
        needs=[(PROMPT_COLUMNS, (first,), (second,), JUDGEMENT_COLUMNS) for first, second in ANSWER_COLUMNS],
        read=_votes,
    ),
    "rated": Layout(kinds=("preferences",), needs=[(PROMPT_COLUMNS, COMPLETIONS, RATINGS)]),
    "unpaired": Layout(kinds=("preferences", "unpaired"), needs=[(PROMPT_COLUMNS, RESPONSES, LABEL_COLUMNS)]),
    "transcripts": Layout(kinds=("preferences",), read=_transcripts),
    "messages": Layout(kinds=("conversations",), needs=[(("messages",),)], read=_messages),
    "sharegpt": Layout(kinds=("conversations",), needs=[(("conversations", "conversation"),)], read=_sharegpt),
    "turns": Layout(kinds=("conversations",), read=_turns),
    "contents": Layout(kinds=("conversations",), read=_contents),
    "moss": Layout(kinds=("conversations",), read=_moss),
    "dialogue": Layout(kinds=("conversations",)),
    "alpaca": Layout(kinds=("conversations",), needs=[(("instruction",), INSTRUCTION_RESPONSES)], read=_alpaca),
    "instances": Layout(kinds=("conversations",), needs=[(("instruction",), ("instances",))]),
    "prompt-response": Layout(
        kinds=("conversations",),
        needs=[((prompt,), (response,)) for prompt, response in PROMPT_AND_RESPONSE],
        read=_prompt_response,
    ),
    "message-tree": Layout(
        kinds=("conversations", "preferences"), needs=[(("message_id",), ("parent_id",), ("role",), ("text",))]
    ),
}
