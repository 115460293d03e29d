"""The load-balancing loss of mixtures of experts: TRL's on the same rows, whatever the micro-batches; none unless asked for."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTConfig, SFTTrainer

from snaketune.config.lora import Lora
from snaketune.engine.model.batches import collate
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.router_loss import RouterLoss, router_rows
from snaketune.engine.model.selftest import self_test
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.models.lora import add_lora
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.training.pipeline import make_trainer
from snaketune.training.prepared import PreparedTraining, TrainingRun
from tests.models.conftest import CPU, VOCABULARY, gradients, tiny_model
from tests.models.made_trees import tree_rows

from . import preference_runs
from .executed import executed, loss_of
from .pipeline_runs import LENGTH, pack, spec, train
from .preference_runs import Trained
from .test_resume import EXPERTS

# Large, so that a difference shows.
COEFFICIENT = 0.5
ROWS = 4


def experts(family: str, asked: bool = True) -> torch.nn.Module:
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None, output_router_logits=asked,
        router_aux_loss_coef=COEFFICIENT, initializer_range=0.2,
        **({"num_experts_per_tok": 2, "num_key_value_heads": 4} | EXPERTS[family]),
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def trainer_of(folder: Path, model: torch.nn.Module, rows, kernel: str = "sdpa", **learning) -> SftTrainer:
    work = WorkFolder(folder / "work")
    work.start()
    made = spec(batch_rows=ROWS, micro_batch_rows=1, **learning)
    compute = replace(CPU, kernel=kernel)
    self_test(model, [rows], compute, training=True)
    run = TrainingRun(spec=made, operation=executed(made.training), work=work, compute=compute)
    training = PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=None, loss=loss_of(made))
    return make_trainer(training, model, compute)


def step(trainer: SftTrainer, micro_batch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of all rows."""
    items = [trainer.train_dataset[row] for row in range(ROWS)]
    batches = [trainer._collate_items(items[at : at + micro_batch]) for at in range(0, ROWS, micro_batch)]
    totals = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    loss = sum(trainer.compute_loss(trainer.model, batch, num_items_in_batch=totals) for batch in batches)
    return loss.detach(), gradients(trainer.model, loss)


def assert_same(ours, theirs) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name


def trl_step(folder: Path, model: torch.nn.Module, rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """TRL's loss and gradients of a step of all rows, one per device and micro-batch."""
    words = Tokenizer(WordLevel({f"t{id}": id for id in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    columns = [
        {"input_ids": rows[row]["input_ids"].tolist(), "labels": rows[row]["labels"].tolist()} for row in range(ROWS)
    ]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder), per_device_train_batch_size=1, max_length=None, report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
    )  # fmt: skip
    batches = [trainer.data_collator([row]) for row in columns]
    trainer.current_gradient_accumulation_steps = ROWS
    total = sum((batch["labels"][:, 1:] >= 0).sum() for batch in batches)
    loss = sum(trainer.compute_loss(model, batch, num_items_in_batch=total) for batch in batches)
    return loss.detach(), gradients(model, loss)


@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=pytest.mark.slow), "qwen3_moe"])
def test_loss_and_gradients_equal_trl_s_at_any_size_of_the_micro_batches(tmp_path, family):
    rows = pack(tmp_path / "pack", ROWS, documents=(LENGTH,))
    theirs = trl_step(tmp_path / "trl", experts(family).train(), rows)
    trainer = trainer_of(tmp_path, experts(family).train(), rows)
    for micro_batch in (1, 2, 4):
        assert_same(step(trainer, micro_batch), theirs)
    plain = step(trainer_of(tmp_path / "plain", experts(family, asked=False).train(), rows), 2)
    # Even routing has a loss of the number of experts per token.
    assert 0.9 * COEFFICIENT * 2 < theirs[0] - plain[0] < 2 * COEFFICIENT * 2


@pytest.mark.parametrize(
    "lora", [None, Lora(rank=2), Lora(rank=2, target_modules=("q_proj",), modules_to_save=("gate",))]
)
def test_packed_documents_count_as_alone_and_padding_does_not(tmp_path, lora):
    rows, model = pack(tmp_path / "pack", ROWS), experts("mixtral").train()
    alone = experts("mixtral").train()
    trainer = trainer_of(tmp_path, model, rows)
    if lora:
        trainer = trainer_of(tmp_path / "adapted", model, rows)
        trainer.model = trainer.model_wrapped = add_lora(model, lora)
        assert RouterLoss.of(model)
    expected, targets = torch.zeros(()), 0
    for row in range(ROWS):
        logits: list[tuple[torch.Tensor, ...]] = []
        ids, labels, ends = rows[row]["input_ids"], rows[row]["labels"], np.cumsum(rows[row]["segment_lengths"])
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            outputs = alone(torch.from_numpy(ids[start:end].astype(np.int64))[None])
            logits.append(outputs.router_logits)
            wanted = torch.from_numpy(labels[start + 1 : end].astype(np.int64))
            expected = expected + F.cross_entropy(outputs.logits[0, :-1], wanted, reduction="sum") / (ROWS * 26)
            targets += int((wanted >= 0).sum())
        of_row = load_balancing_loss_func(tuple(map(torch.cat, zip(*logits))), 4, 2)
        expected = expected + COEFFICIENT * of_row / ROWS
    assert targets == ROWS * 26
    loss, grads = step(trainer, 2)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    if lora is None:
        assert_same((loss, grads), (expected.detach(), gradients(alone, expected)))
    elif lora.modules_to_save:
        assert any("gate.modules_to_save" in name and grad.abs().sum() > 0 for name, grad in grads.items())


def test_documents_that_run_separately_have_the_same_loss(tmp_path):
    rows = pack(tmp_path / "pack", ROWS)
    packed = step(trainer_of(tmp_path / "packed", experts("mixtral").train(), rows), 2)
    assert_same(step(trainer_of(tmp_path / "separate", experts("mixtral").train(), rows, SEPARATE), 2), packed)


def test_a_shared_prompt_counts_once():
    model, alone, rows = experts("mixtral").eval(), experts("mixtral").eval(), tree_rows(VOCABULARY)
    self_test(model, [], CPU, training=False)
    batch, router = collate(rows, "sdpa"), RouterLoss.of(model)
    batch |= router_rows(rows, batch["segments"].layout.document_of)
    with torch.no_grad():
        with router.recorded() as recorded:
            token_losses(model, batch)
        packed = router.summed(recorded, batch)
        layout, logits = batch["segments"].layout, {}
        for tokens, _ in layout.sequences():
            outputs = alone(batch["input_ids"][:, torch.from_numpy(tokens)])
            logits |= dict(zip(tokens.tolist(), zip(*outputs.router_logits), strict=True))
    assert len(logits) == sum(int(row["segment_lengths"].sum()) for row in rows)
    each = iter(logits[token] for token in sorted(logits))
    own = [[next(each) for _ in range(row["segment_lengths"].sum())] for row in rows]
    losses = [load_balancing_loss_func(tuple(map(torch.stack, zip(*of_row))), 4, 2) for of_row in own]
    torch.testing.assert_close(packed, COEFFICIENT * sum(losses), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.slow)]
)
def test_it_learns_the_same_with_recomputed_and_compiled_layers(tmp_path, settings):
    def losses(name: str, **training) -> list[float]:
        outcome = train(
            tmp_path / name, pack(tmp_path / f"{name}-pack", 8), spec(epochs=1, **training), lambda: experts("mixtral")
        )
        return [entry["loss"] for entry in outcome.run["history"]]

    assert losses("one", **settings) == pytest.approx(losses("other"), rel=1e-5)


@pytest.mark.parametrize("loss", [pytest.param("sigmoid", marks=pytest.mark.slow), "bco_pair"])
def test_preference_runs_add_it_at_any_size_of_the_micro_batches(tmp_path, monkeypatch, loss):
    def losses(name: str, micro_batch: int) -> list[float]:
        outcome, _ = Trained(tmp_path / name, family="mixtral").train(
            name, {"loss": loss}, micro_batch_rows=micro_batch
        )
        return [entry["loss"] for entry in outcome.run["history"]]

    plain = losses("plain", 4)
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    monkeypatch.setattr(preference_runs, "tiny_model", partial(tiny_model, **asked))
    with_loss = losses("asked", 4)
    assert losses("halves", 2) == pytest.approx(with_loss, rel=1e-4)
    assert 0.9 * COEFFICIENT * 2 < with_loss[0] - plain[0] < 2 * COEFFICIENT * 2
    if loss == "sigmoid":
        assert plain[0] == pytest.approx(math.log(2), abs=1e-6)


def test_without_it_there_is_none_and_models_without_one_are_refused():
    assert RouterLoss.of(experts("mixtral", asked=False)) is None
    assert RouterLoss.of(tiny_model("llama")) is None
    model = experts("mixtral")
    model.config.router_aux_loss_coef = 0.0
    assert RouterLoss.of(model) is None
    model = tiny_model("llama")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
    with pytest.raises(SnaketuneError, match=r"output_router_logits: true, but .* llama that .*; set it to false"):
        RouterLoss.of(model)
