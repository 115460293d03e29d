"""A raw row to a canonical one: by the columns that its layout names, or by the `fields` that the config maps.

    messages          messages: [{role, content}, ...]
    sharegpt          conversations: [{from, value}, ...]
    alpaca            instruction, input, output (or response)
    prompt-response   prompt or question with response or completion; question with answer
    pairs             prompt, question or instruction (+ input) with chosen and rejected, each a text or turns;
                      or chosen and rejected as whole conversations, whose shared beginning is the prompt
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike

`answer` and `task` columns are taken along wherever they aren't the response itself, and a `system` column is the
system turn. A null column counts as absent. Costs microseconds per row.
"""

import re
from collections.abc import Callable
from typing import Any

from snaketune.config.corpora import Fields
from snaketune.corpus.pairs import pair, transcript_pair
from snaketune.corpus.roles import check
from snaketune.corpus.rows import EXCERPT_LENGTH, Conversation, Malformed, Row
from snaketune.corpus.turns import completion_turns, kind_of, plain_text, prompt_turns, turns_of

NO_INPUT = re.compile(r"\s*<no[ _-]?input>\s*", re.IGNORECASE)
COLUMN_IN_TEMPLATE = re.compile(r"{([^{}]+)}")
PROMPT_AND_RESPONSE = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "response"),
    ("question", "completion"),
    ("question", "answer"),
)


def canonical(raw: dict[str, Any], *, kind: str, layout: str, fields: Fields) -> tuple[str, Row]:
    """The layout that `raw` has, or `fields`, and the canonical row.

    Raises:
        Malformed: no layout fits, a column is missing or of the wrong type, the turns make no conversation,
            or a conversation stands where a preference is expected and the other way round.
    """
    if fields.prompt:
        name, row = "fields", _mapped(raw, fields)
    else:
        present = {column: value for column, value in raw.items() if value is not None}
        name = recognise(present) if layout == "auto" else layout
        row = READERS[name](present)
        answer_is_response = name == "prompt-response" and _prompt_and_response(present)[1] == "answer"
        _take_along(raw, row, fields, but_answer=answer_is_response)
    if row.kind != kind:
        hint = "; set layout: alpaca to read its output" if row.kind == "preferences" and "output" in raw else ""
        raise Malformed("wrong_kind", f"the row ({name}) is one of {row.kind}, the corpus holds {kind}{hint}")
    check(row)
    return name, row


def recognise(raw: dict[str, Any]) -> str:
    """The layout whose columns `raw` has; Malformed if there is none.

    >>> recognise({"question": "1 + 1?", "answer": "2"})
    'prompt-response'
    """
    if raw.keys() >= {"chosen", "rejected"}:
        texts = isinstance(raw["chosen"], str) and raw["chosen"].lstrip().startswith("Human:")
        return "transcripts" if texts and not raw.keys() & {"prompt", "question", "instruction"} else "pairs"
    if "messages" in raw:
        return "messages"
    if "conversations" in raw:
        return "sharegpt"
    if "instruction" in raw and raw.keys() & {"output", "response"}:
        return "alpaca"
    if any(raw.keys() >= set(columns) for columns in PROMPT_AND_RESPONSE):
        return "prompt-response"
    raise Malformed("unknown_layout", f"{_columns(raw)}; map them with `fields`")


def _messages(raw: dict[str, Any]) -> Row:
    return Conversation(messages=turns_of(_column(raw, "messages"), "messages"))


def _sharegpt(raw: dict[str, Any]) -> Row:
    return Conversation(messages=turns_of(_column(raw, "conversations"), "conversations"))


def _alpaca(raw: dict[str, Any]) -> Row:
    prompt, notes = _instruction(raw)
    response = "output" if "output" in raw or "response" not in raw else "response"
    turns = [{"role": "user", "content": prompt}, *completion_turns(_column(raw, response), response)]
    return Conversation(messages=turns, notes=notes)


def _prompt_response(raw: dict[str, Any]) -> Row:
    prompt, response = _prompt_and_response(raw)
    turns, notes = prompt_turns(_column(raw, prompt), prompt)
    return Conversation(messages=turns + completion_turns(_column(raw, response), response), notes=notes)


def _pairs(raw: dict[str, Any]) -> Row:
    chosen, rejected = _column(raw, "chosen"), _column(raw, "rejected")
    for prompt in ("prompt", "question"):
        if prompt in raw:
            return pair(raw[prompt], chosen, rejected)
    if "instruction" not in raw:
        return pair(None, chosen, rejected)
    instruction, notes = _instruction(raw)
    row = pair(instruction, chosen, rejected)
    row.notes += notes
    return row


def _transcripts(raw: dict[str, Any]) -> Row:
    return transcript_pair(_column(raw, "chosen"), _column(raw, "rejected"))


READERS: dict[str, Callable[[dict[str, Any]], Row]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt-response": _prompt_response,
    "pairs": _pairs,
    "transcripts": _transcripts,
}


def _mapped(raw: dict[str, Any], fields: Fields) -> Row:
    """A row by `fields` alone: what they don't name isn't read."""
    prompt = _filled(raw, fields.prompt)
    if fields.response:
        turns, notes = prompt_turns(prompt, "prompt")
        row: Row = Conversation(
            messages=turns + completion_turns(_filled(raw, fields.response), "response"), notes=notes
        )
    else:
        row = pair(prompt, _filled(raw, fields.chosen), _filled(raw, fields.rejected))
    if fields.system:
        _begin_with(row, _filled(raw, fields.system))
    row.answer = _label(raw, fields.answer)
    row.task = _label(raw, fields.task)
    return row


def _take_along(raw: dict[str, Any], row: Row, fields: Fields, *, but_answer: bool) -> None:
    """System, answer and task: from where `fields` say, else from the columns of these names."""
    if fields.system:
        _begin_with(row, _filled(raw, fields.system))
    elif raw.get("system") is not None:
        _begin_with(row, raw["system"])
    for name, column in (("answer", fields.answer), ("task", fields.task)):
        if column:
            setattr(row, name, _label(raw, column))
        elif raw.get(name) is not None and not (name == "answer" and but_answer):
            text = plain_text(raw[name])
            if text is None:
                # Nobody said that this column is a label, so that it isn't one is no fault of the row.
                row.notes += (f"{name}_column_not_text",)
            elif text.strip():
                setattr(row, name, text)


def _begin_with(row: Row, system: Any) -> None:
    if system is not None and not isinstance(system, str):
        raise Malformed("wrong_type", f"system holds {kind_of(system)}, expected a text")
    said = row.opening[0] == {"role": "system", "content": system}
    if system and system.strip() and not said:
        row.opening.insert(0, {"role": "system", "content": system})


def _instruction(raw: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Instruction and input as one prompt, and what there is to note."""
    instruction, given = _text(raw, "instruction"), _text(raw, "input") if "input" in raw else ""
    if NO_INPUT.fullmatch(given):
        return instruction, ("noinput_placeholder",)
    return (f"{instruction}\n\n{given}" if given.strip() else instruction), ()


def _prompt_and_response(raw: dict[str, Any]) -> tuple[str, str]:
    for columns in PROMPT_AND_RESPONSE:
        if raw.keys() >= set(columns):
            return columns
    raise Malformed("missing_column", f"neither prompt and response nor question and answer; {_columns(raw)}")


def _label(raw: dict[str, Any], template: str | None) -> str | None:
    if template is None:
        return None
    value = _filled(raw, template)
    if value is not None and not isinstance(value, str):
        raise Malformed("wrong_type", f"{template} holds {kind_of(value)}, expected a text or a number")
    return value if value and value.strip() else None


def _filled(raw: dict[str, Any], template: str) -> Any:
    """The column `template`, a number as text; or the template with its columns filled in."""
    if template in raw:
        value = raw[template]
        text = plain_text(value)
        return value if text is None else text
    if not COLUMN_IN_TEMPLATE.search(template):
        _column(raw, template)
    return COLUMN_IN_TEMPLATE.sub(lambda match: _cell(raw, match[1]), template)


def _cell(raw: dict[str, Any], column: str) -> str:
    value = _column(raw, column)
    text = plain_text(value)
    if text is None:
        raise Malformed("wrong_type", f"{column} holds {kind_of(value)}, expected a text or a number")
    return text


def _text(raw: dict[str, Any], column: str) -> str:
    value = _column(raw, column)
    if not isinstance(value, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(value)}, expected a text")
    return value


def _column(raw: dict[str, Any], column: str) -> Any:
    if column not in raw:
        raise Malformed("missing_column", f"no column {column}, or it is null; {_columns(raw)}")
    return raw[column]


def _columns(raw: dict[str, Any]) -> str:
    return f"the row has {', '.join(raw)}"[:EXCERPT_LENGTH] if raw else "the row has no column that isn't null"
