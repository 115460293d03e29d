"""Repairs of conversations that aren't valid, where the config says so.

They run in this order, whatever the order in the config, because each step can make work for the next: turns without text are
removed, neighbours of one role are merged, the assistant's turns before the first user turn are removed, and user turns
without an answer at the end are removed. The prompt of a preference is repaired likewise, except for its end, which the
completions answer.
"""

from collections.abc import Callable

from snaketune.corpus.rows import Conversation, Message, Row


def repair_row(row: Row, repair: tuple[str, ...]) -> None:
    """Apply the named repairs to `row`, and note each one that changed it.

    >>> row = Conversation(messages=[{"role": "user", "content": text} for text in ("a", "b")])
    >>> repair_row(row, ("merge-same-role",))
    >>> row.messages, row.notes
    ([{'role': 'user', 'content': 'a\\n\\nb'}], ('repaired_merge_same_role',))
    """
    is_conversation = isinstance(row, Conversation)
    turns = row.messages if is_conversation else row.prompt
    for name, step in STEPS.items():
        if name not in repair or (name == "drop-trailing-user" and not is_conversation):
            continue
        repaired = step(turns)
        if len(repaired) != len(turns):
            turns = repaired
            row.notes += (f"repaired_{name.replace('-', '_')}",)
    if is_conversation:
        row.messages = turns
    else:
        row.prompt = turns


def _without_empty_turns(turns: list[Message]) -> list[Message]:
    return [turn for turn in turns if turn["content"].strip()]


def _merged(turns: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for turn in turns:
        # Results of two calls stay two turns; and one turn is supervised as a whole or not at all.
        last = merged[-1] if merged else {}
        alike = last.get("role") == turn["role"] != "tool" and last.get("supervised") == turn.get("supervised")
        if alike:
            merged[-1] = {**turn, "content": f"{last['content']}\n\n{turn['content']}"}
        else:
            merged.append(turn)
    return merged


def _without_leading_assistant(turns: list[Message]) -> list[Message]:
    start = sum(1 for turn in turns[:1] if turn["role"] == "system")
    end = start
    while end < len(turns) and turns[end]["role"] == "assistant":
        end += 1
    return turns[:start] + turns[end:]


def _without_trailing_user(turns: list[Message]) -> list[Message]:
    end = len(turns)
    while end and turns[end - 1]["role"] == "user":
        end -= 1
    return turns[:end]


STEPS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "drop-empty-turns": _without_empty_turns,
    "merge-same-role": _merged,
    "drop-leading-assistant": _without_leading_assistant,
    "drop-trailing-user": _without_trailing_user,
}
