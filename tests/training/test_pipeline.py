"""What a training must not pass over: numbers that aren't finite, steps that teach nothing, dropout against a reference."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.artifacts.tables import write_table
from snaketune.config.runs import Lora, Operation, Training
from snaketune.errors import SnaketuneError
from snaketune.models.dropout import without_dropout
from snaketune.models.loading import grow_vocabulary
from snaketune.stages.specs import DpoSpec
from snaketune.stages.work import WorkFolder
from snaketune.training import dpo_worker
from snaketune.training.checkpoints import copy_trained, trained_tensors
from snaketune.training.reference import schema
from snaketune.training.sft_worker import SftTrainer
from snaketune.training.trainer import Run
from tests.models.conftest import CPU, VOCABULARY, tiny_model

from .pipeline_runs import LENGTH, pack, spec, train


class ExplodesAtTheLastStep(SftTrainer):
    """The loss of the step after the last line of the log isn't a number."""

    def batch_loss(self, model, batch):
        loss = super().batch_loss(model, batch)
        return loss * math.nan if self.state.global_step == self.state.max_steps - 1 else loss


class LastUpdateOverflows(SftTrainer):
    """The loss is finite to the end, the last update isn't."""

    def batch_loss(self, model, batch):
        loss = super().batch_loss(model, batch)
        if self.state.global_step == self.state.max_steps - 1:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


@pytest.mark.parametrize("trainer", [ExplodesAtTheLastStep, LastUpdateOverflows])
@pytest.mark.parametrize("every", [1, 100])
def test_no_model_with_numbers_that_are_not_finite_is_kept(tmp_path, monkeypatch, trainer, every):
    # The log looks at the first step only.
    monkeypatch.setattr(
        "tests.training.pipeline_runs.Operation", lambda **given: Operation(**given | {"log_steps": 1000})
    )
    with pytest.raises(SnaketuneError, match=r"step 9: .*the training diverged and nothing of it is published"):
        train(tmp_path / "work", pack(tmp_path / "pack", rows=12), spec(), trainer=trainer, every=every)
    assert not (tmp_path / "work/payload.partial/model.safetensors").exists()
    kept = list((tmp_path / "work/state/checkpoints").glob("checkpoint-*/complete"))
    assert [path.parent.name for path in kept] == (["checkpoint-8"] if every == 1 else [])


def test_a_step_in_which_nothing_is_supervised_is_no_divergence(tmp_path):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=4, supervised=lambda row: False), spec(epochs=1))
    assert [entry["loss"] for entry in outcome.run["history"]] == [0.0]


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "llama"])
def test_dropout_is_off_inside_and_back_outside(family):
    settings = {"gpt2": ("attn_pdrop", "resid_pdrop"), "opt": ("dropout",), "falcon": ("hidden_dropout",)}
    model = tiny_model(family, **dict.fromkeys(settings.get(family, ("attention_dropout",)), 0.5)).train()
    before = model.config.to_dict()
    ids = torch.arange(4, 24)[None]
    with torch.no_grad(), without_dropout(model):
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(model.train()(input_ids=ids).logits, expected)
    assert model.config.to_dict() == before
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, expected)


PAIRS = 6


def preferences(folder, model) -> tuple[Artifact, Artifact]:
    """Packed pairs, one to a row, and what `model` gives them."""
    from snaketune.models.logprobs import pair_logprobs_of
    from snaketune.models.selftest import self_test
    from snaketune.packing.reader import PackedRows
    from snaketune.packing.shards import DOCUMENTS, row_batch
    from snaketune.packing.shards import schema as columns

    (folder / "shards").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(4, VOCABULARY, (PAIRS, LENGTH), dtype=np.int32)
    labels = np.full_like(ids, -100)
    labels[:, 6:28] = ids[:, 6:28]
    segments = (np.tile([18, 10], PAIRS), np.tile([0, 6], PAIRS))
    batch = row_batch(ids, labels, np.full(PAIRS, 28), np.arange(PAIRS + 1) * 2, *segments)
    with pa.ipc.new_file(str(folder / "shards/train-00000.arrow"), columns(LENGTH)) as writer:
        writer.write_batch(batch)
    documents = [{"split": "train", "row": r, "id": f"p{r}", "tokens": 28, "supervised": 22} for r in range(PAIRS)]
    write_table(folder / "shards/documents.arrow", pa.Table.from_pylist(documents, schema=DOCUMENTS))
    manifest = {
        "format_version": "3.0",
        "row_length": LENGTH,
        "records": {},
        "payload": describe_files(folder / "shards"),
    }
    packed = Artifact(folder / "manifest.json", manifest, folder / "shards")
    rows = PackedRows(packed, "train")
    self_test(model, [rows], CPU, training=False)
    sums, counts = pair_logprobs_of(model, rows, CPU, 2, "reference")
    (folder / "logps").mkdir()
    names = schema().names
    values = [[f"p{r}" for r in range(PAIRS)], ["train"] * PAIRS, *sums.T.tolist(), *counts.T.tolist()]
    write_table(folder / "logps/logps.arrow", pa.table(dict(zip(names, values)), schema=schema()))
    facts = {"inputs": {"model": ["m"], "pack": [packed.content]}, "dtype": "float32", "kernel": "sdpa", "records": {}}
    return packed, Artifact(
        folder / "ref.json", facts | {"payload": describe_files(folder / "logps")}, folder / "logps"
    )


class Reference:
    content = "m"

    def __init__(self, folder):
        self.folder = folder


def preference_training(tmp_path, lora: Lora | None = None):
    made = DpoSpec(
        loss="sigmoid", beta=0.5, label_smoothing=0.0, lora=lora, quantization=None, trust_remote_code=False,
        training=Training(epochs=1, batch_rows=2, micro_batch_rows=2, learning_rate=1e-3, seed=1),
    )  # fmt: skip
    work = WorkFolder(tmp_path / "work")
    work.start()
    packed, reference = preferences(tmp_path / "pairs", dpo_model().eval())
    dpo_model().save_pretrained(tmp_path / "model")
    run = Run(spec=made, operation=Operation(log_steps=1), work=work, compute=CPU)
    return dpo_worker.train_on(run, Reference(tmp_path / "model"), packed, reference), work


def dpo_model():
    return tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.5)])
def test_dpo_starts_at_log_2_whatever_the_model_drops_out(tmp_path, lora):
    outcome, work = preference_training(tmp_path, lora)
    assert outcome.run["history"][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    # The result keeps the settings of the model that it comes from.
    assert '"attn_pdrop": 0.3' in (work.payload / "config.json").read_text()


def test_dpo_refuses_a_model_that_is_not_its_own_reference(tmp_path, monkeypatch):
    monkeypatch.setattr("snaketune.models.dropout._is_probability", lambda *_: False)
    with pytest.raises(SnaketuneError, match="before the first step the model differs from its own reference"):
        preference_training(tmp_path)


def test_new_rows_of_the_vocabulary_are_the_same_at_every_loading():
    models = []
    for seed, dtype in ((1, torch.float32), (2, torch.float32), (3, torch.bfloat16)):
        model = tiny_model("llama", initializer_range=0.02).to(dtype)
        torch.manual_seed(seed)
        grow_vocabulary(model, VOCABULARY + 3)
        models.append(model)
    for pick in (lambda model: model.get_input_embeddings(), lambda model: model.get_output_embeddings()):
        first, second, rounded = (pick(model).weight[-3:] for model in models)
        assert first.shape == (3, 32)
        assert first.std() > 0.01
        assert torch.equal(first, second)
        assert torch.equal(first.to(torch.bfloat16), rounded)


def test_adapters_learned_on_other_weights_are_merged_whole():
    """As QLoRA does: learned on 4-bit weights, merged into the 16-bit ones."""
    from snaketune.models.loading import add_lora

    trained, fresh = (add_lora(tiny_model("llama"), Lora(rank=2)) for _ in range(2))
    with torch.no_grad():
        for tensor in trained_tensors(trained).values():
            tensor.normal_()
    merged, expected = copy_trained(trained, fresh).merge_and_unload(), trained.merge_and_unload()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="such tensors"):
        copy_trained(add_lora(tiny_model("llama"), Lora(rank=3)), add_lora(tiny_model("llama"), Lora(rank=2)))


def test_a_micro_batch_of_blank_items_teaches_nothing(tmp_path):
    """What fills an epoch up for several processes."""
    rows = pack(tmp_path / "pack", rows=4)
    batch = SftTrainer.collate([rows.blank(), rows.blank()], "sdpa")
    assert (len(batch["targets"]), batch["segments"].layout.document_tokens) == (0, 0)
    from snaketune.models.logprobs import token_losses
    from snaketune.models.selftest import self_test

    model = tiny_model("llama")
    self_test(model, [], CPU, training=True)
    token_losses(model, batch).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_threshold_of_routers_is_no_dropout():
    """phimoe's, which counts in evaluation as well."""
    model = tiny_model("llama")
    model.model.layers[0].router_jitter_noise, model.model.layers[0].input_jitter_noise = 0.01, 0.02
    with without_dropout(model):
        assert model.model.layers[0].router_jitter_noise == 0.01
        assert model.model.layers[0].input_jitter_noise == 0.0
    assert model.model.layers[0].input_jitter_noise == 0.02
