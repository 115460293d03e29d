"""All chat templates that TRL ships: the same text as transformers renders, and every turn supervised as it is generated."""

import json
import re
from importlib.metadata import files
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from snaketune.corpus.rows import SCHEMAS, VARIABLES
from snaketune.corpus.values.tools import tools_of
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import DATE_KEY, ChatTokenizer
from snaketune.tokenization.chat_template import TYPED
from snaketune.tokenization.creation.check import SUFFIX, check, training_template
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.template import Refused, writes_date
from snaketune.tokenization.turn_columns import conversation_turns

SHIPPED = {path.name: path.read_text() for path in files("trl") if path.parent.name == "chat_templates"}
ORIGINALS = sorted(name for name in SHIPPED if name.endswith(".jinja") and not name.endswith(SUFFIX))
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
CONTROL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|<｜[^<>]+｜>|\[/?[A-Z_]+\]|<bos>|<eos>|<pad>|</s>"
)
TOOLS = tools_of([{"name": "now", "description": "Time.", "parameters": {"type": "object", "properties": {}}}])
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
QUESTIONS = ({"role": "user", "content": "Which day?"}, {"role": "user", "content": "And then?"})

THINKING = ({}, {"enable_thinking": True}, {"enable_thinking": False})
THOUGHTS = re.compile(r"<think>\n(.*?)\n</think>")


def answer(content: str, thought: str = "") -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{content}" if thought else content}


ROWS = {
    "one turn": ([QUESTIONS[0], answer("Monday.")], None),
    "two turns": ([QUESTIONS[0], answer("Monday."), QUESTIONS[1], answer("Tuesday.")], None),
    "system": ([{"role": "system", "content": "Be brief."}, QUESTIONS[0], answer("Monday.")], None),
    "reasoning": ([QUESTIONS[0], answer("Monday.", "A week."), QUESTIONS[1], answer("Tuesday.", "The next.")], None),
    "tools": ([QUESTIONS[0], answer(CALL), {"role": "tool", "content": "noon"}, answer("At noon.")], TOOLS),
    "tools and reasoning": (
        [QUESTIONS[0], answer(CALL, "Look."), {"role": "tool", "content": "noon"}, answer("At noon.", "Seen.")], TOOLS,
    ),
}  # fmt: skip


def byte_tokenizer(template: str, empty_reasoning: str = "mask") -> ChatTokenizer:
    """A byte tokenizer with the control tokens of a template, and TRL's training template if there is one."""
    names = dict.fromkeys([*TOKENS.values(), *CONTROL.findall(template)])
    tokenizer = Tokenizer(
        models.BPE(vocab={byte: at for at, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    _, training = training_template(template) or ("", "")
    dated = {DATE_KEY: "2026-01-31"} if writes_date(template) else {}
    return ChatTokenizer(json.loads(tokenizer.to_str()), TOKENS | dated, template, training, empty_reasoning)


def encode(
    chat: ChatTokenizer, messages: list[dict], tools: str | None, reasoning: str = "exact", variables: str | None = None
):
    turns = [turn | {"supervised": True} for turn in messages]
    table = pa.table(
        {"messages": [turns], "tools": [tools], "template_variables": [variables]},
        pa.schema([*(SCHEMAS["conversations"].field(n) for n in ("messages", "tools")), VARIABLES]),
    )
    return encode_turns(chat, conversation_turns(table, "assistant", reasoning))


def sequences(encoded) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids and supervision of the trunk and of each branch with what it continues."""
    (branches,) = encoded.branches or (np.zeros((0, 3), np.int32),)
    starts = [0, *branches[:, 0].tolist(), len(encoded.ids)]
    paths = [np.arange(starts[1])]
    for (start, prefix, parent), (_, end) in zip(branches.tolist(), list(pairwise(starts))[1:], strict=True):
        paths.append(np.append(paths[parent][:prefix], np.arange(start, end)))
    return [(encoded.ids[path], encoded.supervised[path]) for path in paths]


def rendered(chat: ChatTokenizer, messages: list[dict], tools: str | None, prompt: bool = False, **more) -> str:
    source = chat.template.text
    if chat.template.closings[False] and not prompt:
        # GLM's turns end with the token that begins the next one; TRL's training template writes it after the last one too.
        source = chat.template.training_text
    if source.startswith(TYPED):
        source = source.removeprefix(TYPED)
        messages = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
    texts, _ = render_jinja_template(
        [messages],
        tools and json.loads(tools),
        chat_template=source,
        add_generation_prompt=prompt,
        **TOKENS,
        **more,
    )
    return texts[0]


# Reasons, by template and row: no form for tools or system turns, or the reasoning even of the last turn is left out.
NO_TOOLS = {"tools": "template_error", "tools and reasoning": "template_error"}
OMITS_TOOLS = {"tools": "tools_left_out", "tools and reasoning": "tools_left_out"}
REFUSED = {
    "cohere": NO_TOOLS,
    "cohere2": NO_TOOLS,
    "deepseek_r1_distill": {"reasoning": "reasoning_left_out"} | OMITS_TOOLS,
    "deepseekv3": {"reasoning": "reasoning_left_out"} | NO_TOOLS,
    "gemma": {"system": "template_error"} | NO_TOOLS,
    "gemma3": NO_TOOLS,
    "idefics3": OMITS_TOOLS,
    "llama3": OMITS_TOOLS,
    # They write a call without the text beside it.
    "llama3_1": {"tools and reasoning": "tool_call_left_out"},
    "llama3_2": {"tools and reasoning": "tool_call_left_out"},
    "llava_next": NO_TOOLS,
    "phi3": OMITS_TOOLS,
    "phi3_5": OMITS_TOOLS,
    "qwen2_5_vl": OMITS_TOOLS,
    "smolvlm": OMITS_TOOLS,
}


def generated(chat: ChatTokenizer, view: list[dict], tools: str | None) -> tuple[str, int, int]:
    """The text of a view, and where its last turn begins and ends: behind the prompt up to the last control token, by
    transformers' renderer; where the turn doesn't follow the prompt, by the marks of TRL's training template."""
    text = rendered(chat, view, tools)
    prompts = [rendered(chat, view[:-1], tools, True, **more) for more in THINKING]
    start = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
    if start is None:
        (marked,), (spans,) = render_jinja_template(
            [view],
            tools and json.loads(tools),
            chat_template=chat.template.training_text,
            return_assistant_tokens_mask=True,
            **TOKENS,
        )
        assert marked == text
        start = spans[-1][0]
    ends = [found.end() for found in CONTROL.finditer(text, start)]
    # Phi's templates write one more token after a whole conversation.
    return text, start, ends[-2] if text.endswith("<|end|>\n<eos>") else ends[-1]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ORIGINALS)
def test_turns_are_supervised_as_they_are_generated(name, row):
    chat = byte_tokenizer(SHIPPED[name], "supervise")
    messages, tools = ROWS[row]
    if reason := REFUSED.get(name.removesuffix(".jinja"), {}).get(row):
        with pytest.raises(Refused) as refused:
            encode(chat, messages, tools)
        assert refused.value.reason == reason
        return
    encoded = encode(chat, messages, tools)
    given = chat.template.prepared(messages, tools)
    branches = sequences(encoded)
    assert chat.text(branches[0][0]) == rendered(chat, given, tools)
    supervised = 0
    for number in (at for at, message in enumerate(given) if message["role"] == "assistant"):
        text, start, end = generated(chat, given[: number + 1], tools)
        first, last = (len(chat.encode_text(text[:at]).ids) for at in (start, end))
        (mask,) = {
            mask[first:last].tobytes()
            for ids, mask in branches
            if chat.text(ids[:last]) == text[:end] and mask[first:last].any()
        }
        assert np.frombuffer(mask, bool).all()
        supervised += last - first
        thought = THOUGHTS.search(messages[number]["content"])
        assert thought is None or thought[1] in text[start:end]
    # Nothing else is supervised, and nothing twice.
    assert supervised == encoded.supervised.sum()


def test_training_templates_are_found_by_the_text_of_the_original():
    for name in (name for name in SHIPPED if name.endswith(SUFFIX)):
        original = name.replace(SUFFIX, ".jinja")
        assert training_template(SHIPPED[original] + "\n") == (original.removesuffix(".jinja"), SHIPPED[name])
        assert training_template(SHIPPED[original] + "{# changed #}") is None


def qwen3(name: str = "qwen3.jinja", empty_reasoning: str = "mask") -> ChatTokenizer:
    return byte_tokenizer(SHIPPED[name], empty_reasoning)


def shown(chat: ChatTokenizer, encoded) -> list[str]:
    """Each sequence of the tree, with brackets around what is supervised."""
    texts = []
    for ids, mask in sequences(encoded):
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        texts.append(
            "".join(f"[{chat.text(ids[a:b])}]" if mask[a] else chat.text(ids[a:b]) for a, b in pairwise(edges))
        )
    return texts


def test_the_reasoning_of_each_turn_is_a_branch_of_what_later_turns_see():
    chat, (messages, tools) = qwen3(), ROWS["reasoning"]
    trunk, branch = shown(chat, encode(chat, messages, tools))
    question, other = (f"<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\n" for turn in QUESTIONS)
    second = "[<think>\nThe next.\n</think>\n\nTuesday.<|im_end|>]"
    assert trunk == f"{question}Monday.<|im_end|>\n{other}{second}\n"
    assert branch == f"{question}[<think>\nA week.\n</think>\n\nMonday.<|im_end|>]"


@pytest.mark.parametrize("name", ["qwen3.jinja", "glm4moe.jinja", "gptoss.jinja"])
@pytest.mark.parametrize("reasoning", ["exact", "last", "none"])
def test_text_that_looks_like_control_tokens_stays_text_in_trees(name, reasoning):
    chat, (messages, tools) = qwen3(name), ROWS["reasoning"]
    (token,) = {chat.id_to_token(chat.stop_ids[-1])}
    hostile = [messages[0] | {"content": f"say {token} now"}, *messages[1:]]
    plain, guarded = (encode(chat, rows, tools, reasoning) for rows in (messages, hostile))
    assert [chat.is_control(ids).sum() for ids, _ in sequences(guarded)] == [
        chat.is_control(ids).sum() for ids, _ in sequences(plain)
    ]
    for (ids, mask), (other, mask_of_other) in zip(sequences(plain), sequences(guarded), strict=True):
        assert chat.text(ids[mask]) == chat.text(other[mask_of_other])


def test_a_turn_that_only_the_next_one_would_end_is_ended_and_the_model_stops_there():
    chat, (messages, tools) = qwen3("glm4moe.jinja"), ROWS["tools"]
    assert chat.template.closings == {False: "<|user|>", True: "<|observation|>"}
    assert {chat.id_to_token(id) for id in chat.stop_ids} == {"<eos>", "<|user|>", "<|observation|>"}
    (trunk,) = shown(chat, encode(chat, messages, tools))
    assert (
        "</tool_call><|observation|>]\n<tool_response>\nnoon\n</tool_response><|assistant|>\n<think></think>[" in trunk
    )
    assert trunk.endswith("\n<think></think>[\nAt noon.<|user|>]")
    # A template without any token between turns stays refused.
    with pytest.raises(SnaketuneError, match="the end of turn isn't supervised"):
        check(byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"), [])


def test_other_treatments_of_reasoning():
    chat, (messages, tools) = qwen3(), ROWS["reasoning"]
    question, other = (f"<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\n" for turn in QUESTIONS)
    first, second = (f"<think>\n{thought}\n</think>\n\n" for thought in ("A week.", "The next."))
    assert shown(chat, encode(chat, messages, tools, "last")) == [
        f"{question}Monday.<|im_end|>\n{other}[{second}Tuesday.<|im_end|>]\n"
    ]
    assert shown(chat, encode(chat, messages, tools, "all")) == [
        f"{question}[{first}Monday.<|im_end|>]\n{other}[{second}Tuesday.<|im_end|>]\n"
    ]
    empty = "<think>\n\n</think>\n\n"
    assert shown(chat, encode(chat, messages, tools, "none")) == [
        f"{question}Monday.<|im_end|>\n{other}{empty}[Tuesday.<|im_end|>]\n",
        f"{question}{empty}[Monday.<|im_end|>]",
    ]


def test_a_template_that_rewrites_nothing_makes_no_trees():
    chat, (messages, tools) = qwen3("qwen2_5.jinja"), ROWS["reasoning"]
    for reasoning in ("exact", "last", "all"):
        encoded = encode(chat, messages, tools, reasoning)
        assert encoded.branches is None and encoded.supervised.sum() == encode(chat, messages, tools).supervised.sum()


def test_the_tree_of_a_long_conversation_grows_with_it_and_not_with_its_square():
    chat = qwen3()
    turns = [turn for number in range(8) for turn in (QUESTIONS[number % 2], answer("Monday." * 5, "A week. " * 20))]
    encoded = encode(chat, turns, None)
    views = [encode(chat, turns[: at + 2], None, "last") for at in range(0, len(turns), 2)]
    assert len(encoded.branches[0]) == 7
    assert encoded.supervised.sum() == sum(view.supervised.sum() for view in views)
    assert len(encoded.ids) < 0.65 * sum(len(view.ids) for view in views)


def test_a_template_with_todays_date_gets_a_fixed_one():
    chat = byte_tokenizer(SHIPPED["llama3_1.jinja"].replace('"26 Jul 2024"', 'strftime_now("%d %b %Y")'))
    assert writes_date(SHIPPED["gptoss.jinja"]) and "2026-01-31" in qwen3("gptoss.jinja").template.text
    assert not writes_date(chat.template.text)


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_tokenizer_stage_accepts_them(name):
    check(byte_tokenizer(SHIPPED[name]), [])
