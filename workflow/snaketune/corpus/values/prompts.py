"""A prompt and its completions as turns: the prompt with its input, context, choices and the turns before it.

The context follows the prompt as a paragraph of its own, unless the prompt or the system text has it already; choices follow
as lines `A. …`. The reasoning of a response precedes it, as `<think>\\n…\\n</think>\\n\\n`.
"""

import re
from typing import TYPE_CHECKING, Any

from snaketune.corpus.rows import Malformed, Message
from snaketune.corpus.values import choices
from snaketune.corpus.values.cells import first_key, is_blank, json_of, kind_of, text_if_number, wrong_type
from snaketune.corpus.values.content import text_of, think_block
from snaketune.corpus.values.roles import Speakers
from snaketune.corpus.values.schema import Column, Values
from snaketune.corpus.values.turns import SPEAKER_KEYS, are_turns, may_be_serialized_turns, turns_of

if TYPE_CHECKING:
    from snaketune.corpus.values.row_file import RowFile

NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)
TITLES, PASSAGES = ("title", "name"), ("text", "content", "contents", "passage", "paragraph_text", "snippet", "body")
# If a text contains the first characters of a context, it contains the context, perhaps with other line breaks.
PREFIX_LENGTH = 200
# Beside these columns, reasoning may be a judge's.
JUDGES = frozenset(
    ("score", "rating", "grade", "label", "verdict", "judge", "judge_model", "critique", "feedback", "kto_tag")
)
THOUGHT_MARKS = ("<think>", "<thinking>", "<reasoning>", "[THINK]")
ADVICE = "name it under `fields`, or under `ignore` if it isn't part of the rows"


def is_context(value: Any) -> bool:
    return not is_blank(value)


def is_thought(value: Any) -> bool:
    """Whether a value is reasoning and not a setting: on, enabled, {"effort": "high"}, "Let's think step by step"."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, str):
        return isinstance(value, list)
    text = value.strip()
    return " " in text.replace("\n", " ") and not (len(text) < 50 and text.lower().startswith("let's think step"))


def is_list(value: Any) -> bool:
    return isinstance(value, list)


PROMPT = Column("prompt", "prompt question query problem instruction inputs input")
PARTS = (
    Column("input", "input", beside="instruction"),
    Column("history", "history", holds=is_list),
    Column("context", "context contexts passage", holds=is_context),
    *choices.COLUMNS,
)
REASONING = (
    Column("reasoning", "reasoning_content chain_of_thought thinking_trajectories", holds=is_thought),
    Column("reasoning", "reasoning thinking cot", holds=is_thought, unless=JUDGES),
)
PART_KEYS = frozenset(("history", "context", "context_before", "choices"))

# The turns of a prompt, those of each completion, and notes.
Exchange = tuple[list[Message], list[list[Message]], tuple[str, ...]]


def exchange(values: Values, completions: dict[str, Any], file: "RowFile") -> Exchange:
    """The prompt of a row with all its parts, and each of its completions."""
    prompt, notes, speakers = values["prompt"], (), file.speakers
    if "input" in values:
        prompt, notes = _with_input(prompt, values["input"])
    if type(prompt) is not str:
        prompt = _of_object(prompt)
    serialized = type(prompt) is not str or (prompt[:1] in "[ \n" and may_be_serialized_turns(prompt))
    answers: list[list[Message]] = []
    for where, value in completions.items():
        if type(value) is str and not serialized:
            if (
                prompt[:2] == value[:2] == '["'
                and "prompt" not in file.stated
                and _are_texts(prompt)
                and _are_texts(value)
            ):
                what = "the prompt and this are lists of texts, perhaps a turn each; write messages, or map both with `fields`"
                raise Malformed("turns_as_text", f"{where}: {what}")
            answers.append([{"role": "assistant", "content": value}])
        else:
            answers.append(completion_turns(value, where, speakers, serialized=serialized))
    turns = turns_of(prompt, "prompt", speakers) if serialized else [{"role": "user", "content": prompt}]
    if not PART_KEYS.isdisjoint(values):
        turns = _with_parts(values, turns, file)
    return turns, answers, notes


def _are_texts(text: str) -> bool:
    """Whether a text is a list of texts as JSON."""
    value = json_of(text)
    return isinstance(value, list) and all(isinstance(item, str | None) for item in value)


def _of_object(prompt: Any) -> Any:
    if isinstance(prompt, dict):
        # A question may be an object with metadata.
        key = next((key for key in ("full_text", "text") if prompt.get(key)), "")
        if key and isinstance(prompt.get("system"), str) and prompt["system"].strip():
            what = f"the prompt holds `{key}` and `system`; map both with `fields`: prompt: COLUMN.{key}, system: COLUMN.system"
            raise Malformed("system_in_prompt", what)
        return prompt[key] if key else prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        return prompt[0]
    return text_if_number(prompt)


def _with_input(instruction: Any, value: Any) -> tuple[str, tuple[str, ...]]:
    instruction, text = text_if_number(instruction), text_if_number(value)
    for where, part in (("instruction", instruction), ("input", text)):
        if not isinstance(part, str):
            raise wrong_type(where, part)
    if NO_INPUT.fullmatch(text):
        return instruction, ("noinput_placeholder",)
    if not text or text.isspace():
        return instruction, ()
    return (f"{instruction}\n\n{text}" if instruction.strip() else text), ()


def _with_parts(values: Values, turns: list[Message], file: "RowFile") -> list[Message]:
    """The turns of a prompt with the turns before it, its context and choices, which its last turn holds."""
    last = turns[-1]["content"]
    # A context without a question is no prompt.
    if last.strip():
        known = [_plain(turn["content"]) for turn in turns]
        known += [_plain(values["system"])] if isinstance(values.get("system"), str) else []
        for key in ("context_before", "context"):
            text = _context(values[key], file.names[key], stated=key in file.stated) if key in values else ""
            if text and not any(_plain(text)[:PREFIX_LENGTH] in elsewhere for elsewhere in known):
                last = f"{text}\n\n{last}" if key == "context_before" else f"{last}\n\n{text}"
        if lines := choices.listed(choices.choices_of(values.get("choices")), last):
            last = f"{last}\n\n{lines}"
        turns[-1] = turns[-1] | {"content": last}
    return (_earlier(values["history"], file.speakers) if "history" in values else []) + turns


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _context(value: Any, where: str, *, stated: bool) -> str:
    if is_blank(value) and not stated:
        return ""
    ambiguous = (
        where == "context"
        and isinstance(value, list)
        and len(value) > 1
        and all(isinstance(item, str) for item in value)
    )
    if may_be_serialized_turns(value) or (value and are_turns(value)) or (ambiguous and not stated):
        what = "passages or earlier turns; name it under `fields`, as context or as history"
        raise Malformed("unread_context", f"{where} holds {what}")
    texts = _texts(value)
    if texts is None:
        raise Malformed("unread_context", f"{where} holds {kind_of(value)}, expected a text or several; {ADVICE}")
    return "\n\n".join(text for text in texts if text.strip())


def _texts(value: Any) -> list[str] | None:
    """The texts of a context: one text, several, passages with titles, titles with sentences; None for anything else."""
    match value:
        case str():
            return [value]
        case {"title": list(titles), "sentences": list(sentences)} if len(titles) == len(sentences):
            return [f"{title}\n{''.join(parts)}" for title, parts in zip(titles, sentences)]
        case {"contexts": list(texts)}:
            return _texts(texts)
        case list():
            passages = [_passage(item) for item in value if item is not None]
            return None if None in passages else passages
    return None


def _passage(item: Any) -> str | None:
    if not isinstance(item, dict):
        return item if isinstance(item, str) else None
    title, text = (
        next((item[key] for key in keys if isinstance(item.get(key), str)), None) for keys in (TITLES, PASSAGES)
    )
    return f"{title}\n{text}" if title and text is not None else text


def _earlier(history: Any, speakers: Speakers) -> list[Message]:
    """The turns before the prompt: pairs of user and assistant texts, or turns.

    >>> _earlier([["Hi", "Hello"]], {})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not history:
        return []
    if not isinstance(history, list) or not all(isinstance(item, (list, dict)) for item in history):
        raise wrong_type("history", history, "turns, or pairs of texts")
    if isinstance(history[0], dict):
        return turns_of(history, "history", speakers)
    turns: list[Message] = []
    for number, texts in enumerate(history, start=1):
        if not isinstance(texts, list) or len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise Malformed("wrong_type", f"history, item {number}, isn't a pair of texts")
        turns += ({"role": role, "content": text} for role, text in zip(("user", "assistant"), texts))
    return turns


def with_reasoning(response: list[Message], value: Any) -> list[Message]:
    """A response with reasoning before it, unless it has some."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if is_blank(value):
        return response
    if isinstance(value, list):
        raise Malformed("unread_reasoning", f"reasoning holds {len(value)} items, expected a text; {ADVICE}")
    text = response[0]["content"]
    block = think_block(value, "reasoning")
    if value.strip() in text or "</think>" in text or text.lstrip().startswith(THOUGHT_MARKS):
        return response
    return [response[0] | {"content": block + text}, *response[1:]]


def completion_turns(value: Any, where: str, speakers: Speakers, *, serialized: bool = False) -> list[Message]:
    """A completion as turns, given as the assistant's text, as {text: …}, as one turn, or as turns.

    Args:
        serialized: whether a text that looks like serialized turns is parsed as turns; else an answer may be such JSON.
    """
    value = text_if_number(value)
    if isinstance(value, str) and not (serialized and may_be_serialized_turns(value)):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, dict):
        if value.get("text") is not None and not first_key(value, SPEAKER_KEYS):
            return [{"role": "assistant", "content": text_of(value["text"], where)}]
        value = [value]
    return turns_of(value, where, speakers)
