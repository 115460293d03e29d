"""A row of each public schema, read by the source that states it, and by `auto` either the same, or not at all."""

import json
import re
from typing import Any, NamedTuple

import pytest
import yaml

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.layouts.recognise import UnknownLayout
from snaketune.corpus.layouts.unstated import UnstatedColumns
from snaketune.corpus.rows import Dropped, Malformed, RawRow
from snaketune.errors import SnaketuneError
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, turns

BUS = {"name": "bus", "description": "Next bus.", "parameters": {"type": "object", "properties": {"stop": {}}}}
FLAT, NESTED = {"type": "function"} | BUS | {"strict": True}, {"type": "function", "function": BUS}
ARGUMENTS = {"stop": "Mill"}
SERIALIZED = json.dumps(ARGUMENTS)
CALL = {"id": "c7", "type": "function", "function": {"name": "bus", "arguments": SERIALIZED}}
CALLED = f'<tool_call>\n{{"name": "bus", "arguments": {SERIALIZED}}}\n</tool_call>'
THOUGHT = "<think>\nLook it up.\n</think>\n\n"
DONE = "<think>\nSay it.\n</think>\n\n"
WITH_CALL = f"U Next bus?|A {CALLED}|T at 9|A At 9."
ASK, TELL = turns("U Next bus?", "A At 9.")
RESULT = {"role": "tool", "tool_call_id": "c7", "content": "at 9"}
PAIR = "U Warm?|A Yes.|A No."


def called(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [CALL]} | keys


def gpt(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def sided(answer: str, **keys: Any) -> list[dict[str, Any]]:
    return [turn | keys for turn in turns("U Warm?", f"A {answer}")]


class Schema(NamedTuple):
    """A row, the keys of the source that states it, the row that it is or the reason why not, its kind, and its tools."""

    row: dict[str, Any]
    source: dict[str, Any]
    expected: str
    kind: str = CONVERSATIONS
    tools: list[str] = []


MESSAGES, PAIRS, VOTES = ({"layout": name} for name in ("messages", "pairs", "votes"))
SCHEMAS = {
    "tulu 3": Schema({"id": "t_1", "messages": [ASK, TELL], "source": "ours/chat"}, MESSAGES, "U Next bus?|A At 9."),
    "smoltalk2": Schema(
        {"messages": [ASK, TELL], "source": "chat", "chat_template_kwargs": {"enable_thinking": False, "xml_tools": []}},
        {"fields": {"template_variables": "chat_template_kwargs"}},
        "U Next bus?|A At 9.",
    ),
    "smoltalk2, templated": Schema(
        {"text": "<|im_start|>user\nNext bus?<|im_end|>\n<|im_start|>assistant\nAt 9.<|im_end|>\n"}, {}, "unknown_layout"
    ),
    "open-thoughts": Schema(
        {
            "system": "Think first.",
            "conversations": [
                {"from": "user", "value": "Next bus?"},
                {
                    "from": "assistant",
                    "value": "<|begin_of_thought|>\nLook it up.\n<|end_of_thought|>\n\n<|begin_of_solution|>\n"
                    "At 9.\n<|end_of_solution|>",
                },
            ],
        },
        MESSAGES,
        f"S Think first.|U Next bus?|A {THOUGHT}At 9.",
    ),
    "open-thoughts 3": Schema(
        {"difficulty": 2, "conversations": gpt("Next bus?", f"{THOUGHT}At 9.")}, MESSAGES, f"U Next bus?|A {THOUGHT}At 9."
    ),
    "open-r1": Schema(
        {
            "problem": "1 + 1?", "solution": "It is 2.", "answer": "2", "uuid": "u-9",
            "generations": ["<think>a</think>2", "<think>b"], "correctness_math_verify": [True, False],
            "messages": turns("U 1 + 1?", "A <think>a</think>2"),
        },
        MESSAGES | {"ignore": ["problem", "solution", "answer", "generations", "correctness_math_verify"]},
        "U 1 + 1?|A <think>a</think>2",
    ),
    "am-thinking": Schema(
        {"conversations": [
            {"from": "human", "value": "Next bus?", "info": None},
            {"from": "assistant", "value": "<think>x</think>At 9.", "info": {"think_content": "x", "verify_score": 0.5}},
        ]},
        MESSAGES | {"ignore": ["conversations[].info"]},
        "U Next bus?|A <think>x</think>At 9.",
    ),
    "llama-nemotron": Schema(
        {"input": [ASK], "output": "<think>\nx\n</think>\nAt 9.", "reasoning": "on", "system_prompt": "thinking on"},
        {"layout": "prompt-response", "ignore": ["reasoning"]},
        "S thinking on|U Next bus?|A <think>\nx\n</think>\nAt 9.",
    ),
    "nemotron, tools in metadata": Schema(
        {
            "messages": [ASK | {"tool_calls": []}, called(content="<think>x</think>"), RESULT | {"tool_calls": []}, TELL],
            "metadata": json.dumps({"tools": [NESTED]}), "reasoning": "on",
        },
        MESSAGES | {"fields": {"tools": "metadata.tools"}, "ignore": ["reasoning"]},
        f"U Next bus?|A <think>x</think>\n{CALLED}|T at 9|A At 9.",
        tools=["bus"],
    ),
    "nemotron, that ends on a result": Schema({"messages": [ASK, called(), RESULT]}, MESSAGES, "ends_on_tool"),
    "nemotron 3": Schema(
        {
            "messages": [
                {"role": "system", "content": ""}, ASK, called(reasoning_content="Look it up."), RESULT,
                TELL | {"reasoning_content": "Say it."},
            ],
            "tools": [NESTED], "used_in": ["v3"],
        },
        MESSAGES | {"ignore": ["used_in"]},
        f"U Next bus?|A {THOUGHT}{CALLED}|T at 9|A {DONE}At 9.",
        tools=["bus"],
    ),
    "nemo gym": Schema(
        {"responses_create_params": {"input": [ASK], "tools": [FLAT]}, "expected_answer": "9"}, {}, "unknown_layout"
    ),
    "intellect 3": Schema(
        {"prompt": [ASK | {"tool_calls": None}], "completion": [called(), RESULT, TELL]},
        {"layout": "prompt-response"},
        WITH_CALL,
    ),
    "xlam": Schema(
        {
            "query": "Next bus?", "answers": json.dumps([{"name": "bus", "arguments": ARGUMENTS}]),
            "tools": json.dumps([{"name": "bus", "description": "Next bus.", "parameters": {"stop": {"type": "str"}}}]),
        },
        {"layout": "prompt-response"},
        f"U Next bus?|A {CALLED}",
        tools=["bus"],
    ),
    "swe-smith": Schema(
        {
            "messages": json.dumps([
                ASK | {"content": [{"type": "text", "text": "Next bus?"}]},
                called(), {"role": "tool", "content": [{"type": "text", "text": "at 9"}], "tool_call_ids": ["c7"]}, TELL,
            ]),
            "resolved": True, "patch": "diff --git x y",
        },
        MESSAGES | {"where": "resolved == true", "ignore": ["patch"]},
        WITH_CALL,
    ),
    "open-swe-traces": Schema(
        {"messages": [ASK, TELL], "resolved": -1}, MESSAGES | {"where": "resolved == 1"}, "where resolved == 1"
    ),
    "multilingual-thinking": Schema(
        {"user": "Next bus?", "analysis": "Look it up.", "final": "At 9.",
         "messages": [ASK | {"thinking": None}, TELL | {"thinking": "Look it up."}]},
        MESSAGES | {"ignore": ["user", "analysis", "final"]},
        f"U Next bus?|A {THOUGHT}At 9.",
    ),
    "openai": Schema(
        {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL], "weight": 0}, RESULT, TELL | {"weight": 1}],
         "tools": [NESTED], "parallel_tool_calls": False},
        MESSAGES,
        WITH_CALL,
        tools=["bus"],
    ),
    "anthropic": Schema(
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                ASK | {"content": [{"type": "text", "text": "Next bus?"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": "Cx9"},
                    {"type": "tool_use", "id": "c7", "name": "bus", "input": ARGUMENTS},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c7", "content": [{"type": "text", "text": "at 9"}]}
                ]},
                {"role": "assistant", "content": [
                    {"type": "redacted_thinking", "data": "Rw8="}, {"type": "text", "text": "At 9."}
                ]},
            ],
            "tools": [{"name": "bus", "input_schema": BUS["parameters"]}],
        },
        MESSAGES | {"ignore": ["messages[].content[].data", "messages[].content[].signature"]},
        f"S Be brief.|U Next bus?|A {THOUGHT}{CALLED}|T at 9|A At 9.",
        tools=["bus"],
    ),
    "gemini": Schema(
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Next bus?"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "bus", "args": ARGUMENTS}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "bus", "response": {"at": 9}}}]},
                {"role": "model", "parts": [{"text": "At 9."}]},
            ],
            "tools": [{"functionDeclarations": [BUS]}],
        },
        {"layout": "contents"},
        f'S Be brief.|U Next bus?|A {CALLED}|T {{"at": 9}}|A At 9.',
        tools=["bus"],
    ),
    "mcp": Schema(
        {"messages": [ASK, called(), RESULT, TELL],
         "tools": [{"name": "bus", "inputSchema": BUS["parameters"], "annotations": {"readOnlyHint": True}}]},
        MESSAGES,
        WITH_CALL,
        tools=["bus"],
    ),
    "mcp, a resource": Schema(
        {"messages": [ASK, called(), RESULT | {"content": [{"type": "resource", "resource": {"uri": "x"}}]}, TELL]},
        MESSAGES,
        "unsupported_part",
    ),
    "mistral": Schema(
        {"messages": [ASK, called(prefix=False), RESULT | {"name": "bus"}, TELL], "tools": [NESTED]},
        MESSAGES | {"ignore": ["messages[].name"]},
        WITH_CALL,
        tools=["bus"],
    ),
    "glaive": Schema(
        {"conversations": [
            {"from": "human", "value": "Next bus?"},
            {"from": "function_call", "value": json.dumps({"name": "bus", "arguments": ARGUMENTS})},
            {"from": "observation", "value": "at 9"}, {"from": "gpt", "value": "At 9."},
        ], "tools": json.dumps([BUS]), "system": ""},
        MESSAGES,
        WITH_CALL,
        tools=["bus"],
    ),
    "harmony": Schema(
        {"messages": [
            ASK, {"role": "assistant", "channel": "analysis", "content": "Look it up."},
            {"role": "assistant", "channel": "commentary", "recipient": "functions.bus", "content": SERIALIZED},
            {"role": "tool", "channel": "commentary", "content": "at 9"},
            {"role": "assistant", "channel": "analysis", "content": "Say it."}, TELL | {"channel": "final"},
        ]},
        MESSAGES,
        f"U Next bus?|A {THOUGHT}{CALLED}|T at 9|A {DONE}At 9.",
    ),
    "harmony, no answer": Schema(
        {"messages": [ASK, {"role": "assistant", "channel": "analysis", "content": "Hm."}]},
        MESSAGES,
        "reasoning_without_answer",
    ),
    "harmony, as text": Schema(
        {"messages": [ASK, TELL | {
            "content": "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
            "<|channel|>final<|message|>At 9.<|return|>"
        }]},
        MESSAGES,
        f"U Next bus?|A {THOUGHT}At 9.",
    ),
    "harmony, a call as text": Schema(
        {"messages": [ASK, TELL | {"content": "<|channel|>commentary to=functions.bus<|message|>{}<|call|>"}]},
        MESSAGES,
        "unknown_marks",
    ),
    "responses": Schema(
        {
            "messages": [
                ASK | {"type": "message", "content": [{"type": "input_text", "text": "Next bus?"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look it up."}]},
                {"type": "function_call", "name": "bus", "arguments": SERIALIZED, "call_id": "c7"},
                {"type": "function_call_output", "call_id": "c7", "output": "at 9"},
                TELL | {"type": "message", "content": [{"type": "output_text", "text": "At 9."}]},
            ],
            "tools": [FLAT],
        },
        MESSAGES,
        f"U Next bus?|A {THOUGHT}{CALLED}|T at 9|A At 9.",
        tools=["bus"],
    ),
    "dolci, calls in Python": Schema(
        {"messages": [
            {"role": "system", "content": "Be brief.", "functions": json.dumps([BUS])}, ASK,
            {"role": "assistant", "content": None, "function_calls": "bus(stop='Mill')"},
            {"role": "environment", "content": "at 9"}, TELL,
        ]},
        MESSAGES | {"fields": {"tools": "messages[].functions"}, "speakers": {"environment": "tool"}},
        f"S Be brief.|{WITH_CALL}",
        tools=["bus"],
    ),
    "lmsys-chat": Schema(
        {"model": "m-1", "conversation": [ASK, TELL], "turn": 1, "openai_moderation": [{"flagged": False}]},
        MESSAGES | {"ignore": ["openai_moderation"]},
        "U Next bus?|A At 9.",
    ),
    "trl vision": Schema({"images": [{"path": "b.png"}], "messages": [ASK, TELL]}, MESSAGES, "unsupported_part"),
    "llava": Schema({"image": "b.png", "conversations": gpt("<image>\nA bus?", "Yes.")}, MESSAGES, "unsupported_part"),
    "openhermes": Schema(
        {"topic": None, "conversations": [turn | {"weight": None} for turn in gpt("Next bus?", "At 9.")]},
        MESSAGES,
        "U Next bus?|A At 9.",
    ),
    "gsm8k": Schema(
        {"question": "1 + 1?", "answer": "<<1+1=2>>2\n#### 2"}, {"layout": "prompt-response"}, "U 1 + 1?|A <<1+1=2>>2\n#### 2"
    ),
    "verl": Schema({"prompt": [ASK], "reward_model": {"ground_truth": "9"}}, {}, "unknown_layout"),
    "ultrafeedback": Schema(
        {"prompt": "Warm?", "chosen": sided("Yes."), "rejected": sided("No."), "messages": sided("Yes."), "score_chosen": 8.0,
         "score_rejected": 2.0},
        PAIRS | {"ignore": ["messages"]},
        PAIR,
        PREFERENCES,
    ),
    "ultrafeedback, cleaned": Schema(
        {"prompt": "Warm?", "chosen": sided("Yes."), "chosen-rating": 4.5, "rejected": sided("No."), "rejected-rating": 2.0},
        PAIRS,
        PAIR,
        PREFERENCES,
    ),
    "ultrafeedback, rated": Schema(
        {"instruction": "Warm?", "completions": [
            {"response": "No.", "overall_score": 2.0, "fine-grained_score": 1.0},
            {"response": "Yes.", "overall_score": 9.0, "fine-grained_score": 4.0},
        ]},
        {"layout": "rated"},
        PAIR,
        PREFERENCES,
    ),
    "dolci think": Schema(
        {"chosen": sided("<think>a</think>\nYes."), "rejected": sided("<think>b</think>\nNo."), "preference_type": "delta"},
        PAIRS | {"ignore": ["preference_type"]},
        "U Warm?|A <think>a</think>\nYes.|A <think>b</think>\nNo.",
        PREFERENCES,
    ),
    "helpsteer 2": Schema(
        {"prompt": "Warm?", "response_1": "Yes.", "response_2": "No.", "preference_strength": -2, "preference_statement": "@1"},
        VOTES | {"ignore": ["preference_statement"]},
        PAIR,
        PREFERENCES,
    ),
    "webgpt": Schema(
        {"question": {"full_text": "Warm?"}, "answer_0": "No.", "score_0": -0.5, "answer_1": "Yes.", "score_1": 0.5},
        VOTES,
        PAIR,
        PREFERENCES,
    ),
    "shp": Schema(
        {"history": "Warm?", "human_ref_A": "No.", "human_ref_B": "Yes.", "labels": 0, "score_A": 1, "score_B": 4},
        VOTES | {"ignore": ["labels"]},
        PAIR,
        PREFERENCES,
    ),
    "capybara": Schema(
        {"prompt": "Judge this.", "chosen": sided("Yes."), "rejected": sided("No.")}, PAIRS, "different_prompts", PREFERENCES
    ),
    "orca": Schema(
        {"system": "Be brief.", "question": "Warm?", "chosen": "Yes.", "rejected": "No."},
        PAIRS,
        f"S Be brief.|{PAIR}",
        PREFERENCES,
    ),
    "arena": Schema(
        {"winner": "both_bad", "conversation_a": sided("Yes."), "conversation_b": sided("No.")}, VOTES, "tie", PREFERENCES
    ),
    "hh-rlhf": Schema(
        {"chosen": "\n\nHuman: Warm?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Warm?\n\nAssistant: No."},
        {"layout": "pairs"},
        PAIR,
        PREFERENCES,
    ),
    "orpo mix": Schema(
        {"chosen": sided("Yes."), "rejected": sided("No."), "prompt": "Warm?", "question": "Warm?"},
        PAIRS | {"ignore": ["question"]},
        PAIR,
        PREFERENCES,
    ),
    "nemo-rl": Schema(
        {"context": turns("U Warm?"), "completions": [
            {"rank": rank, "completion": turns(f"A {text}")} for rank, text in ((1, "No."), (0, "Yes."))
        ]},
        {"layout": "rated"},
        PAIR,
        PREFERENCES,
    ),
    "openai, pairs": Schema(
        {"input": {"messages": turns("U Warm?"), "tools": []}, "preferred_output": turns("A Yes."),
         "non_preferred_output": turns("A No.")},
        PAIRS,
        PAIR,
        PREFERENCES,
    ),
    "when2call": Schema(
        {"tools": [json.dumps(BUS)], "messages": turns("U Warm?"), "chosen_response": turns("A Yes.")[0],
         "rejected_response": turns("A No.")[0]},
        PAIRS,
        PAIR,
        PREFERENCES,
        ["bus"],
    ),
    "ms-swift": Schema({"messages": sided("Yes."), "rejected_response": "No.", "tools": "[]"}, PAIRS, PAIR, PREFERENCES),
    "llama-factory": Schema(
        {"conversations": gpt("Warm?"), "chosen": gpt("", "Yes.")[1], "rejected": gpt("", "No.")[1]},
        PAIRS,
        PAIR,
        PREFERENCES,
    ),
    "kto mix": Schema(
        {"prompt": turns("U Warm?"), "completion": turns("A Yes."), "label": True},
        {"layout": "unpaired"},
        "U Warm?|A Yes.",
        "unpaired",
    ),
}  # fmt: skip


def outcome(schema: Schema, source: dict[str, Any]) -> tuple[str, list[str]]:
    """The row as one line with the names of its tools, or the reason why there is none; SnaketuneError if the run stops."""
    stated = Source(files=["x"], **source)
    unstated = UnstatedColumns(stated)
    try:
        (made,) = canonical_rows([RawRow("row", 1, schema.row)], kind=schema.kind, source=stated, repair=())
    except UnknownLayout as error:
        return error.reason, []
    if isinstance(made.row, Malformed | Dropped):
        return made.row.reason, []
    unstated.add(made)
    unstated.finish()
    unstated.check("x", schema.kind)
    return compact(made.row.turns), [tool["function"]["name"] for tool in json.loads(made.row.tools or "[]")]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_public_schema_is_read_as_stated_and_never_otherwise(name):
    schema = SCHEMAS[name]
    assert outcome(schema, schema.source) == (schema.expected, schema.tools)
    try:
        by_auto = outcome(schema, {})
    except SnaketuneError as error:
        (entry,) = yaml.safe_load(re.search(r"^- .*(?:\n  .*)*", str(error), re.MULTILINE)[0])
        del entry["files"]
        by_auto = outcome(schema, entry)
    if by_auto[0] not in ("unknown_layout", "unknown_role") and "where" not in schema.source:
        assert by_auto == (schema.expected, schema.tools)


def test_weights_of_messages_and_variables_of_rows_come_with_the_schema():
    def row_of(name: str) -> Any:
        schema = SCHEMAS[name]
        source = Source(files=["x"], **schema.source)
        (made,) = canonical_rows([RawRow("row", 1, schema.row)], kind=schema.kind, source=source, repair=())
        return made.row

    assert [turn.get("weight", 1) for turn in row_of("openai").messages] == [1, 0, 1, 1]
    assert json.loads(row_of("smoltalk2").template_variables) == {"enable_thinking": False, "xml_tools": []}
    assert (
        "reasoning_in_marks" in row_of("open-thoughts").notes
        and "reasoning_in_marks" in row_of("harmony, as text").notes
    )


@pytest.mark.parametrize(
    "calls", ["bus(", "bus('Mill')", "bus(stop=now())", "x = 1", "bus", 'print("a") if b else c', "import os", ""]
)
def test_other_python_is_no_call(calls):
    row = {"messages": [ASK, {"role": "assistant", "content": None, "function_calls": calls}, RESULT, TELL]}
    assert outcome(Schema(row, {}, ""), MESSAGES)[0] in ("bad_tool_call", "non_string_content", "missing_column")


def test_several_calls_of_one_response_are_one_turn():
    calls = [{"type": "function_call", "name": "bus", "arguments": SERIALIZED, "call_id": one} for one in ("c1", "c2")]
    results = [{"type": "function_call_output", "call_id": one, "output": one} for one in ("c2", "c1")]
    row = {"messages": [ASK, TELL | {"content": "I look."}, *calls, *results, TELL]}
    assert outcome(Schema(row, {}, ""), MESSAGES)[0] == f"U Next bus?|A I look.\n{CALLED}\n{CALLED}|T c1|T c2|A At 9."
