"""Variables of chat templates, and the block that templates write for reasoning in turns without any, on models' templates."""

import json

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import chat_of, families
from test_trl_templates import (
    CALL,
    ORIGINALS,
    QUESTIONS,
    ROWS,
    SHIPPED,
    TOOLS,
    answer,
    byte_tokenizer,
    encode,
    qwen3,
    shown,
)

from snaketune.corpus.rows import SCHEMAS, VARIABLES
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.template import Refused, variable_names
from snaketune.tokenization.turn_columns import pair_turns, turns_of

OFF, ON = (json.dumps({"enable_thinking": value}) for value in (False, True))
ONE = [QUESTIONS[0], answer("Monday.")]
PROMPT = "<|im_start|>user\nWhich day?<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
THINKERS = ["qwen3.jinja", "qwen3_5_think.jinja", "qwen3_6.jinja", "qwen3_8.jinja", "glm4moe.jinja"]


def test_empty_reasoning_is_masked_supervised_or_omitted():
    chat = qwen3()
    assert shown(chat, encode(chat, ONE, None)) == [f"{PROMPT}{EMPTY}[Monday.<|im_end|>]\n"]
    chat = qwen3(empty_reasoning="supervise")
    assert shown(chat, encode(chat, ONE, None)) == [f"{PROMPT}[{EMPTY}Monday.<|im_end|>]\n"]
    chat = qwen3(empty_reasoning="omit")
    assert shown(chat, encode(chat, ONE, None)) == [f"{PROMPT}[Monday.<|im_end|>]\n"]


@pytest.mark.parametrize("content", [answer("Monday.")["content"], EMPTY + "Monday.", "<think></think>Monday."])
@pytest.mark.parametrize("treatment", ["mask", "supervise", "omit"])
def test_an_empty_block_of_the_row_is_the_templates(treatment, content):
    chat = qwen3(empty_reasoning=treatment)
    turns = [QUESTIONS[0], {"role": "assistant", "content": content}]
    assert shown(chat, encode(chat, turns, None)) == shown(chat, encode(chat, ONE, None))


@pytest.mark.parametrize("name", THINKERS)
def test_what_is_masked_is_the_prompt_of_generation_without_thinking(name):
    chat = qwen3(name)
    assert "think>" in chat.template.empty_block
    for turns, tools in (ROWS["one turn"], ROWS["system"], ROWS["tools"]):
        prompt = chat.encode_prompt(turns[:-1], tools, OFF)
        end = chat.text(prompt).rsplit("assistant", 1)[1]
        said = "At noon." if tools else "Monday."
        for variables in (None, OFF):
            encoded = encode(chat, turns, tools, "last", variables)
            (text,) = shown(chat, encoded)
            assert f"{end}[{said}" in text or f"{end}[\n{said}" in text
        rows = encode(chat, turns, tools, "last", OFF)
        assert rows.ids[: len(prompt)].tolist() == prompt.tolist()
        assert rows.supervised[len(prompt)] and not rows.supervised[len(prompt) - 1]


@pytest.mark.parametrize("treatment", ["mask", "supervise", "omit"])
def test_turns_with_reasoning_and_with_it_and_calls(treatment):
    chat = qwen3(empty_reasoning=treatment)
    plain = qwen3(empty_reasoning="supervise")
    thinking = [QUESTIONS[0], answer("Monday.", "A week.")]
    assert shown(chat, encode(chat, thinking, None)) == shown(plain, encode(plain, thinking, None))
    (text,) = shown(chat, encode(chat, [QUESTIONS[0], answer(CALL)], TOOLS))
    block = {"mask": f"{EMPTY}[", "supervise": f"[{EMPTY}", "omit": "["}[treatment]
    assert f"<|im_start|>assistant\n{block}<tool_call>" in text


def test_without_the_block_no_turn_is_rewritten():
    chat = qwen3(empty_reasoning="omit")
    turns, _ = ROWS["two turns"]
    assert len(shown(qwen3(), encode(qwen3(), turns, None))) == 2
    (text,) = shown(chat, encode(chat, turns, None))
    assert text.count("[") == 2 and "think" not in text


def test_what_a_user_writes_is_no_block():
    turns = [{"role": "user", "content": f"<|im_start|>assistant\n{EMPTY}"}, answer("Monday.")]
    for treatment in ("mask", "omit"):
        chat = qwen3(empty_reasoning=treatment)
        (text,) = shown(chat, encode(chat, turns, None))
        assert turns[0]["content"] in text and text.count("<think>") == (2 if treatment == "mask" else 1)


@pytest.mark.parametrize("name", THINKERS)
def test_each_template_omits_it(name):
    chat = qwen3(name, "omit")
    for row in ("one turn", "two turns", "system", "tools"):
        assert "think>" not in "".join(shown(chat, encode(chat, *ROWS[row])))


def test_a_template_that_marks_turns_masks_and_omits_too():
    marked = SHIPPED["qwen3_training.jinja"]
    for treatment, block in (("mask", f"{EMPTY}["), ("supervise", f"[{EMPTY}"), ("omit", "[")):
        chat = byte_tokenizer(marked, treatment)
        assert shown(chat, encode(chat, ONE, None)) == [f"{PROMPT}{block}Monday.<|im_end|>]\n"]
        # Without thinking, the block is part of the prompt.
        assert shown(chat, encode(chat, ONE, None, variables=OFF)) == [f"{PROMPT}{EMPTY}[Monday.<|im_end|>]\n"]


def test_batched_rows_with_a_block_are_masked_too(tmp_path):
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = chat_of(tmp_path / "gpt2", families()["gpt2"], source)
    encoder, reason = batched_encoder(chat)
    assert encoder, reason
    contents = ["Monday.", "<think>\nA week.\n</think>\n\nMonday.", "<think></think>Monday."]
    rows = [[QUESTIONS[0] | {"supervised": True}, answer(text) | {"supervised": True}] for text in contents]
    table = pa.table({"messages": rows}, pa.schema([SCHEMAS["conversations"].field("messages")]))
    turns = turns_of(table, "assistant", "exact")
    batched, by_reference = encoder.encode(turns)
    expected = encode_turns(chat, turns)
    assert (batched.supervised == expected.supervised).all() and by_reference.tolist() == [1, 2]
    assert not batched.rows(np.array([0])).supervised[: len(chat.encode_prompt([QUESTIONS[0]]))].any()


# A template with the variables of SmolLM3's.
MODES = (
    "{% if custom_instructions or xml_tools %}<|im_start|>system\n{{ custom_instructions }}"
    "{% for tool in xml_tools or [] %}\n{{ tool }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_the_variables_that_a_template_uses():
    assert variable_names(SHIPPED["qwen3.jinja"]) == {"enable_thinking"}
    assert variable_names(MODES) == {"custom_instructions", "enable_thinking", "xml_tools"}
    assert variable_names(SHIPPED["qwen2_5.jinja"]) == set()
    # Functions of the environment, what is always passed, and loop variables aren't variables.
    assert variable_names(SHIPPED["gptoss.jinja"]) == {"builtin_tools", "model_identity", "reasoning_effort"}


def test_a_variable_that_the_template_does_not_use_is_refused_with_those_that_it_does():
    chat = qwen3()
    with pytest.raises(Refused, match=r"'thinking_budget' of template_variables; it uses enable_thinking") as refused:
        encode(chat, ONE, None, variables=json.dumps({"thinking_budget": 8}))
    assert refused.value.reason == "unused_template_variable"
    with pytest.raises(Refused, match="it uses none"):
        encode(qwen3("qwen2_5.jinja"), ONE, None, variables=OFF)
    for always in ("messages", "tools", "add_generation_prompt", "eos_token"):
        with pytest.raises(Refused, match=always):
            chat.with_variables(json.dumps({always: "x"}))
    # An empty value says nothing.
    empty = json.dumps({"custom_instructions": "", "python_tools": [], "xml_tools": None})
    assert shown(chat, encode(chat, ONE, None, variables=empty)) == shown(chat, encode(chat, ONE, None))


@pytest.mark.parametrize(
    "variables", [{"enable_thinking": False}, {"custom_instructions": "Be brief."}, {"xml_tools": ['{"name": "now"}']}]
)
@pytest.mark.parametrize("treatment", ["mask", "supervise", "omit"])
def test_the_prompt_of_generation_is_what_is_trained(variables, treatment):
    chat, serialized = byte_tokenizer(MODES, treatment), json.dumps(variables)
    prompt = chat.encode_prompt(ONE[:1], None, serialized)
    turns = [ONE[0], answer((EMPTY if "enable_thinking" in variables else "") + "Monday.")]
    encoded = encode(chat, turns, None, variables=serialized)
    assert encoded.ids[: len(prompt)].tolist() == prompt.tolist()
    assert np.flatnonzero(encoded.supervised)[0] == len(prompt)
    assert len(prompt) > len(chat.encode_prompt(ONE[:1]))


@pytest.mark.parametrize("name", [name for name in ORIGINALS if "enable_thinking" in SHIPPED[name]])
def test_every_template_trains_the_prompt_without_thinking(name):
    chat = byte_tokenizer(SHIPPED[name])
    encoded = encode(chat, ONE, None, variables=OFF)
    prompt = chat.encode_prompt(ONE[:1], None, OFF)
    assert encoded.ids[: len(prompt)].tolist() == prompt.tolist() and encoded.supervised[len(prompt)]
    assert not encoded.supervised[: len(prompt)].any()


def test_a_row_whose_reasoning_contradicts_its_variables_is_refused():
    chat, thinking = qwen3(), [QUESTIONS[0], answer("Monday.", "A week.")]
    with pytest.raises(Refused) as refused:
        encode(chat, thinking, None, variables=OFF)
    assert refused.value.reason == "reasoning_contradicts_variables"
    assert shown(chat, encode(chat, thinking, None, "none", OFF)) == [f"{PROMPT}{EMPTY}[Monday.<|im_end|>]\n"]
    assert shown(chat, encode(chat, thinking, None, variables=ON)) == shown(chat, encode(chat, thinking, None))


def test_strings_of_control_tokens_in_variables_are_refused():
    with pytest.raises(Refused) as refused:
        byte_tokenizer(MODES).with_variables(json.dumps({"custom_instructions": "end<|im_end|>"}))
    assert refused.value.reason == "control_text"


def table(kind: str, rows: list[dict]) -> pa.Table:
    schema = SCHEMAS[kind].append(VARIABLES)
    for turns in (value for row in rows for value in row.values() if isinstance(value, list)):
        turns[:] = [turn | {"supervised": True} for turn in turns]
    return pa.table({field.name: [row.get(field.name) for row in rows] for field in schema}, schema=schema)


def test_each_row_of_a_batch_has_its_variables():
    chat = byte_tokenizer(MODES)
    variables = [None, json.dumps({"custom_instructions": "A."}), None, json.dumps({"custom_instructions": "B."})]
    variables.append(variables[1])
    rows = [{"messages": ONE, "template_variables": own} for own in variables]
    encoded = encode_turns(chat, turns_of(table("conversations", rows), "assistant", "exact"))
    for number, own in enumerate(variables):
        alone = encode(chat, ONE, None, variables=own)
        assert encoded.rows(np.array([number])).ids.tolist() == alone.ids.tolist()
    assert {len(encoded.rows(np.array([number])).ids) for number in range(5)} == {
        len(encode(chat, ONE, None).ids),
        len(encode(chat, ONE, None, variables=variables[1]).ids),
    }


def test_completions_of_a_row_share_its_variables():
    chat = qwen3(empty_reasoning="supervise")
    sides = {side: [answer(text)] for side, text in (("chosen", "Monday."), ("rejected", "No."))}
    rows = [{"prompt": ONE[:1], "template_variables": own} | sides for own in (OFF, None)]
    encoded = encode_turns(chat, pair_turns(table("preferences", rows)))
    texts = [shown(chat, encoded.rows(np.array([number])))[0] for number in range(4)]
    assert texts[0] == f"{PROMPT}{EMPTY}[Monday.<|im_end|>]\n" and texts[1] == f"{PROMPT}{EMPTY}[No.<|im_end|>]\n"
    assert texts[2] == f"{PROMPT}[{EMPTY}Monday.<|im_end|>]\n"
    row = {"prompt": ONE[:1], "completion": [answer("Monday.")], "label": True, "template_variables": OFF}
    completion = encode_turns(chat, turns_of(table("unpaired", [row]), "assistant", None))
    assert shown(chat, completion) == [texts[0]]


def test_batches_pass_rows_with_variables_to_the_reference_path(tmp_path):
    source = "{% for m in messages %}<|{{ m.role }}|>{{ x }}{{ m.content }}<|end|>{% endfor %}"
    chat = chat_of(tmp_path / "gpt2", families()["gpt2"], source)
    rows = [{"messages": ONE, "template_variables": own} for own in (None, json.dumps({"x": "So: "}))]
    turns = turns_of(table("conversations", rows), "assistant", "exact")
    batched, by_reference = batched_encoder(chat)[0].encode(turns)
    assert by_reference.tolist() == [1] and batched.ids.tolist() == encode_turns(chat, turns).ids.tolist()
    assert "So: " in chat.text(batched.rows(np.array([1])).ids)
