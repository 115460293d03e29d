"""Conversations whose template rewrites earlier turns: packed trees, their losses and gradients against separate samples."""

from importlib.metadata import files

import pytest
import torch
import torch.nn.functional as F
from benchmarks.families.examine import CPU
from benchmarks.families.tiny import tiny_config, tiny_model
from transformers.utils.chat_template_utils import render_jinja_template

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.forward import packed_losses
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.segments import layout_of
from snaketune.engine.packing.shards import IGNORED, list_columns, schema
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.specs import PackSpec, TokenizeSpec
from snaketune.tables import read_table
from snaketune.tokenization import corpus_part
from snaketune.tokenization.chat import ChatTokenizer
from tests.models.conftest import gradients
from tests.packing import chain
from tests.packing.test_pack_stage import tokenizer  # noqa: F401

QWEN3 = next(path for path in files("trl") if path.name == "qwen3.jinja").read_text()


def conversation(turns: int, number: int) -> list[dict]:
    """A conversation with reasoning in every turn."""
    return [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"What is {number} + {turn}?", "supervised": True},
            {
                "role": "assistant",
                "content": f"<think>\nAdd {turn} to {number}. Carry.\n</think>\n\nIt is {number + turn}.",
                "supervised": True,
            },
        )
    ]


ROWS = [{"id": str(number), "messages": conversation(1 + number % 4, number)} for number in range(12)]


@pytest.fixture
def reasoning_tokenizer(tokenizer, tmp_path) -> Artifact:  # noqa: F811
    """The tokenizer with the chat template of Qwen3."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in tokenizer.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(QWEN3)
    return Artifact(tmp_path / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def pack(folder, rows, tokenizer, reasoning="exact", parts=1, **settings) -> Artifact:  # noqa: F811
    spec = PackSpec(kind="sft", **({"length": 512, "overflow": "truncate"} | settings))
    corpus = chain.corpus(folder / "corpus", "sft", rows, 2)
    tokens = []
    for part in range(1, parts + 1):
        own = chain.started(folder / f"tokens-{part}")
        tokenize_spec = TokenizeSpec(kind="sft", train_on="assistant", reasoning=reasoning, part=part, parts=parts)
        outcome = corpus_part.build(tokenize_spec, own, corpus=corpus, tokenizer=tokenizer)
        tokens.append(chain.made(own.folder, outcome, tokenize_spec))
    return chain.pack_tokens(folder, tokens, spec, parts)


def samples(tokenizer: Artifact, rows: list[dict]) -> list[tuple[list[int], int]]:  # noqa: F811
    """Every conversation up to each of its assistant turns, rendered by transformers: ids, and where the turn begins."""
    chat = ChatTokenizer.load(tokenizer.folder)
    made = []
    for row in rows:
        for number, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            texts = [
                render_jinja_template([row["messages"][:end]], chat_template=QWEN3, add_generation_prompt=prompt)[0][0]
                for end, prompt in ((number + 1, False), (number, True))
            ]
            ids, prompt = (chat.encode_text(text).ids for text in (texts[0].removesuffix("\n"), texts[1]))
            assert ids[: len(prompt)] == prompt
            made.append((ids, len(prompt)))
    return made


def branches(rows: PackedRows) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every segment with its prefix."""
    found = []
    for row in rows:
        layout = layout_of([row])
        found += [
            (row["input_ids"][at].tolist(), row["labels"][at].tolist())
            for at in (tokens for tokens, _ in layout.sequences())
        ]
    return found


def test_every_turn_is_packed_as_it_is_generated_and_supervised_once(reasoning_tokenizer, tmp_path):
    packed = pack(tmp_path, ROWS, reasoning_tokenizer, parts=2)
    assert packed.manifest["format_version"] == "3.1"
    columns = list_columns("sft", "3.1")
    assert columns == ("segment_lengths", "prefix_lengths", "prefix_segments")
    for split in ("train", "held_out"):
        assert read_table(packed.file(f"{split}-00000.arrow")).schema == schema(512, columns)
    rows, kept = open_rows(packed, "train"), ROWS[:-2]
    made, expected = branches(rows), samples(reasoning_tokenizer, kept)
    assert len(made) == len(expected)
    for ids, start in expected:
        ((labels,),) = ([labels for own, labels in made if own[: len(ids)] == ids],)
        assert labels[start : len(ids)] == ids[start:]
    supervised = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    assert supervised == sum(len(ids) - start for ids, start in expected)
    # One document per conversation, with the tokens of its tree.
    listed = list(documents(packed, "train"))
    assert sorted(document["id"] for document in listed) == sorted(row["id"] for row in kept)
    assert sum(document["tokens"] for document in listed) == rows.tokens < sum(len(ids) for ids, _ in expected)
    counts = packed.manifest["counts"]["train"]
    assert counts["kept"] == counts["pieces"] == len(kept) and counts["tokens"] == counts["read_tokens"]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "bloom"])
def test_losses_and_gradients_equal_those_of_separate_samples(reasoning_tokenizer, tmp_path, family):
    rows = open_rows(pack(tmp_path, ROWS, reasoning_tokenizer), "train")
    vocabulary = ChatTokenizer.load(reasoning_tokenizer.folder).vocab_size
    model = tiny_model(tiny_config(family, vocab_size=vocabulary))
    compute = self_test(model, [rows], CPU, training=True).compute
    model.eval()
    batch = collate([rows[at] for at in range(len(rows))], compute.kernel)
    packed = packed_losses(model, batch, summed=False)
    separate = []
    expected = samples(reasoning_tokenizer, ROWS[:-2])
    packed_gradients = gradients(model, packed.sum())
    use_own_attention(model)
    for ids, start in expected:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        separate.append(F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="none"))
    separate = torch.cat(separate)
    assert len(packed) == len(separate)
    torch.testing.assert_close(packed.sort()[0], separate.sort()[0], rtol=1e-5, atol=1e-5)
    separate_gradients = gradients(model, separate.sum())
    largest = max(float(gradient.abs().max()) for gradient in separate_gradients.values())
    for name, gradient in separate_gradients.items():
        assert float((packed_gradients[name] - gradient).abs().max()) <= 1e-5 * largest, name


def test_a_tree_that_is_longer_than_a_row_keeps_its_first_turns(reasoning_tokenizer, tmp_path):
    rows = [{"id": str(number), "messages": conversation(6, number)} for number in range(4)]
    whole = open_rows(pack(tmp_path / "whole", rows, reasoning_tokenizer, length=1024), "train")
    expected = samples(reasoning_tokenizer, rows[:-2])
    length = 2 * max(len(ids) for ids, _ in expected) // 3
    for overflow in ("truncate", "split"):
        packed = pack(tmp_path / overflow, rows, reasoning_tokenizer, length=length, overflow=overflow)
        cut = open_rows(packed, "train")
        counts = packed.manifest["counts"]["train"]
        assert counts["truncated"]["rows"] == 2 and 0 < cut.tokens < whole.tokens
        assert cut.tokens + counts["truncated"]["tokens"] == whole.tokens
        # Every supervised turn has all that it had in the whole tree.
        made = branches(cut)
        kept = [(ids, start) for ids, start in expected if any(own[: len(ids)] == ids for own, _ in made)]
        assert len(kept) >= 4
        supervised = sum(int((row["labels"] != IGNORED).sum()) for row in cut)
        assert supervised == sum(len(ids) - start for ids, start in kept)


def test_other_treatments_have_no_trees_and_wrapped_rows_refuse_them(reasoning_tokenizer, tmp_path):
    for reasoning in ("last", "all"):
        packed = pack(tmp_path / reasoning, ROWS, reasoning_tokenizer, reasoning)
        assert packed.manifest["format_version"] == "3.0"
        pack(tmp_path / f"{reasoning}-wrapped", ROWS, reasoning_tokenizer, reasoning, strategy="wrapped")
    with pytest.raises(SnaketuneError, match=r"is a tree.*strategy: wrapped.*corpora.NAME.reasoning to last or all"):
        pack(tmp_path / "wrapped", ROWS, reasoning_tokenizer, strategy="wrapped")
