"""Supervised turns: weights of turns under every train_on, on both paths; and documents, which are supervised entirely."""

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import CHATML, LLAMA3, TEXTS, chat_of, families, messages

from snaketune.corpus.rows import SCHEMAS, with_weights
from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.token_rows import conversation_rows, pair_rows
from snaketune.tokenization.turn_columns import conversation_turns, has_weights, pair_turns

WEIGHTS = [
    [True] * 4,
    [True, False, True, True],
    [True, True, False, False],
    [False, False, False, True],
    [True, False] * 2,
]
# The supervised contents of "q1" "b1" "q2" "d2", by train_on and weights.
SUPERVISED = {
    "assistant": [["b1", "d2"], ["d2"], ["b1"], ["d2"], []],
    "last": [["d2"], ["d2"], [], ["d2"], []],
}


def table(rows: list, weights: list, key: str = "supervised") -> pa.Table:
    weighted = [
        [turn | {key: weight} for turn, weight in zip(row, own)] for row, own in zip(rows, weights, strict=True)
    ]
    schema = SCHEMAS["conversations"] if key == "supervised" else with_weights(SCHEMAS["conversations"])
    return pa.table(
        {"messages": pa.array(weighted, schema.field("messages").type), "tools": pa.nulls(len(rows), pa.string())}
    )


def supervised_texts(chat, sequences) -> list[list[str]]:
    found = []
    for row in range(len(sequences.lengths)):
        one = sequences.rows(np.array([row]))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], one.supervised, [0]])))
        found.append([chat.text(one.ids[a:b]) for a, b in zip(edges[::2], edges[1::2])])
    return found


@pytest.fixture(scope="module", params=["chatml", "llama3-roles"])
def chat(request, tmp_path_factory) -> ChatTokenizer:
    template = {"chatml": CHATML.read_text(), "llama3-roles": LLAMA3}[request.param]
    return chat_of(tmp_path_factory.mktemp(request.param) / "t", families()["qwen"], template)


@pytest.mark.parametrize("train_on", SUPERVISED)
def test_turns_of_weight_0_are_not_supervised(chat, train_on):
    rows = [messages("q1", "b1", "q2", "d2")] * len(WEIGHTS)
    turns = conversation_turns(table(rows, WEIGHTS), train_on)
    found, fallback = batched_encoder(chat)[0].encode(turns)
    assert not len(fallback)
    for sequences in (found, encode_turns(chat, turns)):
        texts = [[text.removesuffix("<|im_end|>") for text in own] for own in supervised_texts(chat, sequences)]
        assert texts == SUPERVISED[train_on]
    assert found.ends_turn.sum() == 4 * len(rows)


def test_train_on_all_excludes_the_tokens_of_turns_of_weight_0(chat):
    rows = [messages("q1", "b1", "q2", "d2")] * len(WEIGHTS)
    turns = conversation_turns(table(rows, WEIGHTS), "all")
    found, fallback = batched_encoder(chat)[0].encode(turns)
    assert fallback.tolist() == [1, 2, 3, 4]
    expected = encode_turns(chat, turns)
    assert found.supervised.tolist() == expected.supervised.tolist()
    whole, second, last_two, last, odd = ("".join(own) for own in supervised_texts(chat, found))
    assert whole == chat.text(found.rows(np.array([0])).ids)
    for text, without in ((second, "b1"), (last_two, "d2"), (last, "q1"), (odd, "b1")):
        assert without not in text and len(text) < len(whole)
    assert "q1" in second and "d2" in second and "user" not in last


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_tokens_have_the_weight_of_their_turn(chat, train_on):
    """Turn by turn as with the flags, and as many runs as there are weights, also where two turns adjoin."""
    rows = [messages("q1", "b1", "q2", "d2")] * 3
    weights = [[1, 0.5, 1, 2], [1, 0, 0.25, 1], [1, 1, 1, 1]]
    turns = conversation_turns(table(rows, weights, "weight"), train_on)
    assert has_weights(table(rows, weights, "weight")) and turns.wanted.dtype == np.float32
    found, fallback = batched_encoder(chat)[0].encode(turns)
    assert fallback.tolist() == ([0, 1] if train_on == "all" else [])
    assert found.supervised.tolist() == encode_turns(chat, turns).supervised.tolist()
    assert found.supervised.dtype == np.float32
    flags = [[[other == turn for other in range(4)] for _ in rows] for turn in range(4)]
    own = np.array([encode_turns(chat, conversation_turns(table(rows, one), train_on)).supervised for one in flags])
    expected = (own * np.repeat(np.array(weights).T, found.lengths, axis=1)).sum(0)
    # With `all`, the line break after the last turn belongs to no turn.
    expected[own.all(0)] = 1
    assert found.supervised.tolist() == expected.tolist()
    made = conversation_rows(pa.array(["1", "2", "3"]), found, np.zeros(3, bool))
    (runs, offsets), (of_runs, run_offsets) = made.supervised_runs, made.run_weights
    assert offsets.tolist() == (2 * run_offsets).tolist() and len(of_runs) == len(runs) // 2
    restored = np.zeros(len(found.ids), np.float32)
    for row in range(3):
        for run in range(run_offsets[row], run_offsets[row + 1]):
            start = found.starts[row]
            restored[start + runs[2 * run] : start + runs[2 * run + 1]] = of_runs[run]
    assert restored.tolist() == found.supervised.tolist()


def test_train_on_all_with_weights_needs_a_template_that_ends_every_turn(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    chat = chat_of(tmp_path / "t", families()["gpt2"], template)
    rows, weights = [messages("a", "b")], [[False, True]]
    assert encode_turns(chat, conversation_turns(table(rows, weights), "assistant")).supervised.any()
    with pytest.raises(SnaketuneError, match=r"weight than 1.*train_on"):
        encode_turns(chat, conversation_turns(table(rows, weights), "all"))


def test_pairs_supervise_the_turns_of_completions_that_have_a_weight(chat):
    chosen = [{"role": role, "content": text, "supervised": is_supervised} for role, text, is_supervised in
            (("assistant", "x1", False), ("user", "y", True), ("assistant", "z2", True))]  # fmt: skip
    rejected = [{"role": "assistant", "content": "no", "supervised": True}]
    prompt = [turn | {"supervised": True} for turn in messages("a", "b", "c")]
    type_ = SCHEMAS["preferences"].field("prompt").type
    rows = {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}
    turns = pair_turns(pa.table({name: pa.array(own, type_) for name, own in rows.items()}))
    found, _ = batched_encoder(chat)[0].encode(turns)
    assert found.supervised.tolist() == encode_turns(chat, turns).supervised.tolist()
    texts = [[text.removesuffix("<|im_end|>") for text in own] for own in supervised_texts(chat, found)]
    assert texts == [["z2"], ["no"]]
    assert pair_rows(pa.array(["1"]), found, np.zeros(1, bool)).supervised_tokens.tolist() == [found.supervised.sum()]


DOCUMENTS = [
    "A text, and <|im_end|> in it; <s> too, </s>.",
    "  spaces \n\n\tand ☂ 漢字 ",
    "<|im_start|>assistant\nHello<|im_end|>",
    "word " * 3000,
    *TEXTS[:40],
]


@pytest.mark.parametrize("family", ["gpt2", "llama2", "mistral", "qwen", "t5"])
def test_documents_are_text_and_eos_and_supervised_entirely(tmp_path, family):
    chat = chat_of(tmp_path / "t", families()[family], CHATML.read_text()).for_documents()
    rows = [[{"role": "text", "content": text}] for text in DOCUMENTS]
    turns = conversation_turns(table(rows, [[True]] * len(rows)), "all")
    expected = encode_turns(chat, turns)
    found, fallback = batched_encoder(chat)[0].encode(turns) if family != "t5" else (expected, None)
    if family in ("gpt2", "qwen"):
        # The documents with control strings.
        assert fallback.tolist() == [0, 2]
    assert found.ids.tolist() == expected.ids.tolist()
    tokens = conversation_rows(pa.array([str(n) for n in range(len(rows))]), found, np.zeros(len(rows), bool))
    # Only the first token of each has no token before it.
    assert tokens.supervised_tokens.tolist() == (found.lengths - 1).tolist()
    assert found.ends_turn.sum() == len(rows)
    for number, text in enumerate(DOCUMENTS):
        ids = found.rows(np.array([number])).ids
        assert ids[-1] == chat.eos_id
        if family != "t5":
            assert chat.template_only[ids].sum() == 1
        if family in ("gpt2", "qwen"):
            assert chat.text(ids) == text + "</s>"


def test_a_document_starts_with_bos_if_the_tokenizer_adds_it(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = families()["gpt2"]
    plain = chat_of(tmp_path / "plain", tokenizer, CHATML.read_text()).for_documents()
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    opened = chat_of(tmp_path / "bos", tokenizer, CHATML.read_text()).for_documents()
    row = [[{"role": "text", "content": "the cat"}]]
    assert plain.text(plain.encode(row)[0].ids) == "the cat</s>"
    assert opened.text(opened.encode(row)[0].ids) == "<s>the cat</s>"
