"""The content of a turn as one text: typed parts, reasoning and tool calls in the format that most chat models are trained on.

Reasoning precedes the text as `<think>\\n…\\n</think>\\n\\n`; a call is
`<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>`.
"""

import ast
import json
import re
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.rows import Malformed, Row
from snaketune.corpus.values.cells import first_value, json_of, kind_of, text_if_number
from snaketune.corpus.values.validation import refuse_media

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CALLS_KEYS = ("tool_calls", "function_call", "function_calls")
ARGUMENTS_KEYS = ("arguments", "parameters", "input")
# Keys of a part's text; some data sets use them for any type.
TEXT_KEYS = ("text", "value", "content")
TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# An answer with its reasoning in other marks.
MARKS = ("<|channel|>", "<|begin_of_thought|>")
HARMONY = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(.*?)<\|end\|>\s*<\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>((?:(?!<\|).)*)(?:<\|(?:return|end)\|>)?\s*",
    re.DOTALL,
)
THOUGHTS = re.compile(
    r"<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>\s*<\|begin_of_solution\|>\s*((?:(?!<\|).)*?)\s*(?:<\|end_of_solution\|>)\s*",
    re.DOTALL,
)
CALL_TYPES = ("tool_call", "tool_use", "function_call")
# Keys of a part and of a call that are read. An id only relates a call to its result, which the order of the turns
# does, too.
CALL_KEYS = {"id", "tool_use_id", "index", "type", "function", "name", *ARGUMENTS_KEYS}
PART_KEYS = {"type", *TEXT_KEYS, *REASONING_KEYS, *CALL_TYPES, *CALLS_KEYS, *CALL_KEYS}


def content_of(turn: dict[str, Any], content: Any, role: str, where: str) -> str:
    """Return the whole content of a turn: `content`, and the reasoning and calls in its other keys."""
    reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
    calls = next((turn[key] for key in CALLS_KEYS if turn.get(key)), None)
    if reasoning is None and not calls:
        return text_of(content, where)
    if role != "assistant":
        raise Malformed("unsupported_part", f"{where} ({role}) has reasoning or tool calls, which are the assistant's")
    text = "" if content is None else text_of(content, where)
    if reasoning is not None:
        text = _with_reasoning(text, think_block(reasoning, where), where)
    return _joined(text, calls_text(calls, where)) if calls else text


def _with_reasoning(text: str, block: str, where: str) -> str:
    """Put a block of reasoning before a text, unless the text begins with it; Malformed if it begins with other reasoning."""
    thought = THINK.match(text)
    if thought is None or not thought[1].strip():
        return block + (text if thought is None else text[thought.end() :])
    if block and thought[1].strip() not in block:
        raise Malformed("reasoning_differs", f"{where} has reasoning in a key, and other reasoning in its text")
    return text


def text_of(content: Any, where: str) -> str:
    """Return a text, or a list of parts as one text.

    >>> text_of([{"type": "thinking", "thinking": "1 + 1"}, {"type": "text", "text": "2"}], "turn 2")
    '<think>\\n1 + 1\\n</think>\\n\\n2'
    """
    content = text_if_number(content)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed("non_string_content", f"{where}: content holds {kind_of(content)}, expected a text")
    if content and all(isinstance(part, str) for part in content):
        # Lines, with line ends or without.
        return "".join(content) if any(line.endswith("\n") for line in content) else "\n".join(content)
    text = ""
    for part in content:
        if isinstance(part, str):
            text += part
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else kind_of(part)
        if kind in TEXT_TYPES:
            refuse_media(part, f"{where}: ")
            text += _part_text(part, TEXT_KEYS, where)
        elif kind in ("reasoning", "thinking"):
            text += think_block(_part_text(part, (*TEXT_KEYS, *REASONING_KEYS), where), where)
        elif kind == "redacted_thinking":
            # Encrypted, so there is no text; its key isn't read, and reported.
            continue
        elif kind in CALL_TYPES:
            text = _joined(text, calls_text(part.get(kind) or part.get("value") or part, where))
        elif kind == "tool_calls":
            text = _joined(text, calls_text(part.get("tool_calls") or part.get("value"), where))
        else:
            what = f"a part has the type {str(kind)[:40]!r}, which text can't represent"
            raise Malformed("unsupported_part", f"{where}: {what}")
    return text


def _part_text(part: dict[str, Any], keys: tuple[str, ...], where: str) -> str:
    text = first_value(part, keys)
    if not isinstance(text, str):
        raise Malformed("non_string_content", f"{where}: a part's text holds {kind_of(text)}, expected a text")
    return text


def think_block(reasoning: Any, where: str) -> str:
    """Return reasoning in the tags that most chat models are trained on, to be put before the answer; "" if there is none."""
    if not isinstance(reasoning, str):
        raise Malformed("non_string_content", f"{where}: reasoning holds {kind_of(reasoning)}, expected a text")
    text = reasoning.strip().removeprefix("<think>").removesuffix("</think>").strip()
    return f"<think>\n{text}\n</think>\n\n" if text else ""


def calls_text(calls: Any, where: str) -> str:
    """Return one or several calls, as objects or as JSON, in the tags that templates use.

    >>> calls_text('{"name": "now", "arguments": {}}', "turn 2")
    '<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>'
    """
    if isinstance(calls, str):
        if "<tool_call>" in calls:
            return calls
        calls = _python_calls(calls) or _loads(calls, where)
    return "\n".join(_call(call, where) for call in (calls if isinstance(calls, list) else [calls]))


def _call(call: Any, where: str) -> str:
    function = call.get("function") or call if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise Malformed("bad_tool_call", f"{where}: a tool call has no name")
    arguments = first_value(function, ARGUMENTS_KEYS)
    # JSON in a text, and JSON in JSON.
    for _ in range(2):
        arguments = _loads(arguments, where) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict) and first_value(function, ARGUMENTS_KEYS) is not None:
        raise Malformed(
            "bad_tool_call", f"{where}: the arguments of {name} are {kind_of(arguments)}, expected an object"
        )
    arguments = arguments or {}
    try:
        serialized = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed("bad_tool_call", f"{where}: {str(error)[:EXCERPT_LENGTH]}") from None
    return f"<tool_call>\n{serialized}\n</tool_call>"


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("bad_tool_call", f"{where}: a tool call isn't valid JSON: {error}") from None


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Return calls that are written as in Python, with arguments by name; [] for anything else.

    >>> _python_calls("tide_at(harbour='Brest')\\nnow()")
    [{'name': 'tide_at', 'arguments': {'harbour': 'Brest'}}, {'name': 'now', 'arguments': {}}]
    """
    try:
        calls = [statement.value for statement in ast.parse(text.strip()).body]
        if not all(isinstance(call, ast.Call) and not call.args for call in calls):
            return []
        arguments = [{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} for call in calls]
        return [
            {"name": ast.unparse(call.func), "arguments": call_arguments}
            for call, call_arguments in zip(calls, arguments)
        ]
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
        return []


def unmark_reasoning(row: Row) -> None:
    """Write reasoning in the marks of Harmony or of OpenThoughts as a block, and what follows it as the answer."""
    for turn in row.turns:
        if turn["role"] != "assistant" or not turn["content"].startswith(MARKS):
            continue
        found = HARMONY.fullmatch(turn["content"]) or THOUGHTS.fullmatch(turn["content"])
        if found is None:
            what = (
                f"an answer begins with {turn['content'][:60]!r}, and isn't reasoning and a final answer in these marks"
            )
            raise Malformed("unknown_marks", what)
        turn["content"] = think_block(found[1] or "", "an answer") + found[2]
        row.notes += ("reasoning_in_marks",)


def _joined(text: str, calls: str) -> str:
    return f"{text}\n{calls}" if text and not text.endswith("\n") else text + calls


def are_calls(value: Any) -> bool:
    """Whether a column holds a list of calls, mostly as JSON in a text."""
    calls = json_of(value) if isinstance(value, str) else value
    return isinstance(calls, list) and bool(calls) and all(map(_is_call, calls))


def column_of_calls(value: Any, column: str) -> str:
    """The calls of a column as text. Malformed if it holds anything but calls.

    They are calls as in messages, or correct values of each argument, [{"f": {"x": [1, 1.0]}}, …], of which the first is taken
    and "" is an argument that may be omitted (BFCL).
    """
    if not are_calls(value):
        raise Malformed("bad_tool_call", f"{column} holds {kind_of(value)} that isn't a list of calls")
    calls = json_of(value) if isinstance(value, str) else value
    return calls_text([call if "name" in call else _with_first_values(call) for call in calls], column)


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict):
        return False
    has_name = isinstance(call.get("name"), str) and any(key in call for key in ARGUMENTS_KEYS)
    return has_name or (len(call) == 1 and all(isinstance(values, dict) for values in call.values()))


def _with_first_values(call: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ((name, values),) = call.items()
    first = {key: value[0] if isinstance(value, list) and value else value for key, value in values.items()}
    return {"name": name, "arguments": {key: value for key, value in first.items() if value != ""}}
