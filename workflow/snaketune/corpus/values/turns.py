"""Turns from lists of messages, in all formats that data sets use; which are supervised, and results in the order of calls."""

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import Malformed, Message, Row
from snaketune.corpus.values.cells import first_key, json_of, kind_of, number_of, wrong_type
from snaketune.corpus.values.content import (
    CALL_TYPES,
    CALLS_KEYS,
    REASONING_KEYS,
    calls_text,
    content_of,
    text_of,
    think_block,
)
from snaketune.corpus.values.roles import CALLERS, ROLES, Speakers, role_of
from snaketune.corpus.values.validation import refuse_media
from snaketune.corpus.values.vendor_turns import (
    READ_KEYS,
    RESULT_KEY,
    has_tool_results,
    is_item,
    messages_of_items,
    split_tool_results,
)

SPEAKER_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "utterance", "text")
# Items that are two turns: the user's, and the answer.
EXCHANGE_KEYS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
# Weights and flags of supervision beside the content; the last kind supervises only parts of a turn.
NUMBER_KEYS = ("loss_weight", "weight", "loss_scale")
WEIGHT_KEYS = (*NUMBER_KEYS, "train", "trainable", "loss", "training", "output_with_loss")
MAX_WEIGHT = 100
PARTIAL_KEY, MASK_KEY = "train_detail", "mask"
# Turns in a text, as in a CSV: as JSON, or as a Python literal.
SERIALIZED_TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|speaker|content|value|weight)["']\s*:""")


def turns_of(value: Any, where: str, speakers: Speakers) -> list[Message]:
    """Return a list of {role, content}, {from, value} or {speaker, utterance} as turns with canonical roles.

    >>> turns_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "conversations", {})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if type(value) is str and may_be_serialized_turns(value):
        value = json_of(value)
        if not isinstance(value, list):
            # The repr of Python or numpy, which can't be read back without guessing.
            what = "turns as a text that isn't valid JSON; write it with json.dumps"
            raise Malformed("turns_as_text", f"{where} holds {what}")
    if not isinstance(value, list):
        raise wrong_type(where, value, "turns")
    if not value:
        raise Malformed("empty_turn", f"{where} has no turns")
    turns: list[Message] = []
    has_result_ids = False
    for number, item in enumerate(value, start=1):
        # A fast path for nearly all turns, at a third of the cost.
        if type(item) is dict and len(item) == 2 and not speakers:
            speaker, content = item.get("role") or item.get("from"), item.get("content")
            if content is None:
                content = item.get("value")
            if type(speaker) is str and type(content) is str and speaker in ROLES:
                turns.append({"role": ROLES[speaker], "content": content})
                continue
        if pair_keys := exchange_keys(item):
            here = f"{where}, item {number}"
            system = item.get("system")
            # Each item may repeat the system turn of the first.
            if system and {"role": "system", "content": system} != (turns[0] if turns else None):
                turns.append({"role": "system", "content": text_of(system, f"{here}, system")})
            for key, role in zip(pair_keys, ("user", "assistant")):
                turns.append({"role": role, "content": text_of(item[key], f"{here}, {key}")})
        elif is_item(item):
            return turns_of(messages_of_items(value), where, speakers)
        elif has_tool_results(item):
            return turns_of(split_tool_results(value), where, speakers)
        else:
            here = f"{where}, turn {number}"
            turns.append(_turn(item, here, speakers))
            has_result_ids = has_result_ids or (turns[-1]["role"] == "tool" and RESULT_KEY in item)
        if (weight := _weight_of(item, here)) != 1:
            turns[-1]["weight"] = weight
    return _in_call_order(value, turns, where) if has_result_ids else turns


def may_be_serialized_turns(value: Any) -> bool:
    """Return True if a value is a text that begins like a list of turns."""
    return type(value) is str and value[:1] in "[ \n" and SERIALIZED_TURNS.match(value) is not None


def are_turns(value: Any) -> bool:
    """Return True if a value is a list of objects that name a speaker."""
    return isinstance(value, list) and all(isinstance(item, dict) and first_key(item, SPEAKER_KEYS) for item in value)


def _turn(item: Any, where: str, speakers: Speakers) -> Message:
    if not isinstance(item, dict):
        what = "an object with speaker and content; of several texts, choose one, or write a row for each"
        raise wrong_type(where, item, what)
    refuse_media(item, f"{where}: ")
    speaker_key, content_key = _keys(item)
    speaker = item[speaker_key] if speaker_key else ""
    if not isinstance(speaker, str):
        raise Malformed("wrong_type", f"{where}: {speaker_key} holds {kind_of(speaker)}, expected a text")
    if not speaker.strip():
        raise Malformed("missing_speaker", f"{where} doesn't name its speaker (role, from or speaker)")
    content = item[content_key] if content_key else None
    if speaker in CALLERS and speaker not in speakers:
        reasoning = next((item[key] for key in REASONING_KEYS if item.get(key)), "")
        return {"role": "assistant", "content": think_block(reasoning, where) + calls_text(content, where)}
    role = role_of(speaker, speakers)
    if role is None:
        what = f"unknown speaker {speaker[:40]!r}; map it with `speakers`, or use {', '.join(ROLES)}"
        raise Malformed("unknown_role", f"{where}: {what}")
    if role == "system" and content is None:
        return {"role": role, "content": ""}
    if content_key is None and not any(item.get(key) for key in CALLS_KEYS):
        raise Malformed("missing_column", f"{where} has no content")
    return {"role": role, "content": content_of(item, content, role, where)}


def keys_read(turn: Mapping[str, Any]) -> set[str | None]:
    """Return the keys of a turn that are read: speaker, content, supervision, the first reasoning and the first calls."""
    others = (next((key for key in keys if turn.get(key)), None) for keys in (REASONING_KEYS, CALLS_KEYS))
    return {
        *_keys(turn),
        *others,
        *WEIGHT_KEYS,
        RESULT_KEY,
        *(READ_KEYS if is_item(turn) or turn.get("type") == "message" else ()),
    }


def _keys(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the keys of speaker and content; in tables, all turns have all keys, and some are null."""
    content = first_key(turn, CONTENT_KEYS) or next((key for key in CONTENT_KEYS if key in turn), None)
    return first_key(turn, SPEAKER_KEYS), content


def exchange_keys(item: Any) -> tuple[str, str] | None:
    """Return the keys of an item that is two turns, the user's and the answer; None if it is one turn."""
    if not isinstance(item, dict) or first_key(item, SPEAKER_KEYS):
        return None
    return next((keys for keys in EXCHANGE_KEYS if item.keys() >= set(keys)), None)


def _weight_of(item: dict[str, Any], where: str) -> float:
    """Return the weight of a message in the loss: 0 if it isn't supervised, 1 without a key for it.

    >>> _weight_of({"role": "assistant", "content": "Hi", "train": False}, "turn 2")
    0.0
    >>> _weight_of({"role": "assistant", "content": "Hi", "weight": 0.5}, "turn 2")
    0.5
    """
    weights = {key: item[key] for key in WEIGHT_KEYS if item.get(key) is not None}
    other = next((key for key, value in weights.items() if not _is_weight(key, value)), None)
    if item.get(MASK_KEY) is not None:
        what = f"{MASK_KEY} may mean that a turn is supervised, or that it isn't; use train: true or false instead"
    elif item.get(PARTIAL_KEY):
        what = f"{PARTIAL_KEY} supervises parts of a turn, and a turn has one weight; use weight, or split the turn"
    elif other:
        expected = f"a number from 0 to {MAX_WEIGHT}" if other in NUMBER_KEYS else "1 or 0, true or false"
        what = f"{other} is {excerpt(weights[other])[:40]}; expected {expected}"
    elif len({float(value) for value in weights.values()}) > 1:
        what = f"{' and '.join(weights)} contradict each other"
    else:
        return float(next(iter(weights.values()), 1))
    raise Malformed("unsupported_weight", f"{where}: {what}")


def weigh(row: Row, value: Any, column: str) -> None:
    """Multiply the weights of a row's turns in the loss by a number from a column, also one written as a text, as in CSV."""
    weight = number_of(value)
    if weight is None or not 0 <= weight <= MAX_WEIGHT:
        what = f"{column} is {excerpt(value)[:40]}; expected a number from 0 to {MAX_WEIGHT}"
        raise Malformed("unsupported_weight", what)
    if weight != 1:
        for turn in row.turns:
            turn["weight"] = turn.get("weight", 1) * weight


def _is_weight(key: str, value: Any) -> bool:
    # True and 1.0 equal 1.
    return isinstance(value, (int, float)) and (value in (0, 1) or (key in NUMBER_KEYS and 0 < value <= MAX_WEIGHT))


def _in_call_order(items: list[Any], turns: list[Message], where: str) -> list[Message]:
    """Sort each run of tool results in `turns` by the calls before it: turns have no ids, so only the order relates them.

    Args:
        items: the raw items of the turns, one each. If the numbers differ, because some items are two turns, none has an id.
    """
    if len(items) != len(turns):
        return turns
    ordered: list[Message] = []
    number = 0
    while number < len(turns):
        ordered.append(turns[number])
        ids = _call_ids(items[number])
        number += 1
        end = number
        while end < len(turns) and turns[end]["role"] == "tool":
            end += 1
        results = [items[i].get(RESULT_KEY) for i in range(number, end)]
        if len(set(ids)) == len(ids) > 1 and results and None not in results:
            for i, result in enumerate(results, start=number + 1):
                if str(result) not in ids:
                    calls = f"the calls before it ({', '.join(ids)[:200]})"
                    what = f"{RESULT_KEY} {str(result)[:40]!r} matches none of {calls}"
                    raise Malformed("unknown_tool_call", f"{where}, turn {i}: {what}")
            by_call = zip((ids.index(str(result)) for result in results), turns[number:end])
            ordered += [turn for _, turn in sorted(by_call, key=itemgetter(0))]
            number = end
    return ordered


def _call_ids(item: Any) -> list[str]:
    calls = next((item[key] for key in CALLS_KEYS if item.get(key)), None) if isinstance(item, dict) else None
    if calls is None and isinstance(item, dict) and isinstance(item.get("content"), list):
        calls = [part for part in item["content"] if isinstance(part, dict) and part.get("type") in CALL_TYPES]
    if isinstance(calls, str):
        calls = json_of(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) and call.get("id") is not None for call in calls):
        return []
    return [str(call["id"]) for call in calls]
