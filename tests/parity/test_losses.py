"""Every loss against TRL's own trainers: value, and gradients of all parameters, on the same pairs, packed as trees."""

from copy import copy, deepcopy
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from snaketune.config.losses import LossName, PreferenceLoss
from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.selftest import self_test
from snaketune.engine.pair_logps import pair_logps
from snaketune.engine.preference_losses import derivatives, loss_of, needs_prompts
from snaketune.training.pair_rows import weighted_logps
from snaketune.training.reference.logps_table import Reference
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.models.made_trees import completions_alone, tree_rows

# Families with rotary and with learned positions; `tests/models/test_trees` has more.
FAMILIES = ("llama", pytest.param("gpt2", marks=pytest.mark.slow))
PAIRS = 8
TOLERANCE = 1e-5


def noisy(family: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = tiny_model(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class Compared:
    """A policy and a reference of one family, and pairs: as trees here, each completion by itself for TRL.

    `theirs` are the same two models, with their own attention.
    """

    def __init__(self, family: str, tokenizer: Any):
        self.policy, self.reference, self.tokenizer = noisy(family, 1), noisy(family, 2), tokenizer
        self.theirs = deepcopy(self.policy), deepcopy(self.reference)
        rows = tree_rows(VOCABULARY)
        self.alone = completions_alone(rows)
        assert len(self.alone) == 2 * PAIRS
        for model in (self.policy, self.reference):
            self_test(model, [], CPU, training=True)
        self.batches = {prompts: collate(rows, "sdpa", prompts=prompts) for prompts in (False, True)}
        self.desirable = torch.arange(PAIRS) % 3 > 0

    def padded(self, which: slice) -> dict[str, torch.Tensor]:
        """Some of the completions as TRL's collators return them: ids, attention and completion masks."""
        sequences = self.alone[which]
        width = max(len(ids) for ids, _ in sequences)
        ids, attention, supervised = (torch.zeros(len(sequences), width, dtype=torch.long) for _ in range(3))
        for row, (tokens, labels) in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            attention[row, : len(tokens)] = 1
            supervised[row, : len(tokens)] = torch.tensor(labels) >= 0
        return {"input_ids": ids, "attention_mask": attention, "completion_mask": supervised}

    def ours(self, loss_settings: PreferenceLoss) -> torch.Tensor:
        batch = self.batches[needs_prompts(loss_settings)]
        reference_P2 = torch.zeros(PAIRS, 2)
        if loss_settings.needs_reference:
            reference_P2 = torch.tensor(
                [weighted_logps(one, loss_settings.ld_alpha) for one in self.known()], dtype=torch.float32
            )
        pairs = pair_logps(self.policy, batch | {"reference": reference_P2, "desirable": self.desirable}, loss_settings)
        tokens = len(batch.get("sequence_members", ()))
        totals = torch.tensor([PAIRS, int(pairs.counts_P2[:, 0].sum()), tokens])
        loss = loss_of(pairs, loss_settings, totals)
        # What the second of two passes takes is the same.
        again, derivative_PF = derivatives(pairs, loss_settings, totals)
        assert again == loss
        (through_pairs,) = torch.autograd.grad(loss, self.policy.get_input_embeddings().weight, retain_graph=True)
        (by_features,) = torch.autograd.grad(
            (pairs.features_PF * derivative_PF).sum(), self.policy.get_input_embeddings().weight, retain_graph=True
        )
        torch.testing.assert_close(by_features, through_pairs, rtol=1e-4, atol=1e-6)
        return loss

    def known(self) -> list[Reference]:
        """The reference's log-probabilities as in the artifact, with those per token."""
        batch = self.batches[False]
        with torch.no_grad():
            logps_M = -token_losses(self.reference, batch)[batch["members"]].double()
        of_C = [logps_M[batch["member_completions"] == number].numpy() for number in range(2 * PAIRS)]
        return [
            Reference(
                logps=(chosen.sum(), rejected.sum()),
                tokens=(len(chosen), len(rejected)),
                token_logps=(chosen, rejected),
            )
            for chosen, rejected in zip(of_C[::2], of_C[1::2])
        ]

    def assert_equal(self, loss_settings: PreferenceLoss, theirs: Any) -> None:
        """Args: theirs: computes TRL's loss with their policy."""
        their_policy = self.theirs[0]
        for model in (self.policy, their_policy):
            model.eval()
            model.zero_grad()
        expected, actual = theirs(), self.ours(loss_settings)
        expected.backward()
        actual.backward()
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
        gradients = {name: parameter.grad for name, parameter in their_policy.named_parameters()}
        scale = max(gradient.abs().max() for gradient in gradients.values())
        assert scale > 1e-3
        for name, parameter in self.policy.named_parameters():
            difference = (parameter.grad - gradients[name]).abs().max()
            assert difference <= TOLERANCE * max(scale, 1), (name, difference, scale)

    def swapped(self) -> "Compared":
        """A copy with policy and reference exchanged."""
        swapped = copy(self)
        swapped.policy, swapped.reference, swapped.theirs = self.reference, self.policy, self.theirs[::-1]
        return swapped


@pytest.fixture(scope="module", params=FAMILIES)
def compared(request, tokenizer_folder) -> Compared:
    return Compared(request.param, AutoTokenizer.from_pretrained(tokenizer_folder))


def arguments(folder: Any, **keywords: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_length": None, "beta": 0.3, "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "per_device_train_batch_size": PAIRS, **keywords,
    }  # fmt: skip


# A trainer wants rows to begin with; the pairs that are compared are handed to it as batches.
ROWS = [{"prompt": "a b", "chosen": "c", "rejected": "d"}] * 2
PAIRED = {
    **{name: {} for name in ("sigmoid", "ipo", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")},
    **{name: {} for name in ("discopop", "sigmoid_norm")},
    **{name: {"label_smoothing": 0.1} for name in ("robust", "exo_pair", "aot")},
}
DIVERGED = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


def dpo_loss(compared: Compared, folder: Any, loss_settings: PreferenceLoss) -> Any:
    weights = loss_settings.weights
    settings = arguments(
        folder, loss_type=list(weights), loss_weights=list(weights.values()), ld_alpha=loss_settings.ld_alpha,
        label_smoothing=loss_settings.label_smoothing, discopop_tau=loss_settings.discopop_tau,
        f_divergence_type=loss_settings.f_divergence_type,
        f_alpha_divergence_coef=loss_settings.f_alpha_divergence_coef,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=compared.theirs[0], ref_model=compared.theirs[1], args=DPOConfig(**settings),
        train_dataset=Dataset.from_list(ROWS), processing_class=compared.tokenizer,
    )  # fmt: skip
    batch = compared.padded(slice(None))
    # Chosen ones first.
    order = [*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)]
    return lambda: trainer._compute_loss(
        compared.theirs[0], {name: value[order] for name, value in batch.items()}, False
    )


@pytest.mark.parametrize("loss", PAIRED)
def test_a_loss_of_pairs(compared, tmp_path, loss):
    loss_settings = PreferenceLoss(loss=loss, beta=0.3, **PAIRED[loss])
    compared.assert_equal(loss_settings, dpo_loss(compared, tmp_path, loss_settings))


def test_several_losses_with_weights_and_likelihood(compared, tmp_path):
    for loss in ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, {"aot": 0.5, "ipo": 2.0, "sft": 0.1}):
        loss_settings = PreferenceLoss(loss=loss, beta=0.3)
        compared.assert_equal(loss_settings, dpo_loss(compared, tmp_path, loss_settings))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "aot", "apo_down", {"sigmoid": 1.0, "sft": 0.5}])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_tokens_beyond_the_shorter_completion_are_weighted(compared, tmp_path, loss, alpha):
    loss_settings = PreferenceLoss(loss=loss, beta=0.3, ld_alpha=alpha)
    compared.assert_equal(loss_settings, dpo_loss(compared, tmp_path, loss_settings))


@pytest.mark.parametrize(
    ("divergence", "coefficient"),
    [("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.3), ("alpha_divergence", 1.0)],
)
@pytest.mark.parametrize("loss", DIVERGED)
def test_another_divergence(compared, tmp_path, loss, divergence, coefficient):
    loss_settings = PreferenceLoss(
        loss=loss, beta=0.3, f_divergence_type=divergence, f_alpha_divergence_coef=coefficient, **PAIRED[loss]
    )
    compared.assert_equal(loss_settings, dpo_loss(compared, tmp_path, loss_settings))


def pairs_for_likelihood(compared: Compared) -> dict[str, torch.Tensor]:
    """The pairs as TRL's collator for CPO and ORPO returns them."""
    made = {}
    for side, start in (("chosen", 0), ("rejected", 1)):
        padded = compared.padded(slice(start, None, 2))
        labels = padded["input_ids"].masked_fill(padded["completion_mask"] == 0, -100)
        made |= {f"{side}_input_ids": padded["input_ids"], f"{side}_attention_mask": padded["attention_mask"]}
        made |= {f"{side}_labels": labels}
    return made


@pytest.mark.parametrize(
    ("loss_settings", "theirs"),
    [
        ({"loss": "cpo"}, {"loss_type": "sigmoid"}),
        ({"loss": "cpo", "cpo_alpha": 0.3, "label_smoothing": 0.1},
         {"loss_type": "sigmoid", "cpo_alpha": 0.3, "label_smoothing": 0.1}),
        ({"loss": "simpo", "simpo_gamma": 0.7}, {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
        ({"loss": "simpo", "label_smoothing": 0.1}, {"loss_type": "simpo", "label_smoothing": 0.1, "cpo_alpha": 0.0}),
        ({"loss": {"simpo": 1.0, "sft": 0.5}}, {"loss_type": "simpo", "cpo_alpha": 0.5}),
    ],
)  # fmt: skip
def test_a_loss_without_a_reference(compared, tmp_path, loss_settings, theirs):
    trainer = CPOTrainer(
        model=compared.theirs[0], args=CPOConfig(**arguments(tmp_path, **theirs)), train_dataset=Dataset.from_list(ROWS),
        processing_class=compared.tokenizer,
    )  # fmt: skip
    batch = pairs_for_likelihood(compared)
    compared.assert_equal(
        PreferenceLoss(beta=0.3, **loss_settings), lambda: trainer.get_batch_loss_metrics(compared.theirs[0], batch)[0]
    )


def test_orpo_with_the_likelihood_of_prompt_and_completion(compared, tmp_path):
    trainer = ORPOTrainer(
        model=compared.theirs[0], args=ORPOConfig(**arguments(tmp_path)), train_dataset=Dataset.from_list(ROWS),
        processing_class=compared.tokenizer,
    )  # fmt: skip
    batch = pairs_for_likelihood(compared)
    loss_settings = PreferenceLoss(loss="orpo", beta=0.3)
    compared.assert_equal(loss_settings, lambda: trainer.get_batch_loss_metrics(compared.theirs[0], batch)[0])


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_loss_of_single_completions(compared, tmp_path, loss, moved):
    """Args: moved: whether the policy has moved from its reference so that the reference point isn't zero."""
    loss_settings = PreferenceLoss(loss=loss, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    settings = arguments(tmp_path, loss_type=loss, desirable_weight=1.3, undesirable_weight=0.7)
    compared = compared.swapped() if moved else compared
    trainer = KTOTrainer(
        model=compared.theirs[0], ref_model=compared.theirs[1], args=KTOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]),
        processing_class=compared.tokenizer,
    )  # fmt: skip
    own, mismatched = compared.padded(slice(0, None, 2)), compared.padded(slice(1, None, 2))
    batch = own | {f"KL_{name}": value for name, value in mismatched.items()} | {"label": compared.desirable}
    compared.assert_equal(loss_settings, lambda: trainer._compute_loss(compared.theirs[0], batch, False))


def test_every_loss_is_compared():
    compared = {*PAIRED, "sft", "cpo", "simpo", "orpo", "kto", "apo_zero_unpaired"}
    assert compared == {*get_args(LossName)}
