"""Validity of a canonical row: the order of its roles, the last turn, and that every turn has text."""

from snaketune.corpus.layouts.media import PLACEHOLDER, shows_media
from snaketune.corpus.rows import Conversation, Malformed, Message, Preference, Row, Unpaired, roles_and_texts

# The roles that may follow each role; None is the beginning.
MAY_FOLLOW = {
    None: {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}


def check(row: Row) -> None:
    """Raise Malformed unless `row` is valid."""
    if isinstance(row, Conversation):
        _check_conversation(row)
    else:
        _check_completions(row)


def _check_conversation(row: Conversation) -> None:
    turns = row.messages
    last = turns[-1]["role"] if turns else None
    if last != "assistant" and not any(turn["role"] == "assistant" for turn in turns):
        raise Malformed("no_assistant_turn", f"none of the {len(turns)} turns is the assistant's")
    _check_turns(turns)
    if last != "assistant":
        raise Malformed(f"ends_on_{last}", "the last turn isn't the assistant's, so it can't be trained on")


def _check_completions(row: Preference | Unpaired) -> None:
    completions: dict[str, list[Message]] = {name: getattr(row, name) for name in row.columns[1:]}
    if not row.prompt:
        raise Malformed("empty_turn", "the prompt has no turns")
    for name, turns in completions.items():
        if not any(turn["content"].strip() for turn in turns):
            raise Malformed("empty_completion", f"{name} has no text")
    if row.prompt[-1]["role"] not in ("user", "tool"):
        raise Malformed("turn_out_of_order", f"the prompt ends on {row.prompt[-1]['role']}, expected user")
    for name, turns in completions.items():
        _check_turns(row.prompt + turns, f"prompt + {name}: ")
        if turns[-1]["role"] != "assistant":
            raise Malformed(f"ends_on_{turns[-1]['role']}", f"the last turn of {name} isn't the assistant's")
    if isinstance(row, Preference) and roles_and_texts(row.chosen) == roles_and_texts(row.rejected):
        raise Malformed("identical_chosen_and_rejected", "chosen and rejected are the same")


def _check_turns(turns: list[Message], where: str = "") -> None:
    before = None
    for number, turn in enumerate(turns, start=1):
        role, content = turn["role"], turn["content"]
        # `isspace` stops at the first other character, and copies nothing.
        if not content or content.isspace():
            raise Malformed("empty_turn", f"{where}turn {number} ({role}) has no text")
        if role not in MAY_FOLLOW[before]:
            if role == before:
                raise Malformed("two_turns_in_a_row", f"{where}turns {number - 1} and {number} are both {role}")
            position = f"follows {before}" if before else "comes first"
            raise Malformed("turn_out_of_order", f"{where}turn {number} ({role}) {position}")
        if role == "user" and shows_media(content):
            raise Malformed(
                "unsupported_part",
                f"{where}turn {number} has a placeholder of an image or audio (such as {PLACEHOLDER}); text can't represent it",
            )
        before = role
