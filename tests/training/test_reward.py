"""Reward models: trained on packed pairs, killed and resumed, with adapters, and loaded as transformers loads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from snaketune.artifacts.manifest import describe_files
from snaketune.config.held_out import Evaluate
from snaketune.config.lora import Lora
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.reward_head import packed_rewards, with_reward_head, with_rewards
from snaketune.engine.model.selftest import self_test
from snaketune.engine.optimizers import MuonWithAdamW
from snaketune.engine.pair_rewards import collate_pairs
from snaketune.engine.reward import RewardTrainer
from snaketune.errors import SnaketuneError
from snaketune.training import pipeline
from tests.models.conftest import CPU, tiny_model
from tests.models.made_trees import completions_alone

from .pipeline_runs import Interrupted
from .reward_runs import TrainedRewards
from .test_preference_resume import kill_before

STEP, SAVE = (RewardTrainer, "batch_loss"), (TrainingFeatures, "_save_optimizer_and_scheduler")


def loaded(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    return model


@torch.no_grad()
def rewards_alone(model, rows) -> torch.Tensor:
    """The rewards of each completion as a batch of its own, by transformers' own forward."""
    return torch.tensor([model(torch.tensor([ids])).logits.item() for ids, _ in completions_alone(rows)]).reshape(-1, 2)


@pytest.mark.parametrize(
    ("family", "kernel", "settings"),
    [
        ("llama", CPU.kernel, {"optimizer": "muon"}),
        ("qwen2", SEPARATE, {"gradient_checkpointing": True}),
        ("gpt2", CPU.kernel, {"average": {"ema": 0.5}}),
    ],
)
def test_the_saved_model_gives_the_rewards_that_were_trained(family, kernel, settings, tmp_path):
    trained = TrainedRewards(tmp_path, family=family, compute=replace(CPU, kernel=kernel))
    outcome, work = trained.train("run", **settings)
    assert outcome.about["kernel"] == kernel
    rows = trained.prepared("other").rows
    rows = [rows[number] for number in range(len(rows))]
    alone = rewards_alone(loaded(work.payload), rows)
    with_ends = with_rewards(loaded(work.payload))
    self_test(with_ends, [], CPU, training=False)
    with torch.no_grad():
        packed = packed_rewards(with_ends, collate_pairs(rows, CPU.kernel))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    # Something was learned, which the initial head doesn't know.
    first, last = outcome.run["history"][0], outcome.run["history"][-1]
    assert last["loss"] < first["loss"] and last["margin"] > first["margin"]
    accuracy = (alone[:, 0] > alone[:, 1]).float().mean().item()
    assert last["accuracy"] > 0.6 and accuracy > 0.6
    assert {"sources.0/accuracy", "sources.1/margin", "chosen_reward", "rejected_reward"} <= last.keys()
    assert outcome.counts["pairs"] == len(alone)


@pytest.mark.parametrize(
    ("lora", "kills"),
    [
        (None, ((*STEP, 8),)),
        (None, ((*SAVE, 2), (*STEP, 3))),
        (Lora(rank=2, dropout=0.3), ((*STEP, 7),)),
    ],
)
def test_a_killed_training_ends_with_the_same_files(lora, kills, tmp_path, monkeypatch):
    trained = TrainedRewards(tmp_path)
    settings = {"every": 2, "micro_batch_rows": 2, "lora": lora, "loss": {"center_rewards_coefficient": 0.1}}
    straight, work = trained.train("straight", **settings)
    for kill in kills:
        with monkeypatch.context() as patch:
            kill_before(*kill, patch)
            with pytest.raises(Interrupted):
                trained.train("resumed", **settings)
    resumed, again = trained.train("resumed", **settings)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert (resumed.counts, resumed.about) == (straight.counts, straight.about)
    for one, other in zip(resumed.run["history"], straight.run["history"], strict=True):
        for name in ("step", "loss", "grad_norm", "margin", "accuracy", "chosen_reward", "sources.1/margin"):
            assert one[name] == other[name], (one["step"], name)


def test_lines_of_several_steps_are_means_over_all_of_them_also_when_resumed(tmp_path, monkeypatch):
    """A checkpoint between two lines holds the sums of the steps before it."""
    trained = TrainedRewards(tmp_path)

    def train(name: str):
        prepared = trained.prepared(name, every=2)
        operation = prepared.run.operation.model_copy(update={"log_steps": 4})
        return pipeline.train(replace(prepared, run=replace(prepared.run, operation=operation)))

    straight = train("straight")
    with monkeypatch.context() as patch:
        kill_before(*STEP, 4, patch)
        with pytest.raises(Interrupted):
            train("resumed")
    assert [entry["margin"] for entry in train("resumed").run["history"]] == [
        entry["margin"] for entry in straight.run["history"]
    ]


def test_the_merged_adapter_is_base_and_adapter(tmp_path):
    from peft import PeftModel

    trained = TrainedRewards(tmp_path)
    _, work = trained.train("run", lora=Lora(rank=2))
    base, unchanged = (with_reward_head(tiny_model("llama"), seed=1).eval() for _ in range(2))
    for model in (base, unchanged):
        # Computed as transformers wrote it.
        model.forward = model.original_forward
    adapted = PeftModel.from_pretrained(base, work.payload / "adapter").eval()
    assert adapted.peft_config["default"].task_type == "SEQ_CLS"
    rows = trained.prepared("other").rows
    rows = [rows[number] for number in range(3)]
    merged = rewards_alone(loaded(work.payload), rows)
    torch.testing.assert_close(rewards_alone(adapted, rows), merged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rewards_alone(unchanged, rows), merged, atol=1e-2)


def test_the_head_depends_on_the_seed_alone():
    wanted = (("llama", 1), ("qwen2", 1), ("llama", 2))
    one, same, other = (with_reward_head(tiny_model(family), seed) for family, seed in wanted)
    assert torch.equal(one.score.weight, same.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    assert one.score.weight.std().item() == pytest.approx(one.config.initializer_range, rel=0.5)


def test_muon_leaves_the_head_to_adamw():
    model = with_reward_head(tiny_model("llama"), seed=0)
    muon, adamw = MuonWithAdamW(model, 0.1, (0.9, 0.99), 0.0, set()).parts
    own = [
        [any(one is model.score.weight for one in group["params"]) for group in part.param_groups]
        for part in (muon, adamw)
    ]
    assert not any(own[0]) and any(own[1])


def test_families_without_such_a_class_are_refused_before_their_weights_are_loaded(tmp_path):
    trained = TrainedRewards(tmp_path, family="granite")
    with pytest.raises(SnaketuneError, match="granite: transformers has no sequence-classification class"):
        trained.prepared("run")


def test_held_out_pairs_are_measured_and_the_best_weights_kept(tmp_path):
    trained = TrainedRewards(tmp_path)
    evaluate = Evaluate(every=1, rows=9, samples=2)
    prepared = trained.prepared(
        "run", evaluate=evaluate, learning_rate=0.5, schedule="constant", keep="best", metric="accuracy"
    )
    outcome = pipeline.train(replace(prepared, held_out=prepared.rows))
    points = outcome.run["held_out"]["points"]
    # The initial model, and after each step; no answers, since the model writes none.
    assert len(points) == 10 and not any("samples" in point for point in points)
    best = max(point["accuracy"] for point in points)
    assert outcome.about["kept"]["value"] == best
    rows = prepared.rows
    # The same drawing of rows as that of the schedule.
    measured = np.sort(np.random.default_rng(0).permutation(len(rows))[:9]).tolist()
    alone = rewards_alone(loaded(prepared.run.work.payload), [rows[number] for number in measured])
    assert ((1 + (alone[:, 0] - alone[:, 1]).sign()) / 2).mean().item() == pytest.approx(best, abs=1e-4)


def test_margins_shape_the_loss(tmp_path):
    """A margin is subtracted, so the loss of the same weights is higher."""
    trained = TrainedRewards(tmp_path)
    prepared = trained.prepared("run", epochs=1, loss={"margin": False})
    rows = prepared.rows
    pairs = rows.pairs
    rows.documents = replace(
        rows.documents, values={**rows.documents.values, "margin": np.full(pairs, 2.0, np.float32)}
    )
    plain = pipeline.train(prepared).run["history"][0]["loss"]
    run = trained.prepared("with", epochs=1).run
    run = replace(run, spec=run.spec.model_copy(update={"margin": True}))
    loss = {"settings": replace(prepared.loss["settings"], margin=True)}
    raised = pipeline.train(replace(prepared, run=run, loss=loss)).run["history"][0]["loss"]
    assert raised > plain + 0.5
