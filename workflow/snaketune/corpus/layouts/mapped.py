"""Rows read by the `fields` of the config, and the labels of rows in any layout."""

import re
from operator import itemgetter
from typing import Any

from snaketune.config.corpus_sources import Fields, Source
from snaketune.corpus.layouts.content import text_of
from snaketune.corpus.layouts.exchanges import exchange
from snaketune.corpus.layouts.messages import turns_of
from snaketune.corpus.layouts.pairs import pair_of_values, rated_pairs
from snaketune.corpus.layouts.prompt_columns import (
    MAPPED_CONTEXT,
    MAPPED_REASONING,
    add_to_prompt,
    add_to_response,
    letter_of,
)
from snaketune.corpus.layouts.tools import are_offered_in, may_be_functions, tools_of
from snaketune.corpus.layouts.unpaired import unpaired_row
from snaketune.corpus.layouts.values import Raw, column_of, json_of, plain_text, wrong_type
from snaketune.corpus.layouts.vendor_turns import messages_of_field
from snaketune.corpus.rows import Conversation, Malformed, Outcome, Preference, Row

SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
TOOLS_COLUMNS = ("tools", "functions", "function")
LABELS = frozenset((*SYSTEM_COLUMNS, *TOOLS_COLUMNS, "answer", "task"))
SYSTEM_TAG = re.compile(r"\A\s*SYSTEM:\s*")
COLUMN_IN_TEMPLATE = re.compile(r"{([^{}]+)}")


def kind_of_fields(fields: Fields) -> str:
    """The layout whose kinds of corpora the mapped columns suit."""
    if fields.label:
        return "unpaired"
    return "prompt-response" if fields.response or fields.conversation else "rated" if fields.answers else "pairs"


def map_fields(raw: Raw, source: Source) -> list[Outcome]:
    """Read a row by `fields` alone; other columns aren't read."""
    fields, speakers = source.fields, source.speakers
    prompt = _filled(raw, fields.prompt)
    if fields.answers:
        rated = {"prompt": prompt, "completions": _listed(raw, fields.answers), "ratings": _listed(raw, fields.ratings)}
        outcomes = rated_pairs(rated, source)
        for row in outcomes:
            if isinstance(row, Preference):
                add_to_prompt(_context(raw, fields), row.prompt)
                _add_mapped_labels(raw, row, fields)
        return outcomes
    row: Row
    context = _context(raw, fields)
    if fields.label:
        completion = {
            "prompt": prompt,
            "completion": _filled(raw, fields.response),
            "label": column_at(raw, fields.label),
        }
        row = unpaired_row(completion, speakers)
        add_to_prompt(context, row.prompt)
        add_to_response(context, row.completion)
    elif fields.response:
        turns, (answer,), notes = exchange(prompt, {"response": _filled(raw, fields.response)}, speakers)
        add_to_prompt(context, turns)
        add_to_response(context, answer)
        row = Conversation(messages=turns + answer, notes=notes)
    else:
        row = pair_of_values(prompt, _filled(raw, fields.chosen), _filled(raw, fields.rejected), speakers)
        add_to_prompt(context, row.prompt)
    _add_mapped_labels(raw, row, fields)
    return [row]


def _add_mapped_labels(raw: Raw, row: Row, fields: Fields) -> None:
    if fields.system:
        _prepend_system(row, _filled(raw, fields.system))
    row.tools = tools_of(_filled(raw, fields.tools), fields.tools) if fields.tools else None
    row.answer, row.task = _label(raw, fields.answer), _label(raw, fields.task)


def _listed(raw: Raw, columns: tuple[str, ...]) -> list[Any]:
    """The values of several columns, or the list in one."""
    values = [column_at(raw, column) for column in columns]
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def joined_messages(raws: list[tuple[int, Raw]], source: Source) -> list[Outcome]:
    """Read rows of one message each as conversations: for the last row of a conversation the conversation, for others None.

    Args:
        raws: the rows of a file, each with its number.
    """
    fields, outcomes = source.fields, [None] * len(raws)
    conversations: dict[str, list[tuple[Any, int, Raw]]] = {}
    for position, (number, raw) in enumerate(raws):
        try:
            key = _filled(raw, fields.conversation)
            order = column_at(raw, fields.order) if fields.order else number
            if not isinstance(order, int | float | str) or not isinstance(key, str):
                raise wrong_type(
                    fields.order or fields.conversation, order if fields.order else key, "a text or a number"
                )
            conversations.setdefault(key, []).append((order, position, raw))
        except Malformed as error:
            outcomes[position] = error
    for messages in conversations.values():
        last = messages[-1][1]
        try:
            if len({isinstance(order, str) for order, _, _ in messages}) > 1:
                raise Malformed("wrong_type", f"{fields.order} holds texts and numbers in one conversation")
            messages.sort(key=itemgetter(0))
            turns = [
                {"role": _filled(raw, fields.role), "content": column_at(raw, fields.content)} for *_, raw in messages
            ]
            row = Conversation(messages=turns_of(turns, fields.content, source.speakers))
            _add_mapped_labels(messages[-1][2], row, fields)
            outcomes[last] = row
        except Malformed as error:
            outcomes[last] = error
    return outcomes


def rename_columns(raw: Raw, fields: Fields) -> Raw:
    """Rename the columns that `fields` map to conversation, context and reasoning, so that layouts recognise them."""
    values = {"messages": messages_of_field(_filled(raw, fields.messages))} if fields.messages else {}
    values |= _context(raw, fields)
    if not values:
        return raw
    columns = {fields.messages, fields.context, fields.reasoning}
    return {column: value for column, value in raw.items() if column not in columns} | values


def _context(raw: Raw, fields: Fields) -> Raw:
    named = ((MAPPED_CONTEXT, fields.context), (MAPPED_REASONING, fields.reasoning))
    return {name: _filled(raw, column) for name, column in named if column}


def add_row_labels(raw: Raw, row: Row, fields: Fields, *, skip_answer: bool) -> None:
    """Set system turn, tools, answer and task of a row: from the columns that `fields` map, else from columns of these names.

    Args:
        skip_answer: whether `answer` is the response and no label.
    """
    _prepend_system(row, system_of(raw, fields))
    row.tools = tools_in_row(raw, fields)
    if row.tools and are_offered_in(row.tools, row.opening[0]):
        # A chat template would write them again.
        row.tools = None
        row.notes += ("tools_in_system_turn",)
    for name, column in (("answer", fields.answer), ("task", fields.task)):
        if column:
            setattr(row, name, _label(raw, column))
        elif raw.get(name) is not None and not (name == "answer" and skip_answer):
            text = plain_text(letter_of(raw, raw[name]) if name == "answer" else raw[name])
            if text is None:
                # The config doesn't map this column, so an unsuitable value isn't an error.
                row.notes += (f"{name}_column_not_text",)
            elif text.strip():
                setattr(row, name, text)


def system_of(raw: Raw, fields: Fields) -> Any:
    """Return the system text: by `fields`, else from the first system column that isn't empty."""
    if fields.system:
        return _filled(raw, fields.system)
    return next((raw[column] for column in SYSTEM_COLUMNS if raw.get(column)), None)


def tools_in_row(raw: Raw, fields: Fields) -> str | None:
    """Return the tools that the prompt offers: by `fields`, else from `tools`, or from `functions` if that holds tools."""
    if fields.tools:
        return tools_of(_filled(raw, fields.tools), fields.tools)
    for column in TOOLS_COLUMNS:
        if raw.get(column) and (column == "tools" or may_be_functions(raw.get(column))):
            tools = tools_of(raw[column], column)
            if tools is not None:
                return tools
    return None


def mapped_columns(fields: Fields) -> frozenset[str]:
    """Return all columns that `fields` name, alone or in a template."""
    values = [value for value in fields.model_dump().values() if value]
    templates = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    return frozenset([*templates, *(column for t in templates for column in COLUMN_IN_TEMPLATE.findall(t))])


def _prepend_system(row: Row, system: Any) -> None:
    """Insert a system turn at the beginning, unless it is there."""
    if isinstance(system, list):
        system = text_of(system, "system")
    if system is not None and not isinstance(system, str):
        raise wrong_type("system", system)
    if system:
        system = SYSTEM_TAG.sub("", system)
    turn = {"role": "system", "content": system}
    if system and system.strip() and row.opening[0] != turn:
        row.opening.insert(0, turn)


def _label(raw: Raw, template: str | None) -> str | None:
    value = None if template is None else _filled(raw, template)
    if value is not None and not isinstance(value, str):
        raise wrong_type(template, value, "a text or a number")
    return value if value and value.strip() else None


def column_at(raw: Raw, path: str) -> Any:
    """The value of a column, or at a path of keys within it, also within JSON that a text holds, or in the first item of a list
    that has one; Malformed without one.

    >>> column_at({"metadata": '{"tools": [1]}'}, "metadata.tools"), column_at({"turns": [{}, {"a": 1}]}, "turns[].a")
    ([1], 1)
    """
    value: Any = raw
    if path not in raw and "." in path and path.split(".")[0].removesuffix("[]") in raw:
        for key in path.split("."):
            value = json_of(value) if isinstance(value, str) else value
            name, items = key.removesuffix("[]"), value if isinstance(value, list) else [value]
            value = next((item[name] for item in items if isinstance(item, dict) and item.get(name) is not None), None)
        if value is not None:
            return value
    return column_of(raw, path)


def _filled(raw: Raw, template: str) -> Any:
    """Return the column `template`, a number as text; or the template with its columns filled in."""
    if not COLUMN_IN_TEMPLATE.search(template) or template in raw:
        value = column_at(raw, template)
        text = plain_text(value)
        return value if text is None else text
    return COLUMN_IN_TEMPLATE.sub(lambda match: _cell(raw, match[1]), template)


def _cell(raw: Raw, column: str) -> str:
    value = column_at(raw, column)
    texts = [plain_text(item) for item in (value if isinstance(value, list) else [value])]
    if None in texts:
        raise wrong_type(column, value, "a text, a number, or a list of them")
    return "\n".join(texts)
