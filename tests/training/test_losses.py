"""The loss and the logged metrics of a step don't depend on its micro-batches."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from snaketune.config.lora import Lora
from snaketune.config.losses import PreferenceLoss
from snaketune.engine import dpo as dpo_trainer
from snaketune.engine.pair_logps import PairLogps, pair_logps
from snaketune.engine.pair_trainer import METRICS_STATE
from snaketune.engine.preference_losses import loss_of
from snaketune.engine.preference_metrics import SUMS, batch_sums, means
from snaketune.errors import SnaketuneError

from .preference_runs import Trained

# One loss for each way of combining the losses of micro-batches.
LOSSES = {
    "sigmoid": {"loss": "sigmoid"},
    "with likelihood": {"loss": {"ipo": 0.3, "sft": 1.0}},
    "sorted": {"loss": "aot", "label_smoothing": 0.1},
    "sorted, with likelihood": {"loss": {"aot": 1.0, "sft": 0.5, "apo_zero": 0.5}},
    "with prompts": {"loss": "orpo"},
    "without a reference": {"loss": {"cpo": 1.0, "simpo": 0.5}},
}
METRICS = (
    "margin", "accuracy", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "chosen_logp_per_token",
    "rejected_logp_per_token", "chosen_tokens", "rejected_tokens", "length_correlation",
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def completions(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("completions"), kind="unpaired")


def assert_same(one, other) -> None:
    for ours, theirs in zip(one[0].run["history"], other[0].run["history"], strict=True):
        for name in ("loss", "grad_norm", "margin", "chosen_reward", "rejected_logp"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), (ours["step"], name)
    ours, theirs = (load_file(work.payload / "model.safetensors") for _, work in (one, other))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "loss_settings",
    [
        {"loss": "discopop"},
        *({"f_divergence_type": kind} for kind in ("forward_kl", "js_divergence", "alpha_divergence")),
    ],
)
@pytest.mark.parametrize("nats", [-1000.0, -100.0, 0.0, 100.0, 1000.0])
def test_extreme_log_ratios_have_a_finite_loss_and_gradient(loss_settings, nats):
    logps_P2 = torch.tensor([[nats, 0.0], [0.0, nats], [nats, nats]], requires_grad=True)
    counts_P2 = torch.full((3, 2), 500)
    pairs = PairLogps(logps_P2=logps_P2, reference_P2=torch.zeros(3, 2), counts_P2=counts_P2, nll_P2=torch.zeros(3, 2))
    loss = loss_of(pairs, PreferenceLoss(beta=1.0, **loss_settings), torch.tensor([3, 0, 0]))
    loss.backward()
    assert loss.isfinite() and logps_P2.grad.isfinite().all()


def test_ktos_reference_point_is_not_below_zero():
    """An estimate of a KL divergence; below zero, KTO is its unpaired APO-zero."""
    logps_P2 = torch.tensor([[0.5, -3.0], [-0.5, -1.0]])
    pairs = PairLogps(
        logps_P2=logps_P2,
        reference_P2=torch.zeros(2, 2),
        counts_P2=torch.full((2, 2), 5),
        nll_P2=torch.zeros(2, 2),
        desirable_P=torch.tensor([True, False]),
    )
    kto, apo, above = (
        loss_of(pairs, PreferenceLoss(loss=loss), torch.tensor([2, 0, 0])).item()
        for loss, pairs in (
            ("kto", pairs),
            ("apo_zero_unpaired", pairs),
            ("kto", replace(pairs, logps_P2=logps_P2 + torch.tensor([0.0, 5.0]))),
        )
    )
    assert kto == apo != above


def test_orpo_is_finite_at_probability_one_and_weighs_the_likelihood_of_the_prompt():
    logps_P2 = torch.tensor([[0.0, -1.0]], requires_grad=True)
    nll_P2 = torch.tensor([[0.0, 3.0]], requires_grad=True)
    pairs = PairLogps(
        logps_P2=logps_P2, reference_P2=torch.zeros(1, 2), counts_P2=torch.tensor([[4, 4]]), nll_P2=nll_P2
    )
    loss = loss_of(pairs, PreferenceLoss(loss={"orpo": 0.25}), torch.tensor([1, 4, 6]))
    loss.backward()
    assert loss.isfinite() and logps_P2.grad.isfinite().all()
    # 0.25 of the mean over the six tokens of prompt and chosen completion.
    assert nll_P2.grad.tolist() == [[0.0, pytest.approx(0.25 / 6)]]


@pytest.mark.parametrize("of", ["pairs", "completions"])
def test_every_source_has_its_own_metrics(pairs, completions, of):
    """Pairs alternate between two sources."""
    trained, loss = (pairs, "sigmoid") if of == "pairs" else (completions, "kto")
    outcome, _ = trained.train("by-source", {"loss": loss}, batch_rows=12, micro_batch_rows=4)
    (*_, last) = outcome.run["history"]
    whole = {name: value for name, value in last.items() if f"sources.0/{name}" in last}
    assert {"margin", "chosen_reward", "chosen_logp", "chosen_tokens", "kl"} <= whole.keys()
    assert ("accuracy" in whole) == (of == "pairs")
    assert not any(name.startswith("sources.2/") for name in last)
    if of == "pairs":
        # A step has all pairs: as many of one source as of the other, or one more.
        for name in ("accuracy", "margin", "chosen_reward", "rejected_logp", "chosen_tokens", "kl"):
            first, second = (last[f"sources.{number}/{name}"] for number in (0, 1))
            number = outcome.counts["pairs"]
            expected = (first * -(-number // 2) + second * (number // 2)) / number
            assert whole[name] == pytest.approx(expected, abs=1e-5), name
            assert first != second, name


@pytest.mark.parametrize(
    "what",
    [pytest.param(one, marks=pytest.mark.slow if one in ("sigmoid", "sorted") else []) for one in LOSSES],
)
def test_a_step_is_the_same_in_any_micro_batches(pairs, tmp_path, what):
    name, loss_settings = what.replace(" ", "-"), LOSSES[what]
    whole = pairs.train(f"{name}-4", loss_settings)
    for rows in (1, 2):
        assert_same(pairs.train(f"{name}-{rows}", loss_settings, micro_batch_rows=rows), whole)
    first, last = (whole[0].run["history"][at] for at in (0, -1))
    assert {*METRICS} <= {*last} and ("kl" in last) == ("prompts" not in what and "reference" not in what)
    # It does learn.
    assert last["margin"] > first["margin"]


@pytest.mark.parametrize("loss", ["kto", pytest.param("apo_zero_unpaired", marks=pytest.mark.slow)])
def test_single_completions_are_the_same_in_any_micro_batches(completions, loss):
    loss_settings = {"loss": loss, "desirable_weight": 1.3}
    whole = completions.train(f"{loss}-4", loss_settings)
    for rows in (1, 2):
        assert_same(completions.train(f"{loss}-{rows}", loss_settings, micro_batch_rows=rows), whole)
    last = whole[0].run["history"][-1]
    assert last["chosen_reward"] > last["rejected_reward"]
    assert last["margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"], abs=1e-5)
    assert last["kl"] >= 0 and "accuracy" not in last and "length_correlation" not in last


def test_both_passes_of_a_step_have_the_same_dropout(pairs, monkeypatch):
    """Otherwise the derivatives would belong to other values than those that they weight."""
    passes = {False: [], True: []}

    def watched(model, batch, loss_settings):
        batch_pairs = pair_logps(model, batch, loss_settings)
        passes["derivatives" in batch].append(batch_pairs.logps_P2.detach().clone())
        return batch_pairs

    monkeypatch.setattr(dpo_trainer, "pair_logps", watched)
    pairs.train("dropped-out", {"loss": "aot"}, lora=Lora(rank=2, dropout=0.5), micro_batch_rows=1, epochs=1)
    first, second = passes[False][2:], passes[True]
    # Two checks before the first step, then twelve micro-batches.
    assert len(first) == len(second) == 12
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    # Dropout has no effect on adapters that are still zero.
    assert not torch.equal(second[4], second[0])


def test_metrics_are_means_over_the_steps_of_a_log_line(pairs):
    each, _ = pairs.train("each", {"loss": "sigmoid"})
    some, _ = pairs.train("some", {"loss": "sigmoid"}, log_steps=3)
    # The first step has a line of its own.
    assert [entry["step"] for entry in some.run["history"]] == [1, 3, 6, 9]
    first, by_step = each.run["history"][0], {entry["step"]: entry for entry in each.run["history"]}
    # The policy is its reference.
    assert first["margin"] == pytest.approx(0, abs=1e-4) and first["kl"] == pytest.approx(0, abs=1e-4)
    # Steps hold equally many pairs here.
    for name in ("margin", "chosen_reward", "kl", "chosen_logp", "chosen_tokens"):
        mean = sum(by_step[step][name] for step in (4, 5, 6)) / 3
        assert some.run["history"][2][name] == pytest.approx(mean, rel=0.05, abs=0.02), name
    entry = by_step[9]
    assert entry["margin"] == pytest.approx(entry["chosen_reward"] - entry["rejected_reward"], abs=1e-5)
    assert entry["chosen_logp_per_token"] == pytest.approx(entry["chosen_logp"] / entry["chosen_tokens"], rel=1e-4)
    assert entry["kl"] == pytest.approx(-(entry["chosen_reward"] + entry["rejected_reward"]) / 2 / 0.5, abs=1e-4)


def test_a_pair_with_equal_rewards_counts_half_in_the_accuracy():
    """Before the first step all rewards are equal: a policy that learns nothing has an accuracy of one half, not zero."""
    logps_P2 = torch.tensor([[-2.0, -6.0], [-3.0, -3.0], [-4.0, -5.0], [-1.0, -2.0]])
    moved_P2 = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.0, 0.5]])
    counts_P2, none_P2 = torch.full((4, 2), 3), torch.zeros(4, 2)
    pairs = PairLogps(logps_P2=logps_P2, reference_P2=logps_P2 - moved_P2, counts_P2=counts_P2, nll_P2=none_P2)
    (row,) = batch_sums(pairs, PreferenceLoss(), torch.zeros(4, dtype=torch.long), sources=1).tolist()
    assert means(dict(zip(SUMS, row)), PreferenceLoss())["accuracy"] == 0.5
    unmoved = PairLogps(logps_P2=logps_P2, reference_P2=logps_P2, counts_P2=counts_P2, nll_P2=none_P2)
    (row,) = batch_sums(unmoved, PreferenceLoss(), torch.zeros(4, dtype=torch.long), sources=1).tolist()
    assert means(dict(zip(SUMS, row)), PreferenceLoss())["accuracy"] == 0.5


def test_a_loss_with_a_reference_is_refused_without_one(pairs, monkeypatch):
    monkeypatch.setattr(pairs, "reference", None)
    with pytest.raises(SnaketuneError, match="loss sigmoid needs reference log-probabilities"):
        pairs.train("unreferenced", {"loss": "sigmoid"})


def test_ld_alpha_needs_log_probabilities_per_token(pairs):
    with pytest.raises(SnaketuneError, match="no log-probabilities per token"):
        pairs.train("tails", {"loss": "sigmoid", "ld_alpha": 0.5})


def test_a_checkpoint_holds_the_windows_as_plain_numbers(pairs):
    _, work = pairs.train("checkpoint", {"loss": "sigmoid"}, every=4)
    (checkpoint,) = (work.state / "checkpoints").glob("checkpoint-*")
    state = json.loads((checkpoint / METRICS_STATE).read_text(encoding="utf-8"))["monitor"]
    assert state["done"] == 9 or checkpoint.name == f"checkpoint-{state['done']}"
    assert len(state["steps"]) == state["done"]
