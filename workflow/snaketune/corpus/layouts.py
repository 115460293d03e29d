"""Raw rows to canonical ones: by the columns that a layout names, or by the `fields` that the config maps.

    messages          messages: [{role, content}, ...]; content a text or typed parts
    sharegpt          conversations: [{from, value}, ...]
    turns             turns: [{speaker, utterance}, ...], where SYSTEM is the assistant
    dialogue          one text column with a whole dialogue: "User 1: ...", "User 2: ...", or a template
    alpaca            instruction, input, output (or response)
    instances         instruction with instances: [{input, output}, ...], each of which makes a row
    prompt-response   prompt or question with response or completion; question with answer; input with output or target
    message-tree      message_id, parent_id, role, text, rank; or a message with its replies inside
    pairs             prompt, question or instruction (+ input) with chosen and rejected, each a text or turns;
                      or chosen and rejected as whole conversations, whose shared beginning is the prompt
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike
    votes             a prompt, response1 and response2 (or _a and _b), and who liked which better
    unpaired          prompt, completion, label: true or false

`answer` and `task` columns are taken along wherever they aren't the response itself, and a `system` column is the
system turn. A null column counts as absent. Costs a few microseconds per row; flat trees and unpaired completions hold
their file in memory.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from snaketune.config.corpora import Fields, Source
from snaketune.corpus.dialogues import dialogue_column, dialogue_turns
from snaketune.corpus.mapped import column_of, columns_of, mapped, take_along
from snaketune.corpus.pairs import is_transcript, pair, transcript_pair
from snaketune.corpus.parts import kind_of
from snaketune.corpus.raw import RawRow
from snaketune.corpus.repair import mend
from snaketune.corpus.roles import check
from snaketune.corpus.rows import Conversation, Dropped, Made, Malformed, Message, Preference, Row
from snaketune.corpus.trees import rows_of_messages, rows_of_tree
from snaketune.corpus.turns import completion_turns, exchange, turns_of
from snaketune.corpus.unpaired import paired
from snaketune.corpus.votes import answer_columns, winner

NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)
PROMPT_AND_RESPONSE = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "response"),
    ("question", "completion"),
    ("question", "answer"),
    ("input", "output"),
    ("input", "target"),
)
CONVERSATION_COLUMNS = ("conversations", "conversation", "messages")
# In a list of turns between a user and a system, the system is who answers.
SYSTEM_ANSWERS = {"SYSTEM": "assistant", "System": "assistant", "system": "assistant"}
PAIRS_OR_TRANSCRIPTS = "pairs or transcripts"
PAIR_LAYOUTS = ("pairs", "transcripts", "votes", "unpaired")

Speakers = dict[str, str]
Outcome = Row | Malformed | Dropped | None


def canonical_rows(
    raws: Iterable[RawRow], *, kind: str, source: Source, repair: tuple[str, ...]
) -> Iterator[Made]:
    """What becomes of the rows of one file; of each raw row at least one thing.

    Args:
        kind: what the corpus holds, conversations or preferences.
        repair: what may be done to rows that aren't sound.
    Yields:
        Rows, those that are no use and why, and None for those that became part of another.
    """
    reading = _Reading(kind, source)
    waiting: defaultdict[str, list[tuple[RawRow, dict[str, Any]]]] = defaultdict(list)
    for raw in raws:
        found = raw.found
        layout = source.layout
        if isinstance(found, Malformed):
            yield Made(raw, layout, found)
            continue
        try:
            present = {name: value for name, value in found.items() if value is not None} if None in found.values() else found
            layout = 
            ...
