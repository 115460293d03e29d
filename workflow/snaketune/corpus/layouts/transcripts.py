"""Texts with a speaker tag before each turn, split at these tags: transcripts, dialogues and templates."""

import re
from typing import Any

from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.roles import role_of
from snaketune.corpus.rows import Malformed, Message

# The space after a speaker's name belongs to the tag.
TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(?P<speaker>Human|Assistant): ?")


def split_at_speakers(text: str, marks: re.Pattern[str]) -> tuple[str, list[tuple[str, str]]]:
    r"""Return the text before the first tag, and then each speaker with their text, unchanged.

    >>> split_at_speakers("\n\nHuman: Hi\n\nAssistant:  Hello", TRANSCRIPT)
    ('', [('Human', 'Hi'), ('Assistant', ' Hello')])

    Args:
        marks: the tag before a turn; its group `speaker` names the speaker.
    """
    return split_at_marks(text, list(marks.finditer(text)))


def split_at_marks(text: str, marks: list[re.Match[str]]) -> tuple[str, list[tuple[str, str]]]:
    """Split a text like `split_at_speakers`, at given matches."""
    ends = [mark.start() for mark in marks] + [len(text)]
    return text[: ends[0]], [(mark["speaker"], text[mark.end() : end]) for mark, end in zip(marks, ends[1:])]


def is_transcript(text: Any) -> bool:
    """Return True if a text is a conversation between Human and Assistant."""
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def transcript_turns(text: Any, where: str) -> list[Message]:
    r"""Return the turns of a conversation between Human and Assistant.

    >>> transcript_turns("\n\nHuman: Hi\n\nAssistant: Hello", "chosen")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{where} holds {kind_of(text)}, expected a text")
    before, tagged_texts = split_at_speakers(text, TRANSCRIPT)
    if before.strip() or not tagged_texts:
        raise Malformed("not_a_transcript", f"{where} doesn't begin with Human: or Assistant:")
    return [{"role": role_of(speaker), "content": content} for speaker, content in tagged_texts]
