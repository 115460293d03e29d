"""Batched encoding equals the reference path, on any text, for every kind of tokenizer, template and pair."""

import json
from itertools import product, takewhile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs_by_rows import encode_pairs
from small_tokenizers import CHATML, LLAMA3, MISTRAL, PHI3, TEXTS, chat_of, conversations, families, messages
from tokenizers import AddedToken

from snaketune.tokenization import turn_columns as columns
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.batched.separable import NotSeparable, separable
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns, holds_control
from snaketune.tokenization.token_rows import pair_rows

TEMPLATES = {path.stem: path.read_text() for path in (CHATML, MISTRAL, PHI3)} | {"llama3-roles": LLAMA3}
FAMILIES = ("gpt2", "llama3", "qwen", "o200k", "llama2", "gemma", "mistral", "no-bytes", "t5")
TRAINED = ("trained-bpe", "trained-unigram")
STRINGS = [
    *("<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|end|>", "<think>"),
    *("<|", "|>", "<", ">", "/INST]", "</", "s>", "<0x0A>", "\x00", "▁", "▁▁", "a▁b", "\n", "\n\n", "\r\n", "\t", " "),
    *(
        "  ",
        "   ",
        " \n ",
        "\n  a",
        "!\n",
        "assistant\n",
        "user",
        "the cat",
        "  sat on",
        "it's",
        "'S",
        "don't",
        "(a)",
        "12",
    ),
    *(
        "1234567",
        "3.14",
        "😀",
        "👩‍👩‍👧",
        "漢字かな",
        "。",
        "é",
        "e\u0301",
        " \u0301",
        "\u0301",
        "مرحبا بك",
        "\u200f",
        "\ufeff",
    ),
    *(
        "\u00a0",
        "\u3000",
        "\u2003 x",
        "\u2028",
        "\x85",
        "\x1c ",
        "à ",
        "ﬁ",
        "\u212a",
        "ŵ",
        "a" * 90,
        " " * 40,
        "-" * 30,
    ),
    *("\U0010fffd", "\ue000", *TEXTS[:12]),
]
CONTENT = st.lists(st.one_of(st.sampled_from(STRINGS), st.text(max_size=6)), min_size=0, max_size=7).map("".join)
ROLES = st.sampled_from(
    [("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant") * 2, ("assistant",)]
)
CONVERSATION = ROLES.flatmap(
    lambda roles: st.tuples(*[CONTENT for _ in roles]).map(
        lambda contents: [{"role": role, "content": content} for role, content in zip(roles, contents)]
    )
)
BATCH = st.lists(CONVERSATION, min_size=1, max_size=5)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class ByKind(dict):
    """Encoders by (tokenizer, template), with a short repr for failing tests."""

    def __repr__(self) -> str:
        return "encoders"


@pytest.fixture(scope="module")
def both(trained, tmp_path_factory):
    """The batched encoder and the chat tokenizer by (tokenizer, template)."""
    root = tmp_path_factory.mktemp("batched")
    made = families()
    found = ByKind()
    for name, template in TEMPLATES.items():
        chats = {kind: chat_of(root / kind / name, made[kind], template) for kind in FAMILIES}
        for kind in TRAINED:
            folder = trained[kind.removeprefix("trained-")][0].payload
            description, config = (
                json.loads((folder / file).read_text()) for file in ("tokenizer.json", "tokenizer_config.json")
            )
            chats[kind] = ChatTokenizer(description, config, template)
        found.update({(kind, name): (batched_encoder(chat)[0], chat) for kind, chat in chats.items()})
    return found


def table(some: list) -> pa.Table:
    return pa.table({"messages": pa.array(some, MESSAGES)})


def accepted(template: str, batch: list) -> list:
    """Those that the template takes."""
    if template != "mistral":
        return batch
    return [own for own in batch if own[0]["role"] != "system" or own[1]["role"] == "user"]


def assert_same(found, expected):
    for what in ("offsets", "ids", "supervised", "ends_turn"):
        ours, right = getattr(found, what), getattr(expected, what)
        assert ours.tolist() == right.tolist(), what
        assert ours.dtype == right.dtype


# Each vocabulary with one template; the other pairs are slow.
ONCE = {(kind, [*TEMPLATES][number % len(TEMPLATES)]) for number, kind in enumerate(FAMILIES + TRAINED)}
BOTH = [
    pytest.param(*two, marks=[] if two in ONCE else pytest.mark.slow) for two in product(FAMILIES + TRAINED, TEMPLATES)
]


@pytest.mark.parametrize(("kind", "template"), BOTH)
@settings(max_examples=25, **COMMON)
@given(batch=BATCH, train_on=st.sampled_from(["assistant", "last", "all"]))
def test_any_text(both, kind, template, batch, train_on):
    batched, chat = both[kind, template]
    turns = columns.conversation_turns(table(accepted(template, batch)), train_on)
    assert_same(batched.encode(turns)[0], encode_turns(chat, turns))


@pytest.mark.parametrize("kind", ("byte-level", "metaspace", "unigram"))
@settings(max_examples=40, **COMMON)
@given(batch=BATCH)
def test_control_tokens_that_swallow_whitespace_and_pieces_that_are_control_tokens(chats, kind, batch):
    turns = columns.conversation_turns(table(accepted("mistral", batch)), "assistant")
    assert_same(batched_encoder(chats[kind])[0].encode(turns)[0], encode_turns(chats[kind], turns))


def test_a_literal_that_could_make_a_control_token_with_a_content(tmp_path):
    """The template writes `</` before what users say, who may say `s>`."""
    template = PHI3.read_text().replace(
        "{{- message['content'] + '<|end|>' -}}\n    {%- endif",
        "{{- '</' + message['content'] + '<|end|>' -}}\n    {%- endif",
    )
    assert "'</'" in template
    chat = chat_of(tmp_path / "seam", families()["gpt2"], template)
    turns = columns.conversation_turns(table([messages("s>", "x"), messages("a", "b")]), "assistant")
    found, fallback = batched_encoder(chat)[0].encode(turns)
    assert fallback.tolist() == [0, 1]
    assert_same(found, encode_turns(chat, turns))
    assert chat.eos_id not in found.ids


@pytest.mark.parametrize(("kind", "template"), BOTH)
def test_ordinary_rows_are_encoded_as_batches(both, kind, template):
    batched, chat = both[kind, template]
    ordinary = [own for own in conversations() if not any("▁" in message["content"] for message in own)]
    turns = columns.conversation_turns(table(ordinary), "assistant")
    found, fallback = batched.encode(turns)
    # A trained vocabulary has no <|end|>, and such a template isn't accepted with it. By GPT-2's pattern, the two line breaks
    # that a prompt ends with are one token at the end of a text and two before a word.
    uncovered = (kind in TRAINED and template == "phi3") or (kind, template) == ("gpt2", "llama3-roles")
    assert len(turns) > 300 and (not len(fallback) or uncovered)
    assert_same(found, encode_turns(chat, turns))
    assert_same(batched.encode(turns)[0], found)
    assert found.supervised.any()


@pytest.mark.parametrize("kind", ("llama3", "llama2", "trained-bpe"))
@settings(max_examples=30, **COMMON)
@given(
    rows=st.lists(st.tuples(CONTENT, CONTENT, CONTENT, st.booleans()), min_size=1, max_size=4),
    template=st.sampled_from(list(TEMPLATES)),
)
def test_pairs_equal_encode_pairs(both, kind, rows, template):
    batched, chat = both[kind, template]
    prompts = [messages("x", "y", question) if longer else messages(question) for question, _, _, longer in rows]
    sides = [[[{"role": "assistant", "content": row[at]}] for row in rows] for at in (1, 2)]
    columns_ = dict(zip(("prompt", "chosen", "rejected"), (prompts, *sides)))
    turns = columns.pair_turns(pa.table({name: pa.array(own, MESSAGES) for name, own in columns_.items()}))
    sequences, _ = batched.encode(turns)
    assert_same(sequences, encode_turns(chat, turns))
    laid_out = pair_rows(pa.array(["a"] * len(rows)), sequences, np.zeros(len(rows), bool))
    for number, pair in enumerate(encode_pairs(chat, list(zip(prompts, *sides)))):
        own = laid_out.sequences.rows(np.array([number]))
        assert own.ids.tolist() == [*pair.prompt_ids, *pair.chosen_ids, *pair.rejected_ids]
        assert (laid_out.prompt[number], laid_out.chosen[number]) == (len(pair.prompt_ids), len(pair.chosen_ids))
        chosen = zip(pair.chosen_ids, pair.chosen_supervised)
        alike = takewhile(
            lambda both: both[0] == both[1], zip(chosen, zip(pair.rejected_ids, pair.rejected_supervised))
        )
        assert laid_out.common[number] == len(list(alike))
        supervised = [*np.zeros(len(pair.prompt_ids)), *pair.chosen_supervised, *pair.rejected_supervised]
        if pair.chosen_supervised.any() and pair.rejected_supervised.any() and len(pair.prompt_ids):
            assert own.supervised.tolist() == supervised


@pytest.mark.parametrize(("kind", "template"), [("llama3", "chatml"), ("mistral", "phi3"), ("trained-bpe", "mistral")])
@settings(max_examples=20, **COMMON)
@given(content=CONTENT)
def test_contents_contain_no_control_tokens(both, kind, template, content):
    batched, chat = both[kind, template]
    ids, plain = (
        batched.encode(columns.conversation_turns(table([messages(some, some)]), "assistant"))[0].ids
        for some in (content, "x")
    )
    assert ids[chat.template_only[ids]].tolist() == plain[chat.template_only[plain]].tolist()


def test_turn_ends_and_supervised_tokens(both):
    batched, chat = both["llama3", "mistral"]
    rows = [messages("the cat", "sat", "on a", "mat", system="hello")]
    for train_on, supervised in (("assistant", [" sat</s>", " mat</s>"]), ("last", [" mat</s>"])):
        encoded, fallback = batched.encode(columns.conversation_turns(table(rows), train_on))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.supervised, [0]])))
        assert [chat.text(encoded.ids[a:b]) for a, b in zip(edges[::2], edges[1::2])] == supervised
        assert not len(fallback)
    assert chat.text(encoded.ids[encoded.ends_turn]) == "[/INST]</s>[/INST]</s>"
    assert batched.encode(columns.conversation_turns(table(rows), "all"))[0].supervised.all()


def test_uncovered_rows_go_to_the_reference_path_and_stay_in_order(both):
    batched, chat = both["trained-bpe", "chatml"]
    rows = [messages("a", "b"), messages("<|im_end|>", "b"), messages("", "c"), messages("d", "e")]
    turns = columns.conversation_turns(table(rows), "assistant")
    found, fallback = batched.encode(turns)
    assert sorted(fallback.tolist()) == [1, 2]
    assert holds_control(chat, turns).tolist() == [False, True, False, False]
    assert_same(found, encode_turns(chat, turns))


def test_empty_tables_and_slices(both):
    batched, chat = both["trained-bpe", "chatml"]
    empty = columns.conversation_turns(table([]), "last")
    assert len(empty) == 0 and len(batched.encode(empty)[0].ids) == len(encode_turns(chat, empty).ids) == 0
    some = table(conversations()).slice(7, 30)
    turns = columns.conversation_turns(some, "last")
    assert turns.messages() == some.column("messages").to_pylist()
    assert_same(batched.encode(turns)[0], encode_turns(chat, turns))


def test_clearing_the_cache_changes_nothing(both, monkeypatch):
    batched, chat = both["gemma", "chatml"]
    monkeypatch.setattr("snaketune.tokenization.batched.chunks.MAX_KNOWN", 50)
    for start in (0, 40, 80):
        turns = columns.conversation_turns(table(conversations()[start : start + 40]), "assistant")
        assert_same(batched.encode(turns)[0], encode_turns(chat, turns))


def described(kind: str, **changes) -> dict:
    tokenizer = families()[kind]
    return json.loads(tokenizer.to_str()) | changes


def with_model(kind: str, **changes) -> dict:
    description = described(kind)
    description["model"] |= changes
    return description


def with_added(kind: str, **flags) -> dict:
    tokenizer = families()[kind]
    tokenizer.add_tokens([AddedToken("<x>", **flags)])
    return json.loads(tokenizer.to_str())


NOT_SEPARABLE = {
    "single_word": lambda: with_added("gpt2", single_word=True),
    "normalized text": lambda: with_added("qwen", normalized=True),
    "dropout": lambda: with_model("gpt2", dropout=0.1),
    "starts or ends": lambda: with_model("gpt2", end_of_word_suffix="</w>"),
    "ignore_merges": lambda: with_model("mistral", ignore_merges=True),
    "aren't multiples": lambda: described("t5", pre_tokenizer=None),
    r"normalizer \(NFKC\)": lambda: described("gpt2", normalizer={"type": "NFKC"}),
    r"normalizer \(Lowercase\)": lambda: described("gemma", normalizer={"type": "Lowercase"}),
    r"pre-tokenizer \(Whitespace\)": lambda: described("mistral", pre_tokenizer={"type": "Whitespace"}),
    "pattern isn't a known one": lambda: json.loads(json.dumps(described("llama3")).replace("{1,3}", "{1,4}")),
    "drops unknown characters": lambda: with_model("mistral", byte_fallback=False, unk_token=None),
    "WordLevel": lambda: json.loads(
        '{"added_tokens": [], "normalizer": null, "pre_tokenizer": null, "model": {"type":'
        ' "WordLevel", "vocab": {}, "unk_token": ""}}'
    ),
}


@pytest.mark.parametrize("reason", NOT_SEPARABLE)
def test_tokenizers_that_no_proof_covers_are_refused(reason):
    with pytest.raises(NotSeparable, match=reason):
        separable(NOT_SEPARABLE[reason]())


def test_cuts_of_a_trained_vocabulary(trained):
    """Words are cut from their full stops, and control strings aren't cut."""
    folder = trained["bpe"][0].payload
    found = separable(json.loads((folder / "tokenizer.json").read_text()))
    text = b"the cat. <|im_end|>\n2021 \xc3\xa9"
    positions = [at for at in range(1, len(text)) if found.cuts[text[at] << 8 | text[at - 1]]]
    parts = [text[a:b] for a, b in zip([0, *positions], [*positions, len(text)])]
    assert b"." in parts and b" cat" in parts and any(b"<|im_end|>" in part for part in parts)
