"""The pipeline: what it writes and logs, and what it refuses, such as weights that aren't finite and dropout in DPO."""

import json
import math
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.engine.checkpoints import copy_trained, trained_tensors
from snaketune.engine.model import logprobs
from snaketune.engine.model.logprobs import all_pair_logprobs, token_losses
from snaketune.engine.model.machine import processor
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.shards import documents_schema, row_batch
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.models.lora import add_lora
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import DpoSpec
from snaketune.tables import write_table
from snaketune.training import pipeline
from snaketune.training.autotune.batch_plan import takes_steps
from snaketune.training.prepared import TrainingRun
from snaketune.training.prepared_dpo import prepare_dpo
from snaketune.training.reference.logps_table import schema
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.training.executed import executed

from .pipeline_runs import LENGTH, Interrupted, pack, spec, stop_after, train


def test_what_a_training_writes_and_logs(tmp_path, capsys):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack"), spec())
    log = capsys.readouterr().out
    parameters = sum(p.numel() for p in tiny_model("llama").parameters())
    assert re.search(
        r"model: \S+ parameters on cpu \(\d threads? of \d+ cores?\), float32, sdpa, not compiled, micro-batch 2 x 2, ",
        log,
    )
    assert "22 rows of 32 tokens" in log
    assert "step 18/18" in log
    assert outcome.counts == {"rows": 22, "tokens": 3 * 22 * 28, "tokens_per_epoch": 22 * 28, "steps": 18}
    assert outcome.about == {
        "kernel": "sdpa",
        "dtype": "float32",
        "self_test": "packed = separate within 1e-03",
        "compiled": False,
        "parameters": parameters,
        "trainable_parameters": parameters,
        "saved_dtype": "float32",
    }
    run = outcome.run
    assert (run["device"], run["processes"], run["flops_per_parameter_and_token"]) == ("cpu", 1, 6)
    assert run["processor"] == processor()
    assert run["threads"] == torch.get_num_threads()
    assert run["self_test_share"] < 1e-5
    assert [entry["step"] for entry in run["history"]] == list(range(1, 19))
    assert run["history"][-1]["loss"] < run["history"][0]["loss"]
    assert run["tokens_per_second_median"] in [entry["tokens_per_second"] for entry in run["history"]]
    written = sorted(path.name for path in (tmp_path / "work/payload.partial").iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(("epochs", "steps", "rows"), [(0.5, 3, 12), (1.5, 9, 34)])
def test_only_tokens_of_the_trained_part_of_an_epoch_are_counted(tmp_path, epochs, steps, rows):
    """An epoch of 22 rows is six steps, the last of two rows."""
    outcome = train(tmp_path / "work", pack(tmp_path / "pack"), spec(epochs=epochs), log_steps=100)
    assert (outcome.counts["steps"], outcome.counts["tokens"]) == (steps, rows * 28)


def test_adapters_are_written_beside_the_model_that_they_are_merged_into(tmp_path):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=4), spec(Lora(rank=2), epochs=1))
    payload = tmp_path / "work/payload.partial"
    adapter = load_file(payload / "adapter/adapter_model.safetensors")
    assert outcome.about["trainable_parameters"] == sum(tensor.numel() for tensor in adapter.values())
    assert outcome.run["flops_per_parameter_and_token"] == 4
    assert sorted(path.name for path in (payload / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    targets = json.loads((payload / "adapter/adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    assert load_file(payload / "model.safetensors").keys() == dict(tiny_model("llama").named_parameters()).keys()


def no_model():
    raise AssertionError("weights were loaded")


def test_without_rows_nothing_is_loaded(tmp_path):
    with pytest.raises(SnaketuneError, match="no row to train on; lower the corpus' held_out"):
        train(tmp_path / "work", pack(tmp_path / "pack", rows=0), spec(), no_model)


def test_a_failed_run_resumes_from_its_last_checkpoint_and_logs_it(tmp_path, monkeypatch, capsys):
    rows, made = pack(tmp_path / "pack", rows=12), spec(epochs=2)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            train(tmp_path / "work", rows, made)
    # By this the launcher knows that the batch plan matters, if a process is killed for memory.
    assert takes_steps(WorkFolder(tmp_path / "work").state)
    outcome = train(tmp_path / "work", rows, made)
    assert "resuming from" in capsys.readouterr().out
    assert [entry["step"] for entry in outcome.run["history"]] == [1, 2, 3, 4, 5, 6]


class ExplodesAtTheLastStep(SftTrainer):
    """Makes the loss NaN in the step after the last log line."""

    def batch_loss(self, model, batch, totals):
        loss = super().batch_loss(model, batch, totals)
        return loss * math.nan if self.state.global_step == self.state.max_steps - 1 else loss


class LastUpdateOverflows(SftTrainer):
    """Makes the last update infinite, with finite losses."""

    def batch_loss(self, model, batch, totals):
        loss = super().batch_loss(model, batch, totals)
        if self.state.global_step == self.state.max_steps - 1:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


@pytest.mark.parametrize("trainer", [ExplodesAtTheLastStep, LastUpdateOverflows])
@pytest.mark.parametrize("every", [1, 100])
def test_a_model_with_weights_that_are_not_finite_is_not_saved(tmp_path, monkeypatch, trainer, every):
    # Only the first step is logged.
    monkeypatch.setattr(
        "tests.training.pipeline_runs.executed",
        lambda training, **given: executed(training, **given | {"log_steps": 1000}),
    )
    with pytest.raises(SnaketuneError, match=r"step 9: .*the training diverged and nothing of it is published"):
        train(tmp_path / "work", pack(tmp_path / "pack", rows=12), spec(), trainer=trainer, every=every)
    assert not (tmp_path / "work/payload.partial/model.safetensors").exists()
    complete = list((tmp_path / "work/state/checkpoints").glob("checkpoint-*/complete"))
    assert [path.parent.name for path in complete] == (["checkpoint-8"] if every == 1 else [])


def test_a_step_in_which_nothing_is_supervised_is_no_divergence(tmp_path):
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=4, supervised=lambda row: False), spec(epochs=1))
    assert [entry["loss"] for entry in outcome.run["history"]] == [0.0]


PAIRS = 6


def preferences(folder, model) -> tuple[Artifact, Artifact]:
    """Packed pairs, one per row, and their log-probabilities under `model`."""

    (folder / "shards").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(4, VOCABULARY, (PAIRS, LENGTH), dtype=np.int32)
    labels = np.full_like(ids, -100)
    labels[:, 6:28] = ids[:, 6:28]
    starts, tree = np.arange(PAIRS + 1) * 2, (np.tile([0, 0], PAIRS), np.tile([0, 1], PAIRS))
    segments = (np.tile([18, 10], PAIRS), np.tile([0, 6], PAIRS))
    batch = row_batch(ids, labels, np.full(PAIRS, 28), starts, *segments, tree[0], (tree[1], starts))
    with pa.ipc.new_file(str(folder / "shards/train-00000.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    of_all = {"split": "train", "tokens": 28, "supervised": 22, "source": 0}
    documents = [of_all | {"row": number, "id": f"p{number}"} for number in range(PAIRS)]
    table = pa.Table.from_pylist(documents, schema=documents_schema("preference"))
    write_table(folder / "shards/documents.arrow", table)
    manifest = {
        "format_version": "3.1",
        "kind": "preference",
        "pairs": "pairs",
        "row_length": LENGTH,
        "records": {},
        "payload": describe_files(folder / "shards"),
    }
    packed = Artifact(folder / "manifest.json", manifest, folder / "shards")
    rows = open_rows(packed, "train")
    self_test(model, [rows], CPU, training=False)
    sums, counts = all_pair_logprobs(model, rows, CPU, "reference")
    (folder / "logps").mkdir()
    ids = [f"p{r // 2}" for r in range(2 * PAIRS)]
    values = [ids, ["train"] * 2 * PAIRS, [0, 1] * PAIRS, sums.flatten().tolist(), counts.flatten().tolist()]
    write_table(folder / "logps/logps.arrow", pa.table(dict(zip(schema().names, values)), schema=schema()))
    facts = {
        "inputs": {"model": ["m"], "pack": ["pairs"]},
        "dtype": "float32",
        "weights_dtype": "float32",
        "kernel": "sdpa",
    }
    facts |= {"spec": {"quantization": None, "base": None}, "records": {}}
    return packed, Artifact(
        folder / "ref.json", facts | {"payload": describe_files(folder / "logps")}, folder / "logps"
    )


@pytest.mark.parametrize("holds", [1, 2, 3])
def test_a_pass_without_gradients_continues_with_fewer_rows_when_memory_runs_out(tmp_path, monkeypatch, capsys, holds):
    model = tiny_model("llama").eval()
    packed, _ = preferences(tmp_path, model)
    rows = open_rows(packed, "train")
    whole, counts = all_pair_logprobs(model, rows, CPU, "reference")
    computed = logprobs.token_losses

    def limited(model, batch):
        if batch["input_ids"].shape[1] > holds * LENGTH:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return computed(model, batch)

    monkeypatch.setattr(logprobs, "token_losses", limited)
    monkeypatch.setattr(logprobs, "FORWARD_TOKENS_ELSEWHERE", 4 * LENGTH)
    # No batch is filled up, so that its tokens are those of its rows.
    monkeypatch.setattr(logprobs, "LEAST_ROWS", 0)
    logps = all_pair_logprobs(model, rows, CPU, "reference")
    torch.testing.assert_close(logps[0], whole)
    assert torch.equal(logps[1], counts)
    assert f"reference: out of memory; continuing with {min(holds, 2)} rows per batch" in capsys.readouterr().out
    monkeypatch.setattr(logprobs, "token_losses", lambda *_: limited(None, {"input_ids": torch.empty(1, 999)}))
    with pytest.raises(torch.OutOfMemoryError):
        all_pair_logprobs(model, rows, CPU, "reference")


class Reference:
    content, manifest = "m", {}

    def __init__(self, folder):
        self.folder = folder


def preference_training(tmp_path, lora: Lora | None = None, **training):
    made = DpoSpec(
        loss="sigmoid", beta=0.5, label_smoothing=0.0, lora=lora, quantization=None, trust_remote_code=False,
        training=Training(epochs=1, batch_rows=2, micro_batch_rows=2, learning_rate=1e-3, seed=1, **training),
    )  # fmt: skip
    work = WorkFolder(tmp_path / "work")
    work.start()
    packed, reference = preferences(tmp_path / "pairs", dpo_model().eval())
    dpo_model().save_pretrained(tmp_path / "model")
    run = TrainingRun(spec=made, operation=executed(made.training, log_steps=1), work=work, compute=CPU)
    return pipeline.train(prepare_dpo(run, (Reference(tmp_path / "model"),), packed, reference)), work


def dpo_model():
    return tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.5)])
def test_dpo_starts_at_log_2_whatever_the_models_dropout(tmp_path, lora):
    outcome, work = preference_training(tmp_path, lora)
    assert outcome.run["history"][0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    # The result has the dropout settings of its base.
    assert '"attn_pdrop": 0.3' in (work.payload / "config.json").read_text()


def test_dpo_refuses_a_model_that_is_not_its_own_reference(tmp_path, monkeypatch):
    monkeypatch.setattr("snaketune.engine.model.forward._is_probability", lambda *_: False)
    with pytest.raises(SnaketuneError, match="before the first step the model differs from its own reference"):
        preference_training(tmp_path)


def test_adapters_trained_on_other_weights_are_merged_into_the_given_ones():
    """QLoRA trains on 4-bit weights and merges into the 16-bit ones."""

    trained, fresh = (add_lora(tiny_model("llama"), Lora(rank=2)) for _ in range(2))
    with torch.no_grad():
        for tensor in trained_tensors(trained).values():
            tensor.normal_()
    merged, expected = copy_trained(trained, fresh).merge_and_unload(), trained.merge_and_unload()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="such tensors"):
        copy_trained(add_lora(tiny_model("llama"), Lora(rank=3)), add_lora(tiny_model("llama"), Lora(rank=2)))


def test_a_micro_batch_of_blank_items_changes_no_weight(tmp_path):
    """Blank items fill the end of an epoch for several processes."""
    rows = pack(tmp_path / "pack", rows=4)
    batch = SftTrainer.collate([rows.blank(), rows.blank()], "sdpa")
    assert (len(batch["targets"]), batch["segments"].layout.document_tokens) == (0, 0)
    model = tiny_model("llama")
    self_test(model, [], CPU, training=True)
    token_losses(model, batch).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
