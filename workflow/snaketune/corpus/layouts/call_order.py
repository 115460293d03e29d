"""Results of parallel tool calls in the order of the calls: canonical turns have no ids, so only the order relates them."""

import json
from contextlib import suppress
from typing import Any

from snaketune.corpus.layouts.content_parts import CALL_TYPES, CALLS_KEYS
from snaketune.corpus.rows import Malformed, Message

RESULT_KEY = "tool_call_id"


def in_call_order(items: list[Any], turns: list[Message], where: str) -> list[Message]:
    """Sort each run of tool results in `turns` by the order of the calls before it.

    Args:
        items: the raw items of the turns, one each. If the numbers differ, because some items are two turns, none has an id.
    Raises:
        Malformed: one of several results belongs to none of the calls.
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
                    raise Malformed(
                        "unknown_tool_call",
                        f"{where}, turn {i}: {RESULT_KEY} {str(result)[:40]!r} matches none of the calls before it "
                        f"({', '.join(ids)[:200]})",
                    )
            ordered += [turns[i] for i in sorted(range(number, end), key=lambda i: ids.index(str(results[i - number])))]
            number = end
    return ordered


def _call_ids(item: Any) -> list[str]:
    calls = next((item[key] for key in CALLS_KEYS if item.get(key)), None) if isinstance(item, dict) else None
    if calls is None and isinstance(item, dict) and isinstance(item.get("content"), list):
        calls = [part for part in item["content"] if isinstance(part, dict) and part.get("type") in CALL_TYPES]
    if isinstance(calls, str):
        with suppress(ValueError, RecursionError):
            calls = json.loads(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) and call.get("id") is not None for call in calls):
        return []
    return [str(call["id"]) for call in calls]
