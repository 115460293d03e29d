"""Weights of turns: a weighted mean of the tokens' losses, as torch computes it; packed, in trees, in any micro-batches."""

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import SCHEMAS, with_weights
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.engine.packing.segments import layout_of
from snaketune.engine.sft import SftTrainer
from snaketune.packing.reader import open_rows
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.turn_columns import conversation_turns
from snaketune.training.pipeline import make_trainer
from snaketune.training.prepared import PreparedTraining, TrainingRun
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain, test_turn_trees
from tests.packing.test_turn_trees import reasoning_tokenizer  # noqa: F401
from tests.tokenization.small_tokenizers import messages

from .executed import executed, loss_of
from .pipeline_runs import copy_after, spec, train

WEIGHTS = (0.25, 1.0, 0.0, 2.0, 0.5)


def weighted(turns: list[dict], number: int) -> list[dict]:
    """Turns with weights of which no two that follow each other are equal."""
    return [
        {"role": turn["role"], "content": turn["content"], "weight": WEIGHTS[(at + number) % 5]}
        for at, turn in enumerate(turns)
    ]


def made_model() -> torch.nn.Module:
    return tiny_model("llama", vocab_size=512)


ROWS = [
    {"id": str(number), "messages": weighted(messages(*(f"cat {number}", f"ton {number}") * (1 + number % 3)), number)}
    for number in range(14)
]


def packed(folder, tokenizer: Artifact, rows=ROWS, **settings) -> Artifact:
    corpus = chain.corpus(folder / "corpus", "sft", rows, held_out=2)
    return chain.pack(folder, corpus, tokenizer, "sft", **({"length": 128} | settings))


def documents(rows: PackedRows) -> list[tuple[list[int], list[float]]]:
    """Ids and weights of every segment with its prefix."""
    segments = ((row, tokens) for row in rows for tokens, _ in layout_of([row]).sequences())
    return [(row["input_ids"][at].tolist(), row["loss_weights"][at].tolist()) for row, at in segments]


@pytest.mark.parametrize("settings", [{}, {"parts": 2}, {"strategy": "wrapped"}, {"train_on": "all"}])
def test_packed_tokens_have_the_weight_of_their_turn(settings, tokenizer, tmp_path):
    pack = packed(tmp_path / "weighted", tokenizer, **settings)
    assert pack.manifest["format_version"] == "3.2"
    flags = [
        {**row, "messages": [turn | {"weight": float(turn["weight"] > 0)} for turn in row["messages"]]} for row in ROWS
    ]
    rows, same = (open_rows(one, "train") for one in (pack, packed(tmp_path / "flags", tokenizer, flags, **settings)))
    assert rows.weighted and len(rows) == len(same)
    for row, other in zip(rows, same):
        for name in ("input_ids", "labels", "segment_lengths"):
            assert row[name].tolist() == other[name].tolist()
        assert (row["loss_weights"] > 0).tolist() == other["loss_weights"].tolist() == (row["labels"] >= 0).tolist()
    if settings.get("strategy") == "wrapped":
        return
    schema = with_weights(SCHEMAS["conversations"])
    texts = {"messages": pa.array([row["messages"] for row in ROWS[:-2]], schema.field("messages").type)}
    turns = conversation_turns(pa.table(texts), settings.get("train_on", "assistant"))
    encoded = encode_turns(ChatTokenizer.load(tokenizer.folder), turns)
    expected = [
        (encoded.ids[start:end].tolist(), [0.0, *encoded.supervised[start + 1 : end].tolist()])
        for start, end in zip(encoded.starts, encoded.offsets[1:])
    ]
    assert sorted(documents(rows)) == sorted(one for one in expected if any(one[1]))


def test_every_turn_of_a_tree_has_its_weight(reasoning_tokenizer, tmp_path):  # noqa: F811
    made = [{"id": str(n), "messages": weighted(test_turn_trees.conversation(1 + n % 4, n), n)} for n in range(12)]
    rows = open_rows(test_turn_trees.pack(tmp_path, made, reasoning_tokenizer), "train")
    assert rows.has_prefixes
    chat = ChatTokenizer.load(reasoning_tokenizer.folder)
    # A turn's own text is the last one of its branch or trunk.
    found = [
        (chat.text(torch.tensor(ids).numpy()), {weight for weight in weights if weight})
        for ids, weights in documents(rows)
    ]
    turns = [
        (row["messages"][: at + 1], turn["weight"])
        for row in made[:-2]
        for at, turn in enumerate(row["messages"])
        if turn["role"] == "assistant"
    ]
    for before, weight in turns:
        question, answer = before[-2]["content"], before[-1]["content"]
        holding = [weights for text, weights in found if f"{question}<|im_end|>" in text and answer in text]
        assert holding or not weight
        assert not weight or any(weight in weights for weights in holding)
    assert {weight for _, weights in found for weight in weights} == set(WEIGHTS) - {0}


def test_the_loss_is_torchs_weighted_mean(tokenizer, tmp_path):
    rows = open_rows(packed(tmp_path / "rows", tokenizer), "train")
    model, plain = made_model(), made_model()
    plain.load_state_dict(model.state_dict())
    self_test(model, [rows], CPU, training=True)
    work = chain.started(tmp_path / "work")
    run = TrainingRun(spec=spec(), operation=executed(spec().training), work=work, compute=CPU)
    training = PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=None, loss=loss_of(spec()))
    trainer = make_trainer(training, model, CPU)
    batch = trainer._collate_items([EqualTokens(rows)[item] for item in range(2)])
    loss = trainer.batch_loss(model, batch, trainer._get_num_items_in_batch([batch], CPU.device))
    losses, weights = [], []
    for row in (rows[0], rows[1]):
        for at, _ in layout_of([row]).sequences():
            ids = torch.from_numpy(row["input_ids"][at].astype("int64"))
            losses.append(cross_entropy(plain(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
            weights.append(torch.from_numpy(row["loss_weights"][at])[1:])
    losses, weights = torch.cat(losses), torch.cat(weights)
    expected = (losses * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert abs(loss - losses[weights > 0].mean()) > 1e-4
    gradients = (
        torch.autograd.grad(total, list(one.parameters())) for total, one in ((loss, model), (expected, plain))
    )
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_weighted_runs_resume_exactly_and_weights_that_are_equal_are_no_weights(tokenizer, tmp_path, monkeypatch):
    def weights_of(name: str, rows: PackedRows, micro_batch_rows: int = 2, **further) -> dict[str, torch.Tensor]:
        made = spec(epochs=3, batch_rows=4, micro_batch_rows=micro_batch_rows, learning_rate=0.01)
        train(tmp_path / name, rows, made.model_copy(update=further), model=made_model, every=1)
        return load_file(tmp_path / name / "payload.partial/model.safetensors")

    rows = open_rows(packed(tmp_path / "rows", tokenizer, length=64), "train")
    copy_after(2, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight = weights_of("straight", rows)
    resumed = weights_of("resumed", rows)
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]
    for name, whole in weights_of("whole", rows, micro_batch_rows=4).items():
        torch.testing.assert_close(whole, straight[name], rtol=1e-3, atol=1e-5)
    # DFT multiplies its weights with those of the turns.
    assert [
        name for name, other in weights_of("dft", rows, loss="dft").items() if not torch.equal(other, straight[name])
    ]
    results = []
    for weight in (1.0, 0.5):
        same = [
            {**row, "messages": [turn | {"weight": weight * (turn["role"] == "assistant")} for turn in row["messages"]]}
            for row in ROWS
        ]
        own = open_rows(packed(tmp_path / f"same-{weight}", tokenizer, same, length=64), "train")
        results.append(weights_of(f"run-{weight}", own))
    for name, one in results[0].items():
        torch.testing.assert_close(one, results[1][name], rtol=1e-4, atol=1e-6)
