"""One message per row, with the id of its conversation; for files that the config's `fields` describe."""

from operator import itemgetter
from typing import Any

from snaketune.corpus.rows import Conversation, Malformed, Outcome
from snaketune.corpus.values.cells import plain_text, wrong_type
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of


def join(rows: list[Values], file: RowFile) -> list[Outcome]:
    """For the last row of a conversation the conversation, for others None."""
    outcomes: list[Outcome] = [None] * len(rows)
    conversations: dict[str, list[tuple[Any, int, Values]]] = {}
    for number, values in enumerate(rows):
        id_, order = plain_text(values["conversation"]), values.get("order", number)
        if id_ is None or plain_text(order) is None:
            name = "conversation" if id_ is None else "order"
            outcomes[number] = wrong_type(file.names[name], values.get(name), "a text or a number")
            continue
        conversations.setdefault(id_, []).append((order, number, values))
    for messages in conversations.values():
        last = messages[-1][1]
        try:
            if len({isinstance(order, str) for order, _, _ in messages}) > 1:
                raise Malformed("wrong_type", f"{file.names['order']} holds texts and numbers in one conversation")
            messages.sort(key=itemgetter(0))
            turns = [{"role": values["role"], "content": values["content"]} for *_, values in messages]
            outcomes[last] = Conversation(messages=turns_of(turns, file.names["content"], file.speakers))
        except Malformed as error:
            outcomes[last] = error
    return outcomes


KEYS = "conversation role content"
COLUMNS = [Column(key, "") for key in (*KEYS.split(), "order")]
SCHEMA = Schema("message-rows", None, Variant(KEYS, *COLUMNS, joins=("conversations",)), join=join)
