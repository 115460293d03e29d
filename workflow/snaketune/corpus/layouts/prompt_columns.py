"""Columns that belong to a prompt or its response: the prompt's context and choices, the response's reasoning.

    question, context, answer          the context follows the question, like the input of an instruction
    question, choices, answer          so do the choices, one per line with letters: `A. …`; choices or options are
                                       [text, …], {label: text}, {text: […], label: […]}, [{label, text}, …], or a list in a
                                       text; or columns A, B, C …, two only where the response is one of their letters
    question, reasoning, response      the reasoning precedes the response, as `<think>\\n…\\n</think>\\n\\n`

What the prompt or the response already contains isn't repeated. Columns of these names may hold something else (a number, a
link, a reasoning setting): that isn't read, and is reported among the ignored columns.
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from snaketune.corpus.layouts.content import think_block
from snaketune.corpus.layouts.messages import are_turns, may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.values import Raw, first_value, is_blank, kind_of, mark_read, plain_text
from snaketune.corpus.rows import Malformed, Message, roles_and_texts

# Names of the columns that `fields` map.
MAPPED_CONTEXT, MAPPED_REASONING = "fields.context", "fields.reasoning"
CONTEXT_COLUMNS = ("context", "contexts", "passage", "article", "paragraph")
# These are often a number or a name: for instance of the article in a magazine.
AMBIGUOUS = {"article", "paragraph"}
CHOICES_COLUMNS = ("choices", "options")
# These may also be a judge's reasoning, and beside these columns they often are.
JUDGE_REASONING = ("reasoning", "thinking", "cot")
JUDGE_COLUMNS = frozenset(
    ("score", "rating", "grade", "label", "verdict", "judge", "judge_model", "critique", "feedback", "kto_tag")
)
REASONING_COLUMNS = ("reasoning_content", *JUDGE_REASONING, "chain_of_thought", "thinking_trajectories")
COLUMNS = frozenset((MAPPED_CONTEXT, MAPPED_REASONING, *CONTEXT_COLUMNS, *CHOICES_COLUMNS, *REASONING_COLUMNS, "A"))
# Columns that may already contain the context.
OTHER_CONTEXT_COLUMNS = ("system", "system_prompt", "system_message", "history")
STEP_BY_STEP = "let's think step by step"
THOUGHT_MARKS = ("<think>", "<thinking>", "<reasoning>", "[THINK]")
# Settings of a reasoning model.
REASONING_SETTINGS = {"effort", "summary", "enabled", "exclude", "max_tokens", "budget_tokens", "type"}
TITLES, PASSAGES = ("title", "name"), ("text", "content", "contents", "passage", "paragraph_text", "snippet", "body")
# If the prompt contains the first characters of a context, it contains the context, perhaps in part or with other line
# breaks.
PREFIX_LENGTH = 200
LABEL_KEYS, CHOICE_KEYS = ("label", "key", "id", "letter"), ("text", "value", "content", "choice", "option")
# Keys of API responses and requests, which also have `choices` and `options`.
API_KEYS = {"finish_reason", "index", "logprobs", "message"}
LABEL = re.compile(r"[A-Za-z]|\d{1,2}")
NAMED_LABEL = re.compile(rf"(?:option|choice)?[ _]?({LABEL.pattern})", re.IGNORECASE)
MAX_LITERAL = 10_000
ADVICE = "name it under `fields`, or map prompt and response there, so that no other column is read"


def add_to_prompt(raw: Raw, prompt: list[Message], response: str = "") -> None:
    """Append context and choices to the last turn of a prompt, in place.

    Args:
        response: a context that it contains isn't added.
    """
    # A context without a question is no prompt.
    if COLUMNS.isdisjoint(raw) or not prompt or not prompt[-1]["content"].strip():
        return
    for text in (*_contexts(raw, prompt, response), *_choices(raw, prompt[-1]["content"], response)):
        prompt[-1] = prompt[-1] | {"content": f"{prompt[-1]['content']}\n\n{text}"}


def add_to_response(raw: Raw, response: list[Message]) -> None:
    """Put the reasoning before a response, in place, unless the response has it."""
    if COLUMNS.isdisjoint(raw):
        return
    for column in (MAPPED_REASONING,) if MAPPED_REASONING in raw else REASONING_COLUMNS:
        value = raw.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not _is_reasoning(value, column):
            continue
        judge = next((name for name in raw if name in JUDGE_COLUMNS), None)
        if column in JUDGE_REASONING and judge:
            raise Malformed("unread_reasoning", f"{column} beside {judge} may be a judge's; {ADVICE}")
        mark_read(raw, column)
        text = response[0]["content"]
        if value.strip() not in text and "</think>" not in text and not text.lstrip().startswith(THOUGHT_MARKS):
            response[0] = response[0] | {"content": think_block(value, column) + text}
        return


def _is_reasoning(value: Any, column: str) -> bool:
    if is_blank(value) or (isinstance(value, dict) and value.keys() <= REASONING_SETTINGS):
        return False
    if not isinstance(value, str):
        actual = f"{len(value)} items" if isinstance(value, list) else kind_of(value)
        raise Malformed("unread_reasoning", f"{column} holds {actual}, expected a text; {ADVICE}")
    text = value.strip()
    is_instruction = text.lower().startswith(STEP_BY_STEP) and len(text) < 2 * len(STEP_BY_STEP)
    # One word is a setting: on, high, enabled.
    return column == MAPPED_REASONING or (any(map(str.isspace, text)) and not is_instruction)


def _contexts(raw: Raw, prompt: list[Message], response: str) -> Iterator[str]:
    for column in (MAPPED_CONTEXT,) if MAPPED_CONTEXT in raw else CONTEXT_COLUMNS:
        value = raw.get(column)
        if is_blank(value) or (column in AMBIGUOUS and not (isinstance(value, str) and " " in value.strip())):
            continue
        if may_be_serialized_turns(value) or are_turns(value):
            # May also be the conversation that the completions of a pair continue.
            mark_read(raw, column)
            earlier = roles_and_texts(turns_of(value, column, {}))
            if roles_and_texts(prompt)[: len(earlier)] != earlier:
                what = "turns that the prompt doesn't; call it history if they come before it"
                raise Malformed("unread_context", f"{column} holds {what}")
            continue
        if column == "context" and isinstance(value, list) and len(value) > 1 and all(map(_is_text, value)):
            what = "a list of texts, passages or earlier turns; name it under `fields.context`, or call it history"
            raise Malformed("unread_context", f"{column} holds {what}")
        texts = _texts(value)
        if texts is None:
            raise Malformed("unread_context", f"{column} holds {kind_of(value)}, expected a text or several; {ADVICE}")
        text = "\n\n".join(texts)
        # A text that the response contains isn't its context; the reverse is common.
        if not text or (column != MAPPED_CONTEXT and response.strip() and _plain(text) in _plain(response)):
            continue
        mark_read(raw, column)
        others = [raw[name] for name in OTHER_CONTEXT_COLUMNS if isinstance(raw.get(name), str)]
        elsewhere = [turn["content"] for turn in prompt] + others
        if not any(_plain(text)[:PREFIX_LENGTH] in _plain(text_) for text_ in elsewhere):
            yield text


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> list[str] | None:
    """Return the texts of a context: one text, several, passages with titles, titles with sentences; None for anything else."""
    match value:
        case str():
            return [value]
        case {"title": list(titles), "sentences": list(sentences)} if len(titles) == len(sentences):
            return [f"{title}\n{''.join(parts)}" for title, parts in zip(titles, sentences)]
        case {"contexts": list(texts)}:
            return _texts(texts)
        case list():
            passages = [_passage(item) for item in value if item is not None]
            return None if None in passages else [text for text in passages if text.strip()]
    return None


def _passage(item: Any) -> str | None:
    if not isinstance(item, dict):
        return item if isinstance(item, str) else None
    title, text = (
        next((item[key] for key in keys if isinstance(item.get(key), str)), None) for keys in (TITLES, PASSAGES)
    )
    return f"{title}\n{text}" if title and text is not None else text


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def letter_of(raw: Raw, answer: Any) -> Any:
    """The label of the choice whose index, a number or a text of digits, is `answer`; else `answer`, as for a label or a text.

    >>> letter_of({"choices": ["x", "y", "z"]}, "2"), letter_of({"choices": [2, 4]}, 4), letter_of({}, 2)
    ('C', 4, 2)
    """
    index = plain_text(answer)
    if index is None or isinstance(answer, bool) or not index.isdecimal():
        return answer
    column, value = _choices_value(raw)
    if column is None:
        choices = [(letter, plain_text(raw[letter]) or "") for letter in _letters(raw, "")]
    else:
        choices = [] if isinstance(value, str) else _labelled(value, column)
    if any(index in choice for choice in choices) or int(index) >= min(len(choices), len(ascii_uppercase)):
        return answer
    return choices[int(index)][0] or ascii_uppercase[int(index)]


def _choices_value(raw: Raw) -> tuple[str | None, Any]:
    """The column of choices that isn't blank, and its value, parsed if it is a list in a text; None without one."""
    column = next((column for column in CHOICES_COLUMNS if not is_blank(raw.get(column))), None)
    return column, _parsed_list(raw.get(column)) if column else None


def _choices(raw: Raw, prompt: str, response: str) -> list[str]:
    """Return the choices of a row as one text; an empty list if it has none, or its prompt already has them."""
    column, value = _choices_value(raw)
    if column is None:
        columns = _letters(raw, response)
        choices = [(letter, plain_text(raw[letter]) or "") for letter in columns]
    else:
        if isinstance(value, str):
            # One text with all choices, in any format.
            mark_read(raw, column)
            return [value] if value.strip() not in prompt else []
        columns, choices = [column], _labelled(value, column)
    choices = [(label, text) for label, text in choices if text.strip()]
    if len(choices) < 2 or all(label == text for label, text in choices):
        return []
    mark_read(raw, *columns)
    if all(_is_listed_in(prompt, text) for _, text in choices):
        return []
    return ["\n".join(f"{label}. {text}" if label else text for label, text in choices)]


def _is_listed_in(prompt: str, choice: str) -> bool:
    """Return True if a choice is on a line of its own, or after a label or a bullet."""
    pattern = rf"(?:^|[\s(](?:{LABEL.pattern})\s?[).:]|[-*•])\s*{re.escape(choice.strip())}(?!\w)"
    return re.search(pattern, prompt, re.IGNORECASE | re.MULTILINE) is not None


def _letters(raw: Raw, response: str) -> list[str]:
    """Return the columns A, B, C and so on of a row that hold choices."""
    count = next((number for number, letter in enumerate(ascii_uppercase) if letter not in raw), 0)
    letters = [*ascii_uppercase[:count]]
    if count < 2 or any(plain_text(raw.get(letter)) is None for letter in letters):
        return []
    return letters if count > 2 or response.strip() in letters else []


def _parsed_list(value: Any) -> Any:
    """Parse a list in a text, as JSON or as a Python literal; return other values unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{") or len(value) > MAX_LITERAL:
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _labelled(value: Any, column: str) -> list[tuple[str, str]]:
    """Return label and text of each choice; "" if the text begins with its label; an empty list for other values."""
    labels: list[Any] = []
    match value:
        case {"text": list(texts)}:
            labels = value.get("label") or []
        case dict():
            matches = [NAMED_LABEL.fullmatch(str(key)) for key in value]
            if None in matches:
                return []
            labels, texts = [match[1] for match in matches], list(value.values())
        case [dict(), *_] if all(isinstance(item, dict) for item in value):
            if any(API_KEYS & item.keys() for item in value):
                return []
            labels, texts = ([first_value(item, keys) for item in value] for keys in (LABEL_KEYS, CHOICE_KEYS))
        case list():
            texts = value
        case _:
            return []
    as_text = ["" if text is None else plain_text(text) for text in texts]
    if None in as_text or (isinstance(value, list) and not any(as_text)):
        what = f"{kind_of(value)} without a text for each choice"
        advice = "write them as texts, or map prompt and response with `fields`, which reads no other columns"
        raise Malformed("unread_choices", f"{column} holds {what}; {advice}")
    if len(labels) != len(as_text) or not all(LABEL.fullmatch(str(label)) for label in labels):
        labels = _missing_labels(as_text)
    return [(str(label), text) for label, text in zip(labels, as_text)]


def _missing_labels(texts: Sequence[str]) -> list[str]:
    """Return letters; empty labels if each text begins with its own letter or number in order: `A) …`, `2. …`."""
    numbers = [str(number) for number in range(1, len(texts) + 1)]
    letters = [*ascii_uppercase[: len(texts)]] if len(texts) <= len(ascii_uppercase) else numbers
    lettered = all(
        re.match(rf"\s*\(?(?:{letter}|{letter.lower()}|{number})\s?[).:](?!\d)", text)
        for number, letter, text in zip(numbers, letters, texts)
    )
    return [""] * len(texts) if lettered else letters
