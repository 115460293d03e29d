"""The table of layouts: one raw row to the canonical row or rows that it gives by itself. `config/README.md` describes each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts import exchanges, pairs, unpaired, vendor_turns, votes
from snaketune.corpus.layouts.dialogues import dialogue_column, dialogue_turns
from snaketune.corpus.layouts.mapped import mapped_columns
from snaketune.corpus.layouts.message_trees import rows_of_tree
from snaketune.corpus.layouts.messages import turns_of
from snaketune.corpus.layouts.roles import SYSTEM_ANSWERS, Speakers
from snaketune.corpus.layouts.values import Raw, column_of, columns_of, wrong_type
from snaketune.corpus.rows import Conversation, Dropped, Malformed, Outcome, Row


class RowFile:
    """What the rows of one file are read by.

    Attributes:
        speakers: roles by name, besides the usual ones.
        mapped_names: columns that the source's `fields` name.
        maps_labels: whether they name system text, tools, answer or task.
        dialogues: by the columns of earlier dialogue rows, the column that held the dialogue. A row with the same columns is a
            dialogue too, even if its text is damaged.
    """

    def __init__(self, kind: str, source: Source, repair: tuple[str, ...] = ()):
        fields = source.fields
        self.kind, self.source, self.repair, self.speakers = kind, source, repair, source.speakers
        self.mapped_names = mapped_columns(fields)
        self.maps_labels = bool(fields.system or fields.tools or fields.answer or fields.task)
        self.dialogues: dict[tuple[str, ...], str] = {}


Reader = Callable[[Raw, RowFile], Row | list[Outcome]]


def _turns_in(*columns: str, roles: Speakers | None = None) -> Reader:
    """Return a reader of the turns in the first of these columns that a row has."""

    def read(raw: Raw, file: RowFile) -> Row:
        column = next((column for column in columns if column in raw), columns[0])
        value, speakers = column_of(raw, column), roles | file.speakers if roles else file.speakers
        if isinstance(value, list) and value and isinstance(value[0], str):
            hint = "texts of alternating speakers are read if `fields.messages` names the column"
            raise wrong_type(f"{column}, turn 1", value[0], f"an object with speaker and content; {hint}")
        return Conversation(messages=turns_of(value, column, speakers))

    return read


def _exchange_by(read_exchange: Callable[[Raw, Speakers], exchanges.Exchange]) -> Reader:
    def read(raw: Raw, file: RowFile) -> Row:
        prompt, response, notes = read_exchange(raw, file.speakers)
        return Conversation(messages=prompt + response, notes=notes)

    return read


def _contents(raw: Raw, file: RowFile) -> Row:
    system = next((raw[key] for key in vendor_turns.SYSTEM_KEYS if raw.get(key)), None)
    messages = vendor_turns.messages_of_contents(column_of(raw, "contents"), system)
    return Conversation(messages=turns_of(messages, "contents", file.speakers))


def _moss(raw: Raw, file: RowFile) -> Row:
    system = raw["meta_instruction"] if raw.get("meta_instruction") else None
    return Conversation(
        messages=turns_of(vendor_turns.messages_of_moss(column_of(raw, "chat"), system), "chat", file.speakers)
    )


def _dialogue(raw: Raw, file: RowFile) -> Row:
    column = file.dialogues.get(tuple(raw)) or dialogue_column(raw, file.speakers)
    if column is None:
        raise Malformed("not_a_dialogue", f"no column begins with a speaker such as User 1:; {columns_of(raw)}")
    turns, notes = dialogue_turns(raw[column], column, file.speakers)
    return Conversation(messages=turns, notes=notes)


def _instances(raw: Raw, file: RowFile) -> list[Outcome]:
    instances = column_of(raw, "instances")
    if not isinstance(instances, list):
        raise wrong_type("instances", instances, "a list of input and output")
    if not instances:
        raise Malformed("no_instances", "instances is empty, so there is no response")
    rows: list[Outcome] = []
    for number, instance in enumerate(instances, start=1):
        if not isinstance(instance, dict):
            rows.append(wrong_type(f"instance {number}", instance, "input and output"))
            continue
        try:
            present = {column: value for column, value in instance.items() if value is not None}
            with_instruction = {"instruction": column_of(raw, "instruction")} | present
            rows.append(LAYOUTS["alpaca"].read(with_instruction, file))
        except Malformed as error:
            rows.append(Malformed(error.reason, f"instance {number}: {error.detail}"))
    return rows


def _pairs(raw: Raw, file: RowFile) -> Row:
    pairs.check_ratings(raw, file.source.margin)
    columns = pairs.pair_columns(tuple(raw))
    if columns is None and "messages" in raw and "rejected_response" in raw:
        return pairs.pair_with_rejected_answer(raw["messages"], raw["rejected_response"], file.speakers)
    chosen, rejected = (column_of(raw, column) for column in columns or ("chosen", "rejected"))
    if (answers := votes.two_answers(tuple(raw))) and votes.is_verdict(chosen) and votes.is_verdict(rejected):
        raise Malformed(
            "verdicts_as_completions",
            f"chosen and rejected, {chosen[:40]!r} and {rejected[:40]!r}, only name the better and the worse of the "
            f"answers in {' and '.join(answers)}; rename chosen to winner, and remove rejected",
        )
    return pairs.pair_in_row(raw, chosen, rejected, file.speakers)


def _transcripts(raw: Raw, file: RowFile) -> Row:
    pairs.check_ratings(raw, file.source.margin)
    return pairs.pair_of_transcripts(column_of(raw, "chosen"), column_of(raw, "rejected"))


def _votes(raw: Raw, file: RowFile) -> Row:
    votes.check_margin(raw, file.source.margin)
    columns = votes.answer_columns(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"expected two answers and a verdict on them; {columns_of(raw)}")
    answers = [raw[column] for column in columns]
    best = votes.winner(raw)
    if best == 0:
        raise Dropped("tie")
    return pairs.pair_in_row(raw, answers[best - 1], answers[2 - best], file.speakers)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout.

    Attributes:
        read: one raw row to its canonical row or rows. Flat trees and completions to be paired need the rows of a whole file,
            and `canonical_rows` reads them.
        kinds: the kinds of corpora that its rows suit.
        needs: the sets of columns that identify it, and for each column its possible names; the error for an unrecognised row
            names the nearest layout, the first in the order of this table. Empty: never the nearest.
    """

    read: Reader
    kinds: tuple[str, ...] = ("conversations",)
    needs: Sequence[Sequence[Sequence[str]]] = ()


PROMPTS = (
    *dict.fromkeys(prompt for prompt, _ in exchanges.PROMPT_AND_RESPONSE),
    "instruction",
    *exchanges.PROMPT_TURNS,
)
RESPONSES = ("completion", "response", *exchanges.INSTRUCTION_RESPONSES)
JUDGEMENTS = (*votes.VERDICT_COLUMNS, *votes.STRENGTH_COLUMNS)
PAIRS = ("preferences",)

LAYOUTS = {
    "pairs": Layout(
        read=_pairs, kinds=PAIRS, needs=[(PROMPTS, (best,), (worst,)) for best, worst in pairs.PAIR_COLUMNS]
    ),
    "votes": Layout(
        read=_votes, kinds=PAIRS, needs=[(PROMPTS, (one,), (two,), JUDGEMENTS) for one, two in votes.ANSWER_COLUMNS]
    ),
    "rated": Layout(
        read=lambda raw, file: pairs.rated_pairs(raw, file.source),
        kinds=PAIRS,
        needs=[(PROMPTS, pairs.COMPLETIONS, pairs.RATING_KEYS)],
    ),
    "unpaired": Layout(
        read=lambda raw, file: unpaired.unpaired_row(raw, file.speakers),
        kinds=("preferences", "unpaired"),
        needs=[(PROMPTS, RESPONSES, unpaired.LABEL_COLUMNS)],
    ),
    "transcripts": Layout(read=_transcripts, kinds=PAIRS),
    "messages": Layout(read=_turns_in("messages"), needs=[(("messages",),)]),
    "sharegpt": Layout(read=_turns_in("conversations", "conversation"), needs=[(("conversations", "conversation"),)]),
    "turns": Layout(read=_turns_in("turns", roles=SYSTEM_ANSWERS)),
    "contents": Layout(read=_contents),
    "moss": Layout(read=_moss),
    "dialogue": Layout(read=_dialogue),
    "alpaca": Layout(
        read=_exchange_by(exchanges.instruction_exchange), needs=[(("instruction",), exchanges.INSTRUCTION_RESPONSES)]
    ),
    "instances": Layout(read=_instances, needs=[(("instruction",), ("instances",))]),
    "prompt-response": Layout(
        read=_exchange_by(exchanges.question_exchange),
        needs=[((prompt,), (response,)) for prompt, response in exchanges.PROMPT_AND_RESPONSE],
    ),
    "message-tree": Layout(
        read=lambda raw, file: rows_of_tree(raw, file.kind, file.speakers),
        kinds=("conversations", "preferences"),
        needs=[(("message_id",), ("parent_id",), ("role",), ("text",))],
    ),
}


def rows_of(layout: str, raw: Raw, file: RowFile) -> Sequence[Outcome]:
    rows = LAYOUTS[layout].read(raw, file)
    return rows if isinstance(rows, list) else (rows,)
