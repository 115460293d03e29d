"""Supervision flags of a turn: `loss_weight`, `weight`, `train`, `loss` or `training` beside its content."""

from typing import Any

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import Malformed

KEYS = ("loss_weight", "weight", "train", "trainable", "loss", "loss_scale", "training", "output_with_loss")
# Supervises only parts of a turn.
PARTIAL_KEY = "train_detail"
MASK_KEY = "mask"


def is_supervised(item: dict[str, Any], where: str) -> bool:
    """Return True if a message is supervised; the default without a flag.

    >>> is_supervised({"role": "assistant", "content": "Hi", "weight": 0}, "turn 2")
    False

    Raises:
        Malformed: another weight than 0 and 1, or two that contradict each other.
    """
    if item.get(MASK_KEY) is not None:
        raise Malformed(
            "unsupported_weight",
            f"{where}: {MASK_KEY} may mean that a turn is supervised, or that it isn't; use train: true or false instead",
        )
    if item.get(PARTIAL_KEY):
        raise Malformed(
            "unsupported_weight",
            f"{where}: {PARTIAL_KEY} supervises parts of a turn, but a turn is supervised or not; use train, or split the turn",
        )
    flags = {key: item[key] for key in KEYS if item.get(key) is not None}
    for key, value in flags.items():
        # True and 1.0 equal 1.
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise Malformed(
                "unsupported_weight",
                f"{where}: {key} is {excerpt(value)[:40]}; a turn is supervised or not, so expected 1 or 0, true or false",
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise Malformed("unsupported_weight", f"{where}: {' and '.join(flags)} contradict each other")
    return all(flags.values())
