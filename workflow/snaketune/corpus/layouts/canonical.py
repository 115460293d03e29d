"""Raw rows to canonical ones: by the columns that a layout names, or by the `fields` that the config maps.

    messages          messages: [{role, content}, ...]; content a text or typed parts
    sharegpt          conversations: [{from, value}, ...], or items that are two turns: {human, assistant}
    turns             turns: [{speaker, utterance}, ...], where SYSTEM is the assistant
    dialogue          one text column with a whole dialogue: "User 1: ...", "User 2: ...", or in a template
    alpaca            instruction, input (or context), output (or response, completion)
    instances         instruction with instances: [{input, output}, ...], each of which makes a row
    prompt-response   prompt or question with response or completion; further names in `exchanges`
    message-tree      message_id, parent_id, role, text, rank; or a message with its replies inside
    pairs             a prompt with chosen and rejected, each a text, a message or turns; the prompt is a text, or a
                      conversation in messages or conversations; or chosen and rejected are whole conversations, whose
                      shared beginning is the prompt; further names in `pairs`
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike
    votes             a prompt, response1 and response2 (or _a and _b), and who liked which better
    unpaired          a prompt with its completion, or a whole conversation, and a label: true or false, 1 or 0, or a
                      text that means one of them

`answer` and `task` columns are taken along wherever they aren't the response itself, `history` is what was said before
a prompt, a `system` column is the system turn, and a `tools` column is what the prompt offers to call. A null column
counts as absent; what else isn't read is named (`unread`). Lists of turns may be written into a text as JSON, as CSV
needs it. Costs some microseconds per row; flat trees and unpaired completions hold their file in memory. Documents have
one layout, see `documents`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from snaketune.config.corpora import Source
from snaketune.corpus.layouts.dialogues import dialogue_column, dialogue_turns
from snaketune.corpus.layouts.documents import documents
from snaketune.corpus.layouts.exchanges import (
    asked,
    conversation_asked,
    earlier_turns,
    instruction_exchange,
    prompt_and_response,
    question_exchange,
)
from snaketune.corpus.layouts.mapped import (
    SYSTEM_COLUMNS,
    column_of,
    columns_named,
    columns_of,
    mapped,
    system_of,
    take_along,
    tools_beside,
)
from snaketune.corpus.layouts.pairs import (
    about,
    completed_pair,
    other_answer,
    pair_columns,
    transcript_pair,
    whole_pair,
)
from snaketune.corpus.layouts.parts import kind_of
from snaketune.corpus.layouts.recognise import check_kind, recognise
from snaketune.corpus.layouts.repair import mend
from snaketune.corpus.layouts.soundness import check
from snaketune.corpus.layouts.trees import is_nested_tree, rows_of_messages, rows_of_tree
from snaketune.corpus.layouts.turns import turns_of, unframe
from snaketune.corpus.layouts.unpaired import Labelled, labelled, paired
from snaketune.corpus.layouts.unread import Columns, unread
from snaketune.corpus.layouts.votes import answer_columns, check_numbers, is_verdict, numbers_of, two_answers, winner
from snaketune.corpus.raw import Made, RawRow
from snaketune.corpus.rows import TEXT, Conversation, Dropped, Malformed, Row

LABELS = frozenset((*SYSTEM_COLUMNS, "tools", "answer", "task"))
# Between a user and a system, the system is who answers.
SYSTEM_ANSWERS = {"SYSTEM": "assistant", "System": "assistant", "system": "assistant"}

Raw = dict[str, Any]
Speakers = dict[str, str]


def canonical_rows(raws: Iterable[RawRow], *, kind: str, source: Source, repair: tuple[str, ...]) -> Iterator[Made]:
    """What becomes of the rows of one file: of each raw row one thing, or several.

    Args:
        kind: what the corpus holds: conversations, preferences or text.
        repair: what may be done to rows that aren't sound.
    Yields:
        Rows; what is of no use, and why; None for a raw row that became part of another.
    """
    if kind == "text":
        yield from documents(raws, source.fields.text or TEXT)
        return
    fields, speakers = source.fields, source.speakers
    named = columns_named(fields)
    labels = bool(fields.system or fields.tools or fields.answer or fields.task)
    dialogues: dict[tuple[str, ...], str] = {}
    messages: list[tuple[RawRow, Columns]] = []
    completions: list[tuple[RawRow, Columns, Labelled | Malformed]] = []
    verdicts: set[tuple[str, int]] = set()

    def whole(raw: RawRow, present: Columns) -> Columns:
        # A column that `fields` name may be null, but must be there.
        return Columns(raw.found, present.read) if labels else present

    def made(raw: RawRow, present: Columns, layout: str, row: Row | Malformed | Dropped | None, first: bool) -> Made:
        if isinstance(row, Exception):
            return Made(raw, layout, row)
        if row is not None:
            try:
                unframe(row)
                if layout != "fields" and (labels or not LABELS.isdisjoint(present)):
                    columns = prompt_and_response(tuple(present)) if layout == "prompt-response" else None
                    answered = columns is not None and columns[1] == "answer"
                    take_along(whole(raw, present), row, fields, but_answer=answered)
                if repair:
                    mend(row, repair)
                check(row)
            except Malformed as error:
                return Made(raw, layout, error)
        return Made(raw, layout, row, unread(present, layout, named) if first else ())

    for raw in raws:
        found, layout = raw.found, source.layout
        try:
            if isinstance(found, Malformed):
                raise found
            rows: Iterable[Row | Malformed | Dropped]
            if fields.prompt:
                layout, present = "fields", Columns(found)
                check_kind("prompt-response" if fields.response else "pairs", kind, found)
                rows = (mapped(present, fields, speakers),)
            else:
                present = _present(found)
                if layout == "auto":
                    layout = recognise(present, speakers, dialogues, kind)
                check_kind(layout, kind, present)
                if layout == "unpaired":
                    completions.append((raw, present, _labelled(whole(raw, present), present, source)))
                    continue
                if layout == "message-tree" and not is_nested_tree(present):
                    messages.append((raw, present))
                    continue
                if layout == "votes":
                    verdicts |= numbers_of(present)
                # Looked at, and not read: which columns a layout reads is told by its reader.
                present.read.clear()
                rows = _rows(layout, present, kind, speakers, dialogues)
        except (Malformed, Dropped) as why:
            yield Made(raw, layout, why)
            continue
        for number, row in enumerate(rows):
            yield made(raw, present, layout, row, first=number == 0)
    check_numbers(verdicts)
    for (raw, present, _), row in zip(completions, paired([read for _, _, read in completions])):
        yield made(raw, present, "unpaired", row, first=True)
    contents = [dict(present) for _, present in messages]
    for (raw, present), row in zip(messages, rows_of_messages(contents, kind, speakers)):
        yield made(raw, present, "message-tree", row, first=True)


def _present(found: Raw) -> Columns:
    """The columns that aren't null; those inside of an `input` that holds messages, too."""
    inside = found.get("input")
    if type(inside) is dict and "messages" in inside and inside.keys().isdisjoint(found):
        found = {column: value for column, value in found.items() if column != "input"} | inside
    if None in found.values():
        found = {column: value for column, value in found.items() if value is not None}
    return Columns(found)


def _labelled(raw: Columns, present: Columns, source: Source) -> Labelled | Malformed:
    """A completion with its label, and what of other columns belongs to its prompt."""
    try:
        present.read.clear()
        beside = repr((system_of(raw, source.fields), tools_beside(raw, source.fields)))
        return labelled(present, source.speakers, beside)
    except Malformed as error:
        return error


def _rows(
    layout: str, raw: Raw, kind: str, speakers: Speakers, dialogues: dict[tuple[str, ...], str]
) -> Iterable[Row | Malformed | Dropped]:
    """The rows that one raw row makes by itself."""
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
    return (READERS[layout](raw, speakers),)


def _messages(raw: Raw, speakers: Speakers) -> Row:
    return Conversation(messages=turns_of(column_of(raw, "messages"), "messages", speakers))


def _sharegpt(raw: Raw, speakers: Speakers) -> Row:
    column = "conversation" if "conversation" in raw and "conversations" not in raw else "conversations"
    return Conversation(messages=turns_of(column_of(raw, column), column, speakers))


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
        given = {column: value for column, value in instance.items() if value is not None}
        try:
            return _alpaca({"instruction": column_of(raw, "instruction")} | given, speakers)
        except Malformed as error:
            return Malformed(error.reason, f"instance {number}: {error.detail}")

    return (read(instance, number) for number, instance in enumerate(instances, start=1))


def _prompt_response(raw: Raw, speakers: Speakers) -> Row:
    prompt, answer, notes = question_exchange(raw, speakers)
    return Conversation(messages=prompt + answer, notes=notes)


def _pairs(raw: Raw, speakers: Speakers) -> Row:
    columns = pair_columns(tuple(raw))
    if columns is None and "messages" in raw and "rejected_response" in raw:
        return other_answer(raw["messages"], raw["rejected_response"], speakers)
    better, worse = columns or ("chosen", "rejected")
    chosen, rejected = column_of(raw, better), column_of(raw, worse)
    if (answers := two_answers(tuple(raw))) and is_verdict(chosen) and is_verdict(rejected):
        raise Malformed(
            "verdicts_as_completions",
            f"chosen and rejected, {chosen[:40]!r} and {rejected[:40]!r}, only name the better and the worse of the "
            f"answers in {' and '.join(answers)}; rename chosen to winner, and take rejected out",
        )
    return _pair(raw, chosen, rejected, speakers)


def _transcripts(raw: Raw, speakers: Speakers) -> Row:
    return transcript_pair(column_of(raw, "chosen"), column_of(raw, "rejected"))


def _votes(raw: Raw, speakers: Speakers) -> Row:
    columns = answer_columns(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"no two answers and a verdict on them; {columns_of(raw)}")
    first, second = (raw[column] for column in columns)
    best = winner(raw)
    if best == 0:
        raise Dropped("tie")
    return _pair(raw, first, second, speakers) if best == 1 else _pair(raw, second, first, speakers)


def _pair(raw: Raw, chosen: Any, rejected: Any, speakers: Speakers) -> Row:
    """A pair about whatever columns hold the prompt."""
    row = whole_pair(chosen, rejected, speakers)
    prompt, notes = asked(raw)
    if row is not None:
        row = about(row, prompt, speakers)
    else:
        row = completed_pair(conversation_asked(raw, prompt, speakers), chosen, rejected, speakers)
        row.prompt[:0] = earlier_turns(raw, speakers)
    row.notes += notes
    return row


READERS: dict[str, Callable[[Raw, Speakers], Row]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "alpaca": _alpaca,
    "prompt-response": _prompt_response,
    "pairs": _pairs,
    "transcripts": _transcripts,
    "votes": _votes,
}
