"""Reasoning, content and tool calls of generated turns, by what the family's template writes."""

import json

import pytest

from snaketune.sampling.turn_parts import TurnForm
from snaketune.tokenization.chat import ChatTokenizer
from tests.tokenization.small_tokenizers import TEMPLATES, train_in

QUESTION = {"role": "user", "content": "What time is it?"}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
)
CALL = {"name": "now", "arguments": {"zone": "UTC", "deep": {"a": [1, 2]}}}
R1 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|Assistant|><think>\n{{ message.reasoning_content }}"
    "\n</think>\n\n{{ message.content }}<|end|>{% else %}<|User|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
MAGISTRAL = R1.replace("<think>\n{% endif", "{% endif").replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
UNREADABLE = ("<tool_call>now()</tool_call>", '<tool_call>{"name": "now"}', '<tool_call>{"name": 3, "arguments": {}}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("tokenizer"), "bpe")[0].payload


def chat_with(folder, template: str) -> ChatTokenizer:
    description, config = (
        json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return ChatTokenizer(description, config, template)


def shipped(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def test_there_are_templates_to_test():
    assert len(list(TEMPLATES.glob("*.jinja"))) >= 3


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_turn_that_a_shipped_template_writes_is_split_into_what_it_was_written_from(folder, name):
    chat = chat_with(folder, shipped(name))
    form = TurnForm.of(chat)
    if chat.template.reads_calls:
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
        }
        prompt = chat.template.write([QUESTION], prompt=True, tools=TOOLS)
        turn = chat.template.write([QUESTION, answer], tools=TOOLS).removeprefix(prompt)
        parts = form.parts(prompt, turn)
        assert json.loads(parts.tool_calls) == [CALL] and not parts.unread
    prompt = chat.template.write([QUESTION], prompt=True)
    assert form.parts(prompt, "It is noon.") == (None, "It is noon.", None, False)


@pytest.mark.parametrize("template", [R1, MAGISTRAL])
def test_reasoning_is_found_whether_the_prompt_or_the_model_opens_it(folder, template):
    chat = chat_with(folder, template)
    form = TurnForm.of(chat)
    answer = {"role": "assistant", "content": "Noon.", "reasoning_content": "The sun\nis high."}
    prompt = chat.template.write([QUESTION], prompt=True)
    turn = chat.template.write([QUESTION, answer]).removeprefix(prompt).removesuffix("<|end|>")
    assert form.parts(prompt, turn)[:3] == ("The sun\nis high.", "Noon.", None)
    # Truncated while it was thinking.
    assert form.parts(prompt, turn.partition("is")[0])[:2] == ("The sun", "")


def test_a_template_without_reasoning_keys_has_the_form_of_rows(folder):
    form = TurnForm.of(chat_with(folder, shipped("chatml")))
    assert form.parts("Q", "<think>\n1 + 1\n</think>\n\n2")[:2] == ("1 + 1", "2")
    assert form.parts("Q", "1 < 2 and </think> is a tag")[:2] == (None, "1 < 2 and </think> is a tag")


@pytest.mark.parametrize("call", UNREADABLE)
def test_calls_that_cannot_be_read_stay_in_the_content(folder, call):
    parts = TurnForm.of(chat_with(folder, shipped("chatml"))).parts("Q", f"Wait. {call}")
    assert parts.unread and parts.tool_calls is None and parts.content == f"Wait. {call}"


def test_several_calls_after_text(folder):
    turn = f"Wait.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    parts = TurnForm.of(chat_with(folder, shipped("chatml"))).parts("Q", turn)
    assert parts.content == "Wait." and json.loads(parts.tool_calls) == [CALL, CALL]
