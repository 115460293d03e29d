"""Raw rows to canonical ones: by the columns that a layout names, or by the `fields` that the config maps.

    messages          messages: [{role, content}, ...]; content a text or typed parts
    sharegpt          conversations: [{from, value}, ...]
    turns             turns: [{speaker, utterance}, ...], where SYSTEM is the assistant
    dialogue          one text column with a whole dialogue: "User 1: ...", "User 2: ...", or in a template
    alpaca            instruction, input, output (or response)
    instances         instruction with instances: [{input, output}, ...], each of which makes a row
    prompt-response   prompt or question with response or completion; question with answer; input with output or target
    message-tree      message_id, parent_id, role, text, rank; or a message with its replies inside
    pairs             prompt, question or instruction (+ input) with chosen and rejected, each a text or turns;
                      or chosen and rejected as whole conversations, whose shared beginning is the prompt
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike
    votes             a prompt, response1 and response2 (or _a and _b), and who liked which better
    unpaired          prompt, completion, label: true or false, 1 or 0, or a text that means one of them

`answer` and `task` columns are taken along wherever they aren't the response itself, a `system` column is the system
turn, and a `tools` column is what the prompt offers to call. A null column counts as absent. Costs a few microseconds per
row; flat trees and unpaired completions hold their file in memory. Documents have one layout, see `documents`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from snaketune.config.corpora import Source
from snaketune.corpus.dialogues import dialogue_column, dialogue_turns
from snaketune.corpus.documents import documents
from snaketune.corpus.mapped import column_of, columns_of, mapped, take_along
from snaketune.corpus.pairs import pair, transcript_pair
from snaketune.corpus.parts import kind_of
from snaketune.corpus.raw import RawRow
from snaketune.corpus.recognise import check_kind, prompt_and_response, recognise
from snaketune.corpus.repair import mend
from snaketune.corpus.roles import check
from snaketune.corpus.rows import TEXT, Conversation, Dropped, Made, Malformed, Row
from snaketune.corpus.templates import may_be_framed, unwrapped
from snaketune.corpus.trees import is_nested_tree, rows_of_messages, rows_of_tree
from snaketune.corpus.turns import exchange, turns_of, unframe
from snaketune.corpus.unpaired import paired
from snaketune.corpus.votes import answer_columns, winner

NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)
LABELS = frozenset(("system", "tools", "answer", "task"))
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
    labelled = bool(fields.system or fields.tools or fields.answer or fields.task)
    dialogues: dict[tuple[str, ...], str] = {}
    waiting: dict[str, list[tuple[RawRow, Raw]]] = {"unpaired": [], "message-tree": []}

    def finished(row: Row | Malformed | Dropped | None, found: Raw, layout: str) -> Row | Malformed | Dropped | None:
        if row is None or isinstance(row, Exception):
            return row
        try:
            unframe(row)
            if layout != "fields" and (labelled or not LABELS.isdisjoint(found)):
                columns = prompt_and_response(tuple(_present(found))) if layout == "prompt-response" else None
                take_along(found, row, fields, but_answer=columns is not None and columns[1] == "answer")
            if repair:
                mend(row, repair)
            check(row)
        except Malformed as error:
            return error
        return row

    for raw in raws:
        found, layout = raw.found, source.layout
        try:
            if isinstance(found, Malformed):
                raise found
            if fields.prompt:
                layout = "fields"
                check_kind("prompt-response" if fields.response else "pairs", kind, found)
                rows = (mapped(found, fields, speakers),)
            else:
                present = _present(found)
                if layout == "auto":
                    layout = recognise(present, speakers, dialogues)
                check_kind(layout, kind, present)
                if layout == "unpaired" or (layout == "message-tree" and not is_nested_tree(present)):
                    waiting[layout].append((raw, present))
                    continue
                rows = _rows(layout, present, kind, speakers, dialogues)
        except (Malformed, Dropped) as why:
            yield Made(raw, layout, why)
            continue
        for row in rows:
            yield Made(raw, layout, finished(row, found, layout))
    for layout, held in waiting.items():
        contents = [present for _, present in held]
        made = paired(contents, speakers) if layout == "unpaired" else rows_of_messages(contents, kind, speakers)
        for (raw, _), row in zip(held, made):
            yield Made(raw, layout, finished(row, raw.found, layout))


def _present(found: Raw) -> Raw:
    """The columns that aren't null."""
    return {column: value for column, value in found.items() if value is not None} if None in found.values() else found


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
    prompt, notes = _instruction(raw)
    response = "output" if "output" in raw or "response" not in raw else "response"
    turns, (answer,), unwrapped_ = exchange(prompt, {response: column_of(raw, response)}, speakers)
    return Conversation(messages=turns + answer, notes=unwrapped_ + notes)


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
    columns = prompt_and_response(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"neither prompt and response nor question and answer; {columns_of(raw)}")
    prompt, response = columns
    said, answer = raw[prompt], raw[response]
    if type(said) is str and type(answer) is str and not may_be_framed(said):
        return Conversation(messages=[{"role": "user", "content": said}, {"role": "assistant", "content": answer}])
    turns, (answer,), notes = exchange(said, {response: answer}, speakers)
    return Conversation(messages=turns + answer, notes=notes)


def _pairs(raw: Raw, speakers: Speakers) -> Row:
    return _pair(raw, column_of(raw, "chosen"), column_of(raw, "rejected"), speakers)


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
    """A pair about whatever column holds the prompt."""
    for prompt in ("prompt", "question"):
        if prompt in raw:
            return pair(raw[prompt], chosen, rejected, speakers)
    if "instruction" not in raw:
        return pair(None, chosen, rejected, speakers)
    instruction, notes = _instruction(raw)
    row = pair(instruction, chosen, rejected, speakers)
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


def _instruction(raw: Raw) -> tuple[str, tuple[str, ...]]:
    """Instruction and input as one prompt, and what there is to note."""
    instruction, given = _text(raw, "instruction"), _text(raw, "input") if "input" in raw else ""
    if NO_INPUT.fullmatch(given):
        return instruction, ("noinput_placeholder",)
    if not given or given.isspace():
        return instruction, ()
    if unwrapped(instruction):
        raise Malformed("baked_in_template", "a template frames the instruction, and the input stands outside of it")
    return (f"{instruction}\n\n{given}" if instruction.strip() else given), ()


def _text(raw: Raw, column: str) -> str:
    value = column_of(raw, column)
    if not isinstance(value, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(value)}, expected a text")
    return value
