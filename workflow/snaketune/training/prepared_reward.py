"""Preparation of a reward model's training: its pairs, with the differences of their ratings, and its initial weights."""

from functools import partial
from typing import Any, Literal

import numpy as np

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.reward_head import reward_class
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.pair_rewards import RewardSettings
from snaketune.engine.reward import RewardTrainer
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import AdapterStack
from snaketune.packing.reader import open_rows, sources_of
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.prepared import PreparedTraining, TrainingRun


def prepare_reward(run: TrainingRun, results: tuple[Artifact, ...], pack: Artifact) -> PreparedTraining:
    """Prepare the training of a reward model.

    Args:
        results: the SFT result and, if it is an adapter alone, its base layers, from the top down.
    Raises:
        SnaketuneError: the kind of model can't be a reward model, its padding ends turns, or pairs lack ratings that the loss
            needs.
    """
    spec, tokenizer = run.spec, results[0].folder
    initial = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code
    )
    check_padding(ChatTokenizer.load(tokenizer))
    return reward_training(run, initial, pack, held_out=True)


def reward_training(run: TrainingRun, initial: AdapterStack, pack: Artifact, *, held_out: bool) -> PreparedTraining:
    """The training of a reward model from these weights. Args: held_out: whether held-out pairs may be measured."""
    spec, in_memory = run.spec, run.operation.load_in_memory
    centers = spec.center_rewards_coefficient
    prepared = PreparedTraining(
        trainer_class=RewardTrainer,
        rows=reward_rows(pack, "train", in_memory, margin=spec.margin),
        run=run,
        initial=initial,
        held_out=reward_rows(pack, "held_out", in_memory, margin=spec.margin) if held_out else None,
        loss={"settings": RewardSettings(center_rewards_coefficient=centers, margin=spec.margin)},
    )
    if prepared.any_config:
        reward_class(prepared.any_config)
    return prepared.with_kernel()


def reward_rows(
    pack: Artifact, split: str, load_in_memory: Literal["auto"] | bool = "auto", *, margin: bool = False
) -> PackedRows:
    """The packed pairs of a split with their sources, and with `margin` the differences of their ratings; SnaketuneError if a
    pair has none."""
    return open_rows(pack, split, load_in_memory, partial(_columns, margin))


def _columns(margin: bool, pairs: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    if not margin:
        return sources_of(pairs)
    without = [pair["id"] for pair in pairs if pair.get("margin") is None]
    if without:
        raise SnaketuneError(
            f"reward.margin: {len(without)} of {len(pairs)} pairs have no ratings, such as {without[0]}; train on sources of "
            "`layout: rated` or of `scores` alone, or remove margin"
        )
    return sources_of(pairs) | {"margin": np.array([pair["margin"] for pair in pairs], np.float32)}


def check_padding(chat: ChatTokenizer) -> None:
    """Raise SnaketuneError if the token that pads also ends turns."""
    if chat.pad_id in chat.stop_ids:
        raise SnaketuneError(
            f"the tokenizer pads with {chat.id_to_token(chat.pad_id)!r}, which ends turns: transformers reads a reward at the "
            "last token that isn't padding, so it would be that of another token than the trained one. Set a pad_token of its "
            "own in the tokenizer's tokenizer_config.json"
        )
