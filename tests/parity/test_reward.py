"""Reward models against TRL's RewardTrainer: loss and gradients of the same pairs."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import RewardConfig, RewardTrainer

from snaketune.engine.model.reward_head import packed_rewards, with_reward_head
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.in_memory import pack_pairs
from snaketune.engine.pair_rewards import RewardSettings, collate_pairs, reward_loss
from tests.models.conftest import CPU, VOCABULARY, tiny_model

PAIRS = 9


def made_pairs() -> list[dict[str, Any]]:
    """Pairs of token ids; three share a prompt, and two a completion."""
    generator = np.random.default_rng(0)

    def ids(most: int) -> list[int]:
        return generator.integers(8, VOCABULARY, generator.integers(2, most)).tolist()

    pairs = [{"prompt_ids": ids(20), "chosen_ids": ids(12), "rejected_ids": ids(12)} for _ in range(PAIRS - 3)]
    pairs += [{**pair, "rejected_ids": ids(12)} for pair in pairs[:2]]
    return [*pairs, {**pairs[0], "chosen_ids": ids(12)}]


def trl_loss(model: torch.nn.Module, margins: list[float] | None, coefficient: float | None, tokenizer, folder) -> Any:
    rows = [
        {
            "chosen_ids": pair["prompt_ids"] + pair["chosen_ids"],
            "rejected_ids": pair["prompt_ids"] + pair["rejected_ids"],
        }
        | ({"margin": margins[number]} if margins else {})
        for number, pair in enumerate(made_pairs())
    ]
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(folder), per_device_train_batch_size=PAIRS, max_length=None, report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, center_rewards_coefficient=coefficient,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    return trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))


@pytest.mark.parametrize(
    ("family", "with_margins", "coefficient"),
    [("llama", False, None), ("llama", True, 0.3), ("qwen2", True, None), ("qwen2", False, 0.3)],
)
def test_loss_and_gradients_equal_trl(family, with_margins, coefficient, tokenizer_folder, tmp_path):
    margins = np.random.default_rng(1).random(PAIRS).tolist() if with_margins else None
    model = with_reward_head(tiny_model(family), seed=3)
    theirs = copy.deepcopy(model)
    # Their copy computes as transformers wrote it.
    theirs.forward = theirs.original_forward.__func__.__get__(theirs)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    expected = trl_loss(theirs, margins, coefficient, tokenizer, tmp_path)
    expected.backward()

    rows = pack_pairs(made_pairs(), length=64)
    self_test(model, [rows], CPU, training=True)
    batch = collate_pairs([rows[row] for row in range(len(rows))], CPU.kernel)
    margins_P = torch.tensor([margins[pair] for pair in packed_order(rows)]) if margins else None
    settings = RewardSettings(center_rewards_coefficient=coefficient, margin=with_margins)
    ours = reward_loss(packed_rewards(model, batch), margins_P, settings, torch.tensor(batch["pairs"]))
    ours.backward()
    assert batch["pairs"] == PAIRS
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    gradients = dict(theirs.named_parameters())
    assert {name for name, _ in model.named_parameters()} == gradients.keys()
    for name, parameter in model.named_parameters():
        largest = gradients[name].grad.abs().max()
        assert (parameter.grad - gradients[name].grad).abs().max() <= 1e-5 * max(largest, 1.0), name
    # Without a gradient, nothing would have been compared.
    assert model.score.weight.grad.abs().max() > 1e-3
    assert model.get_input_embeddings().weight.grad.abs().max() > 1e-3


def packed_order(rows) -> list[int]:
    """For each packed pair, in the order of the rows, its number in `made_pairs`."""
    wanted = [
        (pair["prompt_ids"] + pair["chosen_ids"], pair["prompt_ids"] + pair["rejected_ids"]) for pair in made_pairs()
    ]
    found = []
    for row in (rows[number] for number in range(len(rows))):
        layout = collate_pairs([row], CPU.kernel)["segments"].layout
        tokens, offsets = layout.sequences_of(layout.completions)
        sequences = [row["input_ids"][tokens[a:b]].tolist() for a, b in pairwise(offsets)]
        found += [wanted.index(pair) for pair in zip(sequences[::2], sequences[1::2])]
    return found
