"""A prompt and its response from the columns in which data sets have them, with the turns before them."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.content import CALLS_COLUMNS, column_of_calls, text_of
from snaketune.corpus.layouts.messages import SPEAKER_KEYS, may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.prompt_columns import add_to_prompt, add_to_response, letter_of
from snaketune.corpus.layouts.roles import Speakers
from snaketune.corpus.layouts.templates import strip_end_of_turn, strip_template
from snaketune.corpus.layouts.values import (
    Raw,
    column_of,
    columns_of,
    first_key,
    plain_text,
    text_if_number,
    wrong_type,
)
from snaketune.corpus.rows import Malformed, Message

PROMPT_AND_RESPONSE = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "response"),
    ("question", "completion"),
    # Before the answer, which is the checkable part of the solution.
    ("question", "solution"),
    ("question", "answer"),
    ("question", "answerKey"),
    ("query", "response"),
    ("query", "answer"),
    ("query", "answers"),
    ("question", "ground_truth"),
    ("input", "output"),
    ("input", "target"),
    ("inputs", "targets"),
    ("problem", "solution"),
    # Last, because an answer beside these pairs is the checkable part of their response.
    ("prompt", "answer"),
    ("query", "completion"),
)
INSTRUCTION_RESPONSES = ("output", "response", "completion")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
# Columns that may hold the conversation that chosen and rejected continue.
PROMPT_TURNS = (*CONVERSATION_COLUMNS, "trajectory", "context")
NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)

# The turns of a prompt, those of its response, and notes.
Exchange = tuple[list[Message], list[Message], tuple[str, ...]]


@lru_cache(maxsize=4096)
def prompt_and_response(columns: tuple[str, ...]) -> tuple[str, str] | None:
    return next((pair for pair in PROMPT_AND_RESPONSE if set(pair) <= set(columns)), None)


def instruction_exchange(raw: Raw, speakers: Speakers) -> Exchange:
    prompt, notes = instruction_of(raw)
    column = next((column for column in INSTRUCTION_RESPONSES if column in raw), "output")
    turns, (response,), stripped = exchange(prompt, {column: column_of(raw, column)}, speakers)
    return _with_columns(raw, turns, response, stripped + notes, speakers)


def question_exchange(raw: Raw, speakers: Speakers) -> Exchange:
    """Return prompt, response and notes from the columns in `PROMPT_AND_RESPONSE`."""
    columns = prompt_and_response(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"expected prompt and response, or question and answer; {columns_of(raw)}")
    question, answer = (raw[column] for column in columns)
    # A boolean is the answer to a yes-or-no question.
    is_truth = isinstance(answer, bool) and columns[1] == "answer"
    answer = plain_text(answer) if is_truth else letter_of(raw, answer)
    if columns[1] in CALLS_COLUMNS:
        answer = column_of_calls(answer, columns[1])
        if isinstance(question, list) and len(question) == 1 and isinstance(question[0], list):
            # A conversation inside another list.
            question = question[0]
    turns, (response,), notes = exchange(question, {columns[1]: answer}, speakers)
    return _with_columns(raw, turns, response, notes, speakers)


def _with_columns(
    raw: Raw, prompt: list[Message], response: list[Message], notes: tuple[str, ...], speakers: Speakers
) -> Exchange:
    add_to_prompt(raw, prompt, response[0]["content"])
    add_to_response(raw, response)
    return earlier_turns(raw, speakers) + prompt, response, notes


def conversation_exchange(raw: Raw, column: str, speakers: Speakers) -> Exchange:
    """Split a conversation into its last turn, which must be the assistant's, and all turns before it."""
    turns = turns_of(column_of(raw, column), column, speakers)
    if turns[-1]["role"] != "assistant":
        raise Malformed(f"ends_on_{turns[-1]['role']}", f"the last turn of {column} isn't the assistant's")
    if len(turns) == 1:
        raise Malformed("turn_out_of_order", f"{column} holds only an answer")
    return turns[:-1], turns[-1:], ()


def exchange(
    prompt: Any, completions: Mapping[str, Any], speakers: Speakers
) -> tuple[list[Message], list[list[Message]], tuple[str, ...]]:
    """Return the turns of a prompt, those of each completion, and notes.

    A chat template around the prompt is removed, and then also the end-of-turn strings of the completions.
    """
    prompt = text_if_number(prompt)
    serialized = type(prompt) is not str or may_be_serialized_turns(prompt)
    answers = [completion_turns(value, where, speakers, serialized=serialized) for where, value in completions.items()]
    if serialized:
        return turns_of(prompt, "prompt", speakers), answers, ()
    stripped = strip_template(prompt, whole_prompt=True)
    if stripped is None:
        return [{"role": "user", "content": prompt}], answers, ()
    turns, note = stripped
    notes = (note,)
    for answer in answers:
        text = strip_end_of_turn(answer[-1]["content"])
        if text != answer[-1]["content"]:
            answer[-1]["content"], notes = text, (note, "removed_end_of_turn")
        if not prompt[-1].isspace():
            # The space after "ASSISTANT:" belongs to the template.
            answer[0]["content"] = answer[0]["content"].removeprefix(" ")
    return turns, answers, notes


def completion_turns(value: Any, where: str, speakers: Speakers, *, serialized: bool = False) -> list[Message]:
    """Return a completion as turns, given as the assistant's text, as {text: …}, as one turn, or as turns.

    Args:
        serialized: whether a text that looks like serialized turns is parsed as turns; else an answer may be such JSON.
    """
    value = text_if_number(value)
    if isinstance(value, str) and not (serialized and may_be_serialized_turns(value)):
        return [{"role": "assistant", "content": value}]
    if value == []:
        raise Malformed("empty_completion", f"{where} has no turns")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        what = f"{where} holds a list of texts, expected one text or turns; choose one, or write a row for each"
        raise Malformed("wrong_type", what)
    if isinstance(value, dict):
        if value.get("text") is not None and not first_key(value, SPEAKER_KEYS):
            return [{"role": "assistant", "content": text_of(value["text"], where)}]
        value = [value]
    return turns_of(value, where, speakers)


def instruction_of(raw: Raw) -> tuple[str, tuple[str, ...]]:
    """Return an instruction with its input as one prompt, and notes."""
    instruction = _text(raw, "instruction")
    input_text = _text(raw, "input") if "input" in raw else ""
    if NO_INPUT.fullmatch(input_text):
        return instruction, ("noinput_placeholder",)
    if not input_text or input_text.isspace():
        return instruction, ()
    if strip_template(instruction):
        raise Malformed("baked_in_template", "the instruction is in a chat template, and the input outside of it")
    return (f"{instruction}\n\n{input_text}" if instruction.strip() else input_text), ()


def _text(raw: Raw, column: str) -> str:
    text = text_if_number(column_of(raw, column))
    if not isinstance(text, str):
        raise wrong_type(column, text)
    return text


def earlier_turns(raw: Raw, speakers: Speakers) -> list[Message]:
    """Return the turns before the prompt, from `history`: pairs of user and assistant texts, or turns.

    >>> earlier_turns({"history": [["Hi", "Hello"]]}, {})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not raw.get("history"):
        return []
    history = raw["history"]
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


def prompt_of(raw: Raw) -> tuple[Any, tuple[str, ...]]:
    """Return the text or turns of the column that names the prompt of a pair, None without one; and notes."""
    for column in ("prompt", "question"):
        if column in raw:
            value = raw[column]
            # A question may be an object with metadata.
            return (value.get("full_text") or value.get("text") or value if isinstance(value, dict) else value), ()
    return instruction_of(raw) if "instruction" in raw else (None, ())


def prompt_conversation(raw: Raw, prompt: Any, speakers: Speakers) -> Any:
    """Return the prompt that completions answer: `prompt`, or the conversation in another column that ends on it.

    Returns:
        A text or turns; None if no column holds any.
    """
    for column in PROMPT_TURNS:
        value = raw.get(column)
        if prompt is None:
            continues = isinstance(value, list) or may_be_serialized_turns(value)
        else:
            continues = isinstance(value, list) and isinstance(prompt, str) and _ends_on(value, prompt, speakers)
        if continues:
            return turns_of(raw[column], column, speakers)
    if prompt is None:
        others = ("query", "input", *(("history",) if isinstance(raw.get("history"), str) else ()))
        return next((raw[column] for column in others if column in raw), None)
    return prompt


def _ends_on(conversation: Any, prompt: str, speakers: Speakers) -> bool:
    try:
        last = turns_of(conversation, "", speakers)[-1]
    except Malformed:
        return False
    return last["role"] == "user" and last["content"].strip() == prompt.strip()
