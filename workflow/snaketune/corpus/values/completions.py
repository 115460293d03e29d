"""Two completions of a prompt, or two conversations that begin alike, as a preference pair."""

import re
from typing import TYPE_CHECKING, Any

from snaketune.corpus.rows import Malformed, Message, Preference, roles_and_texts
from snaketune.corpus.values import prompts
from snaketune.corpus.values.cells import is_blank
from snaketune.corpus.values.dialogues import split_at_tags
from snaketune.corpus.values.prompts import completion_turns, exchange
from snaketune.corpus.values.roles import ROLES
from snaketune.corpus.values.schema import Column, Values
from snaketune.corpus.values.turns import are_turns, may_be_serialized_turns, turns_of

if TYPE_CHECKING:
    from snaketune.corpus.values.row_file import RowFile


def is_conversation(value: Any) -> bool:
    return bool(value) and (are_turns(value) or may_be_serialized_turns(value))


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not is_blank(value)


# The space after a speaker's name belongs to the tag.
TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(?P<speaker>Human|Assistant): ?")
# The prompt of several completions may also be a conversation, or a text in the column of the turns before it.
PROMPT = (
    prompts.PROMPT,
    Column("prompt", "messages conversations conversation trajectory"),
    Column("prompt", "context", holds=is_conversation),
    Column("prompt", "history", holds=is_text),
    *prompts.PARTS,
)


def is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def transcript_turns(text: str) -> list[Message]:
    r"""The turns of a conversation between Human and Assistant.

    >>> transcript_turns("\n\nHuman: Hi\n\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    _, tagged_texts = split_at_tags(text, TRANSCRIPT.finditer(text))
    return [{"role": ROLES[speaker.lower()], "content": content} for speaker, content in tagged_texts]


def pair_of(values: Values, chosen: Any, rejected: Any, file: "RowFile") -> Preference:
    texts = type(chosen) is str and type(rejected) is str and chosen.lstrip()[:1] not in ("[", "H")
    first = chosen[0] if type(chosen) is list and chosen else chosen
    # Turns that begin with the assistant's are plainly an answer.
    is_answer = type(first) is dict and first.get("role") == "assistant"
    if not texts and not is_answer and (pair := _of_conversations(chosen, rejected, file)):
        _require_prompt(pair, values.get("prompt"), file)
        return pair
    if "prompt" not in values:
        raise Malformed(
            "missing_column", "no column holds the prompt, and chosen and rejected aren't whole conversations"
        )
    prompt, (better, worse), notes = exchange(values, {"chosen": chosen, "rejected": rejected}, file)
    return Preference(prompt=prompt, chosen=better, rejected=worse, notes=notes)


def _of_conversations(chosen: Any, rejected: Any, file: "RowFile") -> Preference | None:
    """A preference from two whole conversations, split after the last turn that they share; None if these are completions.

    chosen    user A   assistant B   user C │ assistant D
    rejected  user A   assistant B   user C │ assistant E   user F   assistant G
              └────────── prompt ─────────┘
    """
    if type(chosen) is list and type(rejected) is list:
        better, worse = turns_of(chosen, "chosen", file.speakers), turns_of(rejected, "rejected", file.speakers)
    elif is_transcript(chosen) and is_transcript(rejected):
        better, worse = transcript_turns(chosen), transcript_turns(rejected)
    else:
        serialized = may_be_serialized_turns(chosen) and may_be_serialized_turns(rejected)
        if isinstance(chosen, str) and isinstance(rejected, str) and not serialized:
            return None
        better = completion_turns(chosen, "chosen", file.speakers, serialized=serialized)
        worse = completion_turns(rejected, "rejected", file.speakers, serialized=serialized)
    if "assistant" in (better[0]["role"], worse[0]["role"]):
        return None
    shared = 0
    for ours, theirs in zip(better, worse):
        if ours["content"] != theirs["content"] or ours["role"] != theirs["role"]:
            break
        shared += 1
    if shared == len(better) == len(worse):
        raise Malformed("identical_chosen_and_rejected", "chosen and rejected are the same")
    for turns in (better, worse):
        if not shared or (shared < len(turns) and turns[shared]["role"] == "user"):
            what = f"chosen and rejected differ from turn {shared + 1} on, which is the user's"
            raise Malformed("different_prompts", what)
    return Preference(prompt=better[:shared], chosen=better[shared:], rejected=worse[shared:])


def _require_prompt(row: Preference, prompt: Any, file: "RowFile") -> None:
    """Raise Malformed unless `prompt` is None or among the turns of `row`."""
    if isinstance(prompt, str):
        contained = prompt.strip() in [turn["content"].strip() for turn in row.prompt]
        if not contained and is_transcript(prompt):
            contained = [turn for turn in transcript_turns(prompt) if turn["content"].strip()] == row.prompt
    else:
        contained = prompt is None
    if not contained and (isinstance(prompt, list) or may_be_serialized_turns(prompt)):
        wanted = roles_and_texts(turns_of(prompt, "prompt", file.speakers))
        contained = roles_and_texts(row.prompt + row.chosen)[: len(wanted)] == wanted
    if not contained:
        raise Malformed("different_prompts", "chosen and rejected are whole conversations that don't contain `prompt`")
