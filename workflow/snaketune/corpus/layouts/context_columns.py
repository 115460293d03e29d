"""Columns that belong to a prompt or its response: the prompt's context and choices, the response's reasoning.

    question, context, answer          the context follows the question, like the input of an instruction
    question, choices, answer          so do the choices, one per line with letters: `A. …` (see `choices`)
    question, reasoning, response      the reasoning precedes the response, as `<think>\\n…\\n</think>\\n\\n`

What the prompt or the response already contains isn't repeated. Columns of these names may hold something else (a number, a
link, a reasoning setting): that isn't read, and is reported among the ignored columns.
"""

from collections.abc import Iterator
from typing import Any

from snaketune.corpus.layouts.choices import CHOICES_COLUMNS, choices_text
from snaketune.corpus.layouts.columns import is_blank, mark_read
from snaketune.corpus.layouts.content_parts import kind_of, think_block
from snaketune.corpus.layouts.messages import SPEAKER_KEYS, may_be_serialized_turns, turns_of
from snaketune.corpus.layouts.ratings import JUDGE_COLUMNS
from snaketune.corpus.rows import Malformed, Message, roles_and_texts

# Names of the columns that `fields` map.
MAPPED_CONTEXT, MAPPED_REASONING = "fields.context", "fields.reasoning"
CONTEXT_COLUMNS = ("context", "contexts", "passage", "article", "paragraph")
# These are often a number or a name: for instance of the article in a magazine.
AMBIGUOUS = {"article", "paragraph"}
# These may also be a judge's reasoning.
JUDGE_REASONING = ("reasoning", "thinking", "cot")
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
ADVICE = "name it under `fields`, or map prompt and response there, so that no other column is read"


def add_to_prompt(raw: dict[str, Any], prompt: list[Message], response: str = "") -> None:
    """Append context and choices to the last turn of a prompt, in place.

    Args:
        response: a context that it contains isn't added.
    Raises:
        Malformed: context or choices have no text.
    """
    # A context without a question is no prompt.
    if COLUMNS.isdisjoint(raw) or not prompt or not prompt[-1]["content"].strip():
        return
    for text in (*_contexts(raw, prompt, response), *choices_text(raw, prompt[-1]["content"], response)):
        prompt[-1] = prompt[-1] | {"content": f"{prompt[-1]['content']}\n\n{text}"}


def add_to_response(raw: dict[str, Any], response: list[Message]) -> None:
    """Put the reasoning before a response, in place, unless the response has it.

    Raises:
        Malformed: it isn't a text, or may be a judge's.
    """
    if COLUMNS.isdisjoint(raw):
        return
    for column in (MAPPED_REASONING,) if MAPPED_REASONING in raw else REASONING_COLUMNS:
        value = raw.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not _is_reasoning(value, column):
            continue
        if column in JUDGE_REASONING and not JUDGE_COLUMNS.isdisjoint(raw):
            judge = next(name for name in raw if name in JUDGE_COLUMNS)
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
    # One word is a setting: on, high, enabled.
    text = value.strip()
    return column == MAPPED_REASONING or (
        any(map(str.isspace, text))
        and not (text.lower().startswith(STEP_BY_STEP) and len(text) < 2 * len(STEP_BY_STEP))
    )


def _contexts(raw: dict[str, Any], prompt: list[Message], response: str) -> Iterator[str]:
    for column in (MAPPED_CONTEXT,) if MAPPED_CONTEXT in raw else CONTEXT_COLUMNS:
        value = raw.get(column)
        if is_blank(value) or (column in AMBIGUOUS and not (isinstance(value, str) and " " in value.strip())):
            continue
        if _are_turns(value):
            # May also be the conversation that the completions of a pair continue.
            mark_read(raw, column)
            earlier = roles_and_texts(turns_of(value, column))
            if roles_and_texts(prompt)[: len(earlier)] != earlier:
                raise Malformed(
                    "unread_context",
                    f"{column} holds turns that the prompt doesn't; call it history if they come before it",
                )
            continue
        texts = _texts(value)
        if texts is None:
            raise Malformed("unread_context", f"{column} holds {kind_of(value)}, expected a text or several; {ADVICE}")
        text = "\n\n".join(texts)
        # A text that the response contains isn't its context; the reverse is common.
        if not text or (column != MAPPED_CONTEXT and response.strip() and _plain(text) in _plain(response)):
            continue
        mark_read(raw, column)
        elsewhere = [turn["content"] for turn in prompt] + [
            raw[name] for name in OTHER_CONTEXT_COLUMNS if isinstance(raw.get(name), str)
        ]
        if not any(_plain(text)[:PREFIX_LENGTH] in _plain(text_) for text_ in elsewhere):
            yield text


def _are_turns(value: Any) -> bool:
    return may_be_serialized_turns(value) or (
        isinstance(value, list)
        and all(isinstance(item, dict) and any(item.get(key) is not None for key in SPEAKER_KEYS) for item in value)
    )


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
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        return None
    title = next((item[key] for key in TITLES if isinstance(item.get(key), str)), "")
    text = next((item[key] for key in PASSAGES if isinstance(item.get(key), str)), None)
    return text if text is None or not title else f"{title}\n{text}"


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
