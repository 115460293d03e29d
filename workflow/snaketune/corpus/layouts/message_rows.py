"""One message per row, with the id of its conversation; for files that the config's `fields` describe."""

import math
from datetime import date
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
        if id_ is None:
            outcomes[number] = wrong_type(file.names["conversation"], values["conversation"], "a text or a number")
            continue
        if plain_text(order) is None and not isinstance(order, date):
            outcomes[number] = wrong_type(file.names["order"], order, "a number, a text or a time")
            continue
        conversations.setdefault(id_, []).append((order, number, values))
    for messages in conversations.values():
        last = messages[-1][1]
        try:
            places = _places([order for order, _, _ in messages])
            messages = [message for _, message in sorted(zip(places, messages), key=itemgetter(0))]
            turns = [{"role": values["role"], "content": values["content"]} for *_, values in messages]
            outcomes[last] = Conversation(messages=turns_of(turns, file.names["content"], file.speakers))
        except Malformed as error:
            outcomes[last] = error
        except TypeError as error:
            outcomes[last] = Malformed(
                "wrong_type", f"{file.names['order']} of one conversation can't be sorted: {error}"
            )
    return outcomes


def _places(orders: list[Any]) -> list[Any]:
    """What the messages of a conversation are sorted by: numbers, if all are numbers, also in texts; else the values.

    >>> _places(["2", 10, "1.5"]), _places(["2", "10", "1a"])
    ([2, 10, 1.5], ['2', '10', '1a'])
    """
    numbers = [_number(order) for order in orders]
    return orders if None in numbers else numbers


def _number(order: Any) -> int | float | None:
    """A number, exact if it is whole: an id may have more digits than a float."""
    if not isinstance(order, str):
        return order if isinstance(order, int | float) else None
    for kind in (int, float):
        try:
            number = kind(order)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


KEYS = "conversation role content"
COLUMNS = [Column(key, "") for key in (*KEYS.split(), "order")]
SCHEMA = Schema("message-rows", None, Variant(KEYS, *COLUMNS, joins=("conversations",)), join=join)
