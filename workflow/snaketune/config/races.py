"""`race`: variants of a grid that are paused once held-out rows show that others are better."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from snaketune.config.base import Model, PositiveInt
from snaketune.config.held_out import SnapshotShare

RaceMetric = Literal[
    "held_out_loss",
    "reward_accuracy",
    "reward_margin_nats",
    "logp_accuracy",
    "logp_accuracy_per_token",
    "logp_margin_nats",
]
# Scores of conversations and documents; the others are of pairs.
OF_SFT = ("held_out_loss",)
NEEDS_REFERENCE = ("reward_accuracy", "reward_margin_nats")


class Race(Model):
    """Pauses variants of a grid that are clearly worse than others on the held-out rows of the run's corpus. At each rung, all
    variants that are still running are evaluated, and one is paused if at least `keep` others that aren't paused are better
    beyond chance: the probability that chance alone pauses one of the best `keep`, at any rung, is 5% at most (see below)."""

    metric: RaceMetric
    """Score that is compared, as an evaluation computes it: `held_out_loss` for SFT, the others for DPO."""
    keep: PositiveInt = 1
    """Number of variants that are trained to the end at least. Raising it resumes paused variants."""
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """A difference of the score that doesn't matter: others also replace a variant if they aren't worse than it by more, beyond
    chance. So of variants that are as good as equal, `keep` are trained to the end."""
    rungs: Annotated[tuple[SnapshotShare, ...], Field(min_length=1)]
    """Shares of the run, such as `[0.1, 0.3]`, at which variants are compared. Each is a snapshot of every variant."""

    @field_validator("rungs")
    @classmethod
    def _ascending(cls, rungs: tuple[float, ...]) -> tuple[float, ...]:
        if list(rungs) != sorted(set(rungs)):
            raise ValueError(f"expected ascending shares, found {list(rungs)}")
        return rungs
