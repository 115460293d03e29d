"""A prompt and its response from the columns in which data sets have them, with the turns before them."""

import re
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.calls import COLUMNS as CALLS_COLUMNS
from snaketune.corpus.layouts.calls import calls_as_text
from snaketune.corpus.layouts.choices import letter_of
from snaketune.corpus.layouts.columns import column_of, columns_of, plain_text, text_if_number
from snaketune.corpus.layouts.completions import exchange
from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.context_columns import add_to_prompt, add_to_response
from snaketune.corpus.layouts.messages import may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.preference_pairs import pair_of_completions
from snaketune.corpus.layouts.roles import NO_SPEAKERS, Speakers
from snaketune.corpus.layouts.strip_templates import strip_template
from snaketune.corpus.layouts.templates import may_be_templated
from snaketune.corpus.rows import Malformed, Message, Preference

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
)
INSTRUCTION_RESPONSES = ("output", "response", "completion")
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
# Columns that may hold the conversation that chosen and rejected continue.
PROMPT_TURNS = (*CONVERSATION_COLUMNS, "trajectory", "context")
NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)

Raw = dict[str, Any]
Exchange = tuple[list[Message], list[Message], tuple[str, ...]]


@lru_cache(maxsize=4096)
def prompt_and_response(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the columns that hold a prompt and its response, or None."""
    return next((pair for pair in PROMPT_AND_RESPONSE if set(pair) <= set(columns)), None)


def instruction_exchange(raw: Raw, speakers: Speakers = NO_SPEAKERS) -> Exchange:
    """Return prompt, response and notes of an instruction."""
    prompt, notes = instruction_of(raw)
    response = next((column for column in INSTRUCTION_RESPONSES if column in raw), "output")
    turns, (answer,), unwrapped_ = exchange(prompt, {response: column_of(raw, response)}, speakers)
    add_to_prompt(raw, turns, answer[0]["content"])
    add_to_response(raw, answer)
    return earlier_turns(raw, speakers) + turns, answer, unwrapped_ + notes


def question_exchange(raw: Raw, speakers: Speakers = NO_SPEAKERS) -> Exchange:
    """Return prompt, response and notes from the columns in `PROMPT_AND_RESPONSE`."""
    columns = prompt_and_response(tuple(raw))
    if columns is None:
        raise Malformed("missing_column", f"expected prompt and response, or question and answer; {columns_of(raw)}")
    prompt, response = columns
    question, answer = raw[prompt], raw[response]
    if isinstance(answer, bool) and response == "answer":
        # The answer to a yes-or-no question.
        answer = plain_text(answer)
    elif isinstance(answer, int):
        answer = letter_of(raw, answer)
    if response in CALLS_COLUMNS:
        answer = calls_as_text(answer, response)
        # A conversation inside another list.
        question = (
            question[0]
            if isinstance(question, list) and len(question) == 1 and isinstance(question[0], list)
            else question
        )
    if (
        type(question) is str
        and type(answer) is str
        and not may_be_templated(question)
        and not may_be_serialized_turns(question)
    ):
        turns, completion, notes = (
            [{"role": "user", "content": question}],
            [{"role": "assistant", "content": answer}],
            (),
        )
    else:
        turns, (completion,), notes = exchange(question, {response: answer}, speakers)
    add_to_prompt(raw, turns, completion[0]["content"])
    add_to_response(raw, completion)
    return earlier_turns(raw, speakers) + turns, completion, notes


def conversation_exchange(raw: Raw, column: str, speakers: Speakers = NO_SPEAKERS) -> Exchange:
    """Split a conversation into its last turn, which must be the assistant's, and all turns before it."""
    turns = turns_of(column_of(raw, column), column, speakers)
    if turns[-1]["role"] != "assistant":
        raise Malformed(f"ends_on_{turns[-1]['role']}", f"the last turn of {column} isn't the assistant's")
    if len(turns) == 1:
        raise Malformed("turn_out_of_order", f"{column} holds only an answer")
    return turns[:-1], turns[-1:], ()


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


def earlier_turns(raw: Raw, speakers: Speakers = NO_SPEAKERS) -> list[Message]:
    """Return the turns before the prompt, from `history`: pairs of user and assistant texts, or turns.

    >>> earlier_turns({"history": [["Hi", "Hello"]]})
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not raw.get("history"):
        return []
    history = raw["history"]
    if not isinstance(history, list) or not all(isinstance(item, (list, dict)) for item in history):
        raise Malformed("wrong_type", f"history holds {kind_of(history)}, expected turns, or pairs of texts")
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


def pair_with_context(
    raw: Raw, prompt: Any, chosen: Any, rejected: Any, speakers: Speakers = NO_SPEAKERS
) -> Preference:
    """Return a pair of completions with the context and history that its row has for the prompt.

    Args:
        prompt: the value from `prompt_of`.
    """
    row = pair_of_completions(prompt_conversation(raw, prompt, speakers), chosen, rejected, speakers)
    add_to_prompt(raw, row.prompt, row.chosen[0]["content"])
    if not isinstance(raw.get("history"), str) or prompt is not None:
        row.prompt[:0] = earlier_turns(raw, speakers)
    return row


def prompt_conversation(raw: Raw, prompt: Any, speakers: Speakers = NO_SPEAKERS) -> Any:
    """Return the prompt that completions answer: `prompt`, or the conversation in another column that ends on it.

    Args:
        prompt: the value from `prompt_of`.
    Returns:
        A text or turns; None if no column holds any.
    """
    for column in PROMPT_TURNS:
        if isinstance(raw.get(column), list) or (prompt is None and may_be_serialized_turns(raw.get(column))):
            if prompt is None:
                return turns_of(raw[column], column, speakers)
            if isinstance(prompt, str) and _ends_on(raw.get(column), prompt, speakers):
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


def _text(raw: Raw, column: str) -> str:
    value = text_if_number(column_of(raw, column))
    if not isinstance(value, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(value)}, expected a text")
    return value
