"""Tool calls are written by the template's own `tool_calls`, complete and supervised; calls it can't write are refused."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import CHATML, FRAMES, families, messages, save_tokenizer, special
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from snaketune.corpus.rows import SCHEMAS
from snaketune.corpus.values.tools import tools_of
from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.turn_columns import conversation_turns

TOOLS = tools_of([{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])
# Like Llama 3.1's: one call per turn, with `parameters`, and no text beside it.
ONE_CALL = """\
<s>{% if tools %}<|system|>Answer {"name": ..., "parameters": ...}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
{{- '<|im_start|>assistant\n\n' }}
{%- generation %}{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|im_end|>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '<|im_start|>ipython\n\n' }}{{ m.content | tojson }}<|im_end|>
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n\n' }}
{%- generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}
{%- else %}{{ '<|im_start|>' + m.role + '\n\n' }}{{ m.content | trim }}<|im_end|>
{%- endif %}{% endfor %}"""
# The same without markers, and without markers around calls.
MARKED, ONE_CALL = ONE_CALL, re.sub(r"{%-? (end)?generation %}", "", ONE_CALL)
HALF_MARKED = re.sub(r"{%- generation %}({{ '.*?){% endgeneration %}", r"\1", MARKED, count=1, flags=re.DOTALL)
# Like Qwen 2.5's: text and any number of calls.
MANY_CALLS = """\
{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.tool_calls %}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{{ '\\n<tool_call>\\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{%- else %}{{ '\\n' + m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"""
# Turns without calls begin with an empty thought, whose tag begins like that of a call.
THOUGHTFUL = MANY_CALLS.replace(
    "{{ '\\n' + m.content }}{% endif %}{{ '<|im_end|>",
    ("{{ '\\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content }}{% endif %}{{ '<|im_end|>"),
)
# Like Mistral's: ids of nine characters, control tokens inside the turn, users and assistants in turn.
WITH_IDS = """\
{% set plain = messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls', 'defined') | list %}
{%- for m in plain %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{%- endfor %}
{%- macro checked(id) %}{% if id is not defined or id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}
{{- id }}{% endmacro %}<s>{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}
{%- for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{{- '#' + checked(call.id) }}{% endfor %}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ checked(m.tool_call_id) }}:{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}</s>
{%- endif %}{% endfor %}"""


def called(*calls: dict, text: str = "") -> str:
    """Return an assistant turn as the corpus stores it."""
    spelled = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join([text, *spelled] if text else spelled)


def call(city: str, **more) -> dict:
    return {"name": "weather", "arguments": {"city": city, **more}}


def talk(*turns: str) -> list[dict[str, str]]:
    """Return a conversation of user, assistant, tool, assistant, user, assistant, up to the number of turns."""
    roles = ("user", "assistant", "tool", "assistant", "user", "assistant")
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns)]


ONE = talk("Rain in Köln?", called(call("Köln \"Süd\"\n", days=3)), "no </s> rain", "It's dry.", "Thanks", "Bye")  # fmt: skip
TWO = talk("Where?", called(call("a"), call("b"), text="Let me look."), "x", "Both.")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    def of(template: str) -> ChatTokenizer:
        tokenizer = Tokenizer.from_str(families()["gpt2"].to_str())
        tokenizer.add_special_tokens(FRAMES + special("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
        return ChatTokenizer.load(save_tokenizer(tmp_path_factory.mktemp("calls") / "t", tokenizer, template, **config))

    return of


def encoded(chat, row, tools=TOOLS):
    """Return the text, the supervised texts, the turn ends and the ids of a row, as the stage encodes it."""
    schema = SCHEMAS["conversations"]
    columns = {"id": ["1"], "messages": [[turn | {"supervised": True} for turn in row]], "tools": [tools]}
    turns = conversation_turns(
        pa.table({name: pa.array(own, schema.field(name).type) for name, own in columns.items()}), "assistant"
    )
    done = encode_turns(chat, turns)
    if batched := batched_encoder(chat)[0]:
        both = batched.encode(turns)[0]
        for what in ("ids", "supervised", "ends_turn"):
            assert getattr(both, what).tolist() == getattr(done, what).tolist()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], done.supervised, [0]])))
    supervised = [chat.text(done.ids[a:b]) for a, b in zip(edges[::2], edges[1::2])]
    return chat.text(done.ids), supervised, (np.flatnonzero(done.ends_turn) + 1).tolist(), done.ids


IN_KÖLN = json.dumps(call('Köln "Süd"\n', days=3)["arguments"], ensure_ascii=False)


@pytest.mark.parametrize("template", [ONE_CALL, MARKED], ids=["roles", "markers"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
def test_calls_are_written_and_supervised_in_the_templates_form(chat, template, tools):
    own = chat(template)
    text, supervised, ends, ids = encoded(own, ONE, tools)
    called_so = f'{{"name": "weather", "parameters": {IN_KÖLN}}}<|im_end|>'
    assert supervised == [called_so, "It's dry.<|im_end|>", "Bye<|im_end|>"]
    assert "<tool_call>" not in text and ('"parameters": ...' in text) == bool(tools)
    # Control tokens in a result stay text, and every turn has an end.
    assert text.count("</s>") == 1 and own.eos_id not in ids
    assert len(ends) == len(ONE) and own.is_control(ids[np.array(ends) - 1]).all()


def test_text_beside_calls_and_several_calls_are_written_if_the_template_supports_them(chat):
    spelled = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
    text, supervised, ends, _ = encoded(chat(MANY_CALLS), TWO)
    two = "\n".join(["Let me look.", spelled % '{"city": "a"}', spelled % '{"city": "b"}'])
    assert supervised == [two + "<|im_end|>", "Both.<|im_end|>"]
    assert len(ends) == len(TWO) and text.count("<tool_call>") == 2
    assert encoded(chat(MANY_CALLS), ONE)[1][0] == spelled % IN_KÖLN + "<|im_end|>"
    assert "<think>" in THOUGHTFUL
    supervised = encoded(chat(THOUGHTFUL), ONE)[1]
    assert (
        supervised[0].lstrip("\n") == (spelled % IN_KÖLN).lstrip("\n") + "<|im_end|>"
        and supervised[1] == "It's dry.<|im_end|>"
    )


def test_ids_tie_results_to_calls(chat):
    row = [
        *talk("Where?", called(call("a"), call("b")), "x"),
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": called(call("c"))},
        {"role": "tool", "content": "z"},
        {"role": "assistant", "content": "Done."},
    ]
    own = chat(WITH_IDS)
    text, supervised, ends, ids = encoded(own, row)
    calls = [f'[TOOL_CALLS]weather[ARGS]{{"city": "{city}"}}#call0000{n}' for n, city in enumerate("abc", 1)]
    assert supervised == [calls[0] + calls[1] + "</s>", calls[2] + "</s>", "Done.</s>"]
    results = [f"[TOOL_RESULTS]call0000{n}:{result}[/TOOL_RESULTS]" for n, result in enumerate("xyz", 1)]
    assert text.endswith(
        calls[0] + calls[1] + "</s>" + results[0] + results[1] + calls[2] + "</s>" + results[2] + "Done.</s>"
    )
    # Control tokens inside a turn with calls don't end it.
    assert len(ends) == len(row) and [own.text(ids[[end - 1]]) for end in ends][1] == "</s>"


def test_a_call_equals_the_rendering_of_the_template(chat):
    own = chat(MANY_CALLS)
    function = call("Köln", deep={"a": [1, None, True, 2.5], "b": "x\ty"})
    expected = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [{"type": "function", "function": function}]},
    ]
    (rendered,), _ = render_jinja_template([expected], tools=json.loads(TOOLS), chat_template=own.template.text)
    assert encoded(own, talk("Rain?", called(function, text="Wait.")))[0] == rendered


@pytest.mark.parametrize("template", [ONE_CALL, MARKED], ids=["roles", "markers"])
def test_calls_and_texts_that_a_template_does_not_support_are_refused(chat, template):
    own = chat(template)
    with pytest.raises(SnaketuneError, match=r"only single tool-calls at once.*drop such rows"):
        encoded(own, TWO)
    with pytest.raises(
        SnaketuneError, match=r"doesn't write the text beside tool calls, 'Let me look.'.*chat_template"
    ):
        encoded(own, talk("Where?", called(call("a"), text="Let me look."), "x", "There."))
    thought = "<think>\nhm\n</think>\n\n"
    with pytest.raises(SnaketuneError, match="the text beside tool calls, '<think>"):
        encoded(own, talk("Where?", thought + called(call("a"))))


def test_a_template_that_omits_parts_of_calls_is_refused(chat):
    nameless = MANY_CALLS.replace("call.function.name", "'f'")
    with pytest.raises(SnaketuneError, match="changes what assistants say"):
        encoded(chat(nameless), ONE)
    for spelled in ("{}", "call.function.arguments.city"):
        short = MANY_CALLS.replace("call.function.arguments |", f"{spelled} |")
        with pytest.raises(
            SnaketuneError, match=r"doesn't write (3|'days'|'city'|'Köln.*') of a tool call.*calls weather"
        ):
            encoded(chat(short), ONE)
    first = MANY_CALLS.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
    with pytest.raises(SnaketuneError, match="changes what assistants say"):
        encoded(chat(first), TWO)


def test_a_template_may_write_calls_only_where_there_are_tools(chat):
    template = MARKED.replace("{%- if 'tool_calls' in m %}", "{%- if 'tool_calls' in m and tools %}")
    assert template != MARKED
    assert encoded(chat(template), ONE[:4])[:2] == encoded(chat(MARKED), ONE[:4])[:2]


def test_calls_need_markers_too(chat):
    with pytest.raises(SnaketuneError, match=r"marks 2 generated blocks.*tool calls.*has 3 turns"):
        encoded(chat(HALF_MARKED), ONE)


@pytest.mark.parametrize(
    "turn",
    [
        called(call("a")) + "\nand text",
        "<tool_call>\n{'name': 'weather', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "weather", "arguments": "a"}\n</tool_call>',
    ],
)
def test_malformed_calls_are_refused_in_rows_with_tools(chat, turn):
    own = chat(ONE_CALL)
    with pytest.raises(SnaketuneError, match=r"turn 2 of a row.*own form for calls.*<tool_call>.*chatml.jinja"):
        encoded(own, talk("Where?", turn))
    # Without tools, they are ordinary text.
    assert encoded(own, talk("Where?", turn), None)[1] == [turn + "<|im_end|>"]


def test_calls_stay_text_if_the_template_or_the_prompt_has_them_as_text(chat):
    chatml = chat(CHATML.read_text())
    assert encoded(chatml, TWO)[1] == [TWO[1]["content"] + "<|im_end|>", "Both.<|im_end|>"]
    prompted = messages("Rain?", called(call("a")), system="Call as <tool_call>{...}</tool_call>.")
    assert encoded(chat(ONE_CALL), prompted, None)[1] == [called(call("a")) + "<|im_end|>"]
    assert encoded(chat(ONE_CALL), prompted)[1] == ['{"name": "weather", "parameters": {"city": "a"}}<|im_end|>']


def test_control_tokens_in_calls_stay_text(chat):
    for template in (ONE_CALL, MARKED, MANY_CALLS, WITH_IDS):
        own = chat(template)
        plain, evil = (
            encoded(own, talk("Where?", called(call(city, **{key: 1})), "x", "Done."))
            for city, key in (("a", "b"), ("<|im_end|>a</s>", "<s>b"))
        )
        assert own.is_control(evil[3]).sum() == own.is_control(plain[3]).sum()
        assert [text.replace("<|im_end|>a</s>", "a").replace("<s>b", "b") for text in evil[1]] == plain[1]
