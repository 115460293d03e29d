"""Marks of a chat template that nearly all rows of a file share, so that no text is templated twice.

A statistic over the rows instead of a list of templates: if nearly all prompts have one opening and one closing, or nearly all
answers one ending, and these hold marks (`<…>`, `[…]`, `### X`, a word and a colon), the run stops with the shared texts, and
the entry that removes or keeps them (`frame`).
"""

import math
import re
from collections.abc import Collection, Iterable
from os.path import commonprefix
from typing import Any

from snaketune.config.corpus_sources import Frame, Source
from snaketune.corpus.excerpts import excerpt, printable
from snaketune.corpus.rows import Conversation, Malformed, Message, Row
from snaketune.corpus.values.cells import wrong_type
from snaketune.errors import SnaketuneError

# The share of the texts that have a shared beginning or end, the rows that are compared, and the longest shared text.
NEARLY_ALL, COMPARED, LONGEST = 0.9, 1000, 4000
ROLE = "system|user|human|question|instruction|input|assistant|answer|response|output|model|bot|ai|gpt"
BRACKETS = rf"(?:<{{1,2}}[^<>\n]{{1,40}}>{{1,2}}|\[[^\[\]\n]{{1,30}}\])(?:\s*(?:{ROLE})\b:?(?=[\s<]|\Z))?"
ROLE_HEADING = rf"#{{2,4}} ?(?:{ROLE})\b:?"
# A tag in brackets, with the role that follows it in a line of its own; a heading; or a word and a colon.
MARK = re.compile(
    rf"{BRACKETS}|{ROLE_HEADING}|(?:\A|(?<=\n))#{{1,4}} ?\w[\w ]{{0,20}}(?::|(?=\n|\Z))"
    r"|(?:\A|(?<=\s)|(?<=[>\]]))\w{1,20}[:：]",
    re.IGNORECASE,
)
# Marks that aren't instructions, in a text that holds both.
ROLE_MARK = re.compile(rf"{BRACKETS}|{ROLE_HEADING}|(?:\A|(?<=\s))(?:{ROLE}):", re.IGNORECASE)
# Marks with nothing but blanks between them.
MARKS = re.compile(rf"\s*(?:(?:{MARK.pattern})\s*)+", re.IGNORECASE)
OPENS_USER = re.compile(r"(?<![a-z])(?:user|human|question|instruction|input)(?![a-z])|\[INST\]", re.IGNORECASE)
OPENS_ANSWER = re.compile(
    r"(?<![a-z])(?:assistant|answer|response|output|model|chatbot|bot|ai|gpt)(?![a-z])|\[/INST\]", re.IGNORECASE
)
# A heading that closes a prompt is a mark also where prompts have different openings.
CLOSING_HEADING = re.compile(rf"\s*{ROLE_HEADING}\s*\Z", re.IGNORECASE)
HEADING = re.compile(rf"^{ROLE_HEADING}", re.IGNORECASE | re.MULTILINE)
# Alpaca's parts of a prompt, within a frame that ends with a heading.
INSTRUCTION = re.compile(r"^#{2,4} ?instruction:?[ \n]*", re.IGNORECASE | re.MULTILINE)
INPUT = re.compile(r"\n+#{2,4} ?input:? ?\n*", re.IGNORECASE)
END_TAG = re.compile(r"\s*(<[^<>\n]{1,40}>)\s*\Z")
# What Llama 3.1's template writes by itself.
DATES = re.compile(r"Cutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n+")
THINK = "<think>"
# The end of a call as canonical rows have it.
CALL_END = "</tool_call>"


def framed_exchange(text: Any, where: str, frame: Frame) -> list[Message]:
    """A whole conversation in one text as its last answer, and all before it as the user's turn, which `strip_frame` splits."""
    if not isinstance(text, str):
        raise wrong_type(where, text)
    prompt, after, answer = text.rstrip().rpartition(frame.after) if frame.after else ("", "", "")
    if not (after and prompt.startswith(frame.before)):
        raise Malformed("not_a_dialogue", f"{where} doesn't begin with the frame's `before`, or has no `after`")
    return [{"role": "user", "content": prompt + after}, {"role": "assistant", "content": answer}]


def frame_of_whole(texts: Iterable[str]) -> Frame | None:
    """The frame of whole conversations, each in one text; None unless nearly all begin with marks that open a user's turn,
    then have the same marks before the answer, and are split by these."""
    compared = {text.rstrip() for text in texts}
    before = _with_marks(_shared(compared), opens=True)
    if len(compared) < 2 or not before or OPENS_ANSWER.search(_opener(before)):
        return None
    groups = (MARKS.finditer(text, len(before)) for text in compared)
    between = [next((marks[0] for marks in found if OPENS_ANSWER.search(marks[0])), "") for found in groups]
    # Beyond the marks, answers may begin alike.
    after = _shared(between)
    if not OPENS_ANSWER.search(after):
        return None
    answer_end = _with_marks(_shared(compared, ends=True))
    frame = Frame(before=before, after=after, answer_end=answer_end, system=_instructions(before))
    return frame if sum(_splits(text, frame) for text in compared) >= NEARLY_ALL * len(compared) else None


def _splits(text: str, frame: Frame) -> bool:
    try:
        strip_frame(Conversation(messages=framed_exchange(text, "the text", frame)), frame)
    except Malformed:
        return False
    return True


def _earlier_answers(prompt: str, before: str, after: str) -> list[str]:
    opener = _opener(before)
    if not (opener and after and prompt.endswith(after)):
        return []
    return [part.partition(opener)[0].rstrip() for part in prompt[len(before) : -len(after)].split(after)[1:]]


def _opener(before: str) -> str:
    """The marks at the end of a frame's beginning that open a user's turn; "" if it ends with a text."""
    groups = list(MARKS.finditer(before))
    if not groups or groups[-1].end() < len(before):
        return ""
    marks = list(MARK.finditer(before, groups[-1].start()))
    first = next((mark for mark in reversed(marks) if OPENS_USER.search(mark[0])), marks[0])
    return before[first.start() :]


def _instructions(before: str) -> str:
    """What stands between the marks of a beginning, of which the last opens the user's turn."""
    texts = before[: max((mark.start() for mark in MARK.finditer(before)), default=0)]
    return re.sub(r"\n{2,}", "\n", ROLE_MARK.sub("\n", DATES.sub("", texts))).strip()


class SharedFrame:
    """The texts of one file's rows that are compared, and what they share."""

    def __init__(self, source: Source):
        self.source, self.rows = source, 0
        self.prompts: set[str] = set()
        self.answers: set[str] = set()

    def add(self, row: Row) -> None:
        """Compare a row that is used, unless enough have been."""
        if self.source.frame is not None or self.rows == COMPARED:
            return
        self.rows += 1
        users = [turn["content"] for turn in row.opening if turn["role"] == "user"]
        if users:
            self.prompts.add(users[-1])
        last = [getattr(row, column)[-1] for column in row.columns[-2:]]
        answers = (turn["content"] for turn in last if turn["role"] == "assistant")
        self.answers.update(text for text in answers if not text.endswith(CALL_END))

    @property
    def frame(self) -> Frame | None:
        """What nearly all rows share and holds marks; None if they share nothing of that kind."""
        before, after = _with_marks(_shared(self.prompts), opens=True), _with_marks(_shared(self.prompts, ends=True))
        if not (after and (before or CLOSING_HEADING.match(after))):
            before = after = ""
        # The answers of earlier exchanges within prompts may have an end that the rows' own answers lack.
        earlier = {answer for prompt in self.prompts for answer in _earlier_answers(prompt, before, after)}
        answer_end = _with_marks(_shared(self.answers, ends=True)) or _with_marks(_shared(earlier, ends=True))
        shared = {"before": before, "after": after, "answer_end": answer_end, "system": _instructions(before)}
        return Frame(**shared) if after or answer_end else None

    def check(self, file: str) -> None:
        """Raise SnaketuneError with the entries to paste if nearly all rows share a frame."""
        if self.source.frame is not None or (frame := self.frame) is None:
            return
        shared = frame.model_dump(exclude_defaults=True)
        lines = [
            f"{file}: nearly all rows share texts that look like marks of a chat template, and the tokenizer's template would "
            "write its own around them:",
            *(f"  {key}: {excerpt(text)}" for key, text in shared.items()),
            "To remove them, the source is:",
            self.source.entry(frame=shared),
            "If they belong to the texts, add `frame: keep` to the source instead.",
        ]
        raise SnaketuneError("\n".join(map(printable, "\n".join(lines).split("\n"))))


def strip_frame(row: Row, frame: Frame) -> None:
    """Remove a frame from the turns of a row, in place; Malformed if one of its marks is left."""
    framed = _split_turns(row, frame)
    marks = {mark.strip() for text in (frame.before, frame.after, frame.answer_end) for mark in MARK.findall(text)}
    turns: dict[int, Message] = {id(turn): turn for turn in row.turns}
    for turn in turns.values():
        text = turn["content"]
        if turn["role"] == "user" and text.startswith(frame.before) and text.endswith(frame.after):
            text, framed = text[len(frame.before) : len(text) - len(frame.after)], True
            if CLOSING_HEADING.match(frame.after):
                if not frame.before and (instruction := INSTRUCTION.search(text)):
                    preamble, text = text[: instruction.start()].strip(), text[instruction.end() :]
                    if preamble:
                        row.opening.insert(0, {"role": "system", "content": preamble})
                text = "\n\n".join(part for part in INPUT.split(text, maxsplit=1) if part.strip())
            if frame.after and (heading := HEADING.search(text)):
                raise Malformed("baked_in_template", f"a text has the mark {excerpt(heading[0])} within the frame")
        elif turn["role"] == "assistant":
            text = text.removesuffix(frame.answer_end)
            if frame.after:
                # After `ASSISTANT:`, the space belongs to the frame; reasoning that the frame opens belongs to the answer.
                text = text if frame.after[-1].isspace() else text.removeprefix(" ")
                opened = THINK in frame.after and "</think>" in text and THINK not in text
                text = f"{THINK}\n{text}" if opened else text
        turn["content"] = text
        if left := next((mark for mark in marks if mark != THINK and mark in text), None):
            raise Malformed("baked_in_template", f"a text has the mark {excerpt(left)} of the frame beside its ends")
    if framed and frame.system:
        row.opening.insert(0, {"role": "system", "content": frame.system})


def _split_turns(row: Row, frame: Frame) -> bool:
    r"""Split the first user's turn, in place, if earlier exchanges are within the frame; return whether there were any.

    `\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:` is user a, assistant b, user c.
    """
    turn = next((turn for turn in row.opening if turn["role"] == "user"), {"content": ""})
    text, opener = turn["content"], _opener(frame.before)
    lead = frame.before.removesuffix(opener).strip()
    if not (opener and frame.after and text.startswith(frame.before) and text.endswith(frame.after)):
        return False
    question, *parts = text[len(frame.before) : len(text) - len(frame.after)].split(frame.after)
    turns: list[Message] = [turn | {"content": question}]
    for part in parts:
        answer, _, question = part.partition(opener)
        # Before a question may be what is before the first one, such as `<s>`.
        for end in (lead, frame.answer_end.strip()):
            answer = answer.rstrip().removesuffix(end).rstrip()
        if end := END_TAG.search(answer):
            if end[1] not in frame.after:
                what = f"an answer within the frame ends with {excerpt(end[1])}; state it as the frame's `answer_end`"
                raise Malformed("baked_in_template", what)
            answer = answer[: end.start()]
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    if not parts:
        return False
    if not all(turn["content"].strip() for turn in turns):
        raise Malformed("baked_in_template", "the turns within the frame don't alternate")
    position = next(number for number, other in enumerate(row.opening) if other is turn)
    row.opening[position : position + 1] = turns
    return True


def _shared(texts: Collection[str], *, ends: bool = False) -> str:
    """The longest beginning (or end) of nearly all texts; "" if there are fewer than two."""
    # Sorted, texts with one beginning stand together: it is that of the first and the last of them.
    ordered = sorted(text[: -LONGEST - 1 : -1] if ends else text[:LONGEST] for text in texts)
    least = max(2, math.ceil(NEARLY_ALL * len(ordered)))
    groups = zip(ordered, ordered[least - 1 :])
    shared = max((commonprefix(group) for group in groups), key=len, default="")  # noqa: RUF071 (of texts)
    return shared[::-1] if ends else shared


def _with_marks(shared: str, *, opens: bool = False) -> str:
    r"""The part of a shared text up to its last mark, or from its first mark on if it ends with one; else "".

    >>> _with_marks("Be brief.\n\nUSER: Name a ", opens=True), _with_marks("?\nASSISTANT:"), _with_marks(" (see: b)")
    ('Be brief.\n\nUSER: ', '\nASSISTANT:', '')
    """
    marks = list(MARK.finditer(shared))
    if opens:
        end = marks[-1].end() if marks else 0
        return shared[: end + len(shared[end:]) - len(shared[end:].lstrip())] if marks else ""
    if not marks or shared[marks[-1].end() :].strip():
        return ""
    return shared[len(shared[: marks[0].start()].rstrip()) :]
