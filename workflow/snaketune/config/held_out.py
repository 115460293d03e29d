"""Held-out rows that are measured while a training runs, and what their measurements decide: `training.evaluate`, `keep`,
`stop_if`, and `race`, in which variants of a grid are paused once held-out rows show that others are better."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Model, PositiveInt

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

Metric = Literal["loss", "accuracy", "margin"]
Share = Annotated[float, Field(gt=0, lt=1)]
# A share that is in the names of results.
SnapshotShare = Annotated[float, Field(ge=0.001, le=0.999, strict=True)]


def snapshot_name(run: str, share: float) -> str:
    """The name of a run's snapshot.

    >>> snapshot_name("demo", 0.25)
    'demo@0.25'
    """
    return f"{run}@{share:.10g}"


class Evaluate(Model):
    """Held-out rows of the run's corpus that are measured before the first step, at regular steps and after the last one:
    loss, and for pairs also reward accuracy, margin and KL, in all and by source. They shape no weights, so edits rerun
    nothing, unless `keep: best` or `stop_if` decides by them."""

    every: Literal["auto"] | Share | PositiveInt = "auto"
    """Interval: a share of the run below 1, such as 0.1, else a number of optimizer steps. `auto` measures ten times; fewer
    times, and then fewer rows, if that would take more than 3% of the training's time."""
    rows: PositiveInt = 512
    """Packed rows per measurement, the same each time, drawn at random from the held-out rows; all if there are fewer."""
    samples: Annotated[int, Field(ge=0)] = 2
    """Held-out prompts that the model answers at each measurement, greedily, with up to 48 tokens, for log and report; with
    `every: auto`, only if they fit in its 3%. Not with models that are sharded over processes."""


class StopTraining(Model):
    """Ends a training early by its held-out rows."""

    held_out_rises: PositiveInt
    """Stops once so many measurements in a row are worse than the best one."""


class Average(Model):
    """An average of the weights over the steps, which becomes the result and is what held-out rows measure."""

    ema: Annotated[float, Field(gt=0, lt=1)]
    """Exponential moving average of the trained weights (`torch.optim.swa_utils`): after each step, its share of the average so
    far, such as 0.999; the rest is of the new weights."""


class Selection(Model):
    """Which weights become the result, and what the measurements of `evaluate` decide about it."""

    keep: Literal["last", "best"] = "last"
    """The weights that become the result: those of the last step, or of the `best` measurement of held-out rows by `metric`,
    which may be the initial ones. Needs disk space for two more copies of the trained weights. Not with `launch: deepspeed`."""
    metric: Metric = "loss"
    """Metric of `keep: best` and `stop_if`, on held-out rows: the lowest `loss`; or for pairs the highest reward `accuracy` or
    `margin`."""
    stop_if: StopTraining | None = None
    """Ends the training early, such as `{held_out_rises: 3}`. The report shows when and why."""
    evaluate: Evaluate | Literal[False] = Evaluate()
    """Measures held-out rows while the training runs, if the corpus holds rows out; `false` doesn't."""

    average: Average | None = None
    """Averages the weights, such as `{ema: 0.999}`, in a copy of the trained weights. Not with `launch: deepspeed`."""
    until: Share | None = None
    """Ends the training after this share of its optimizer steps, with the learning rate schedule of the whole run. Set by
    `snapshots`."""

    @property
    def selects(self) -> bool:
        """Whether measurements shape the result."""
        return self.keep == "best" or self.stop_if is not None

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.selects and not self.evaluate:
            key = "keep: best" if self.keep == "best" else "stop_if"
            raise ValueError(
                f"{key} decides by measurements of held-out rows, which `evaluate: false` turns off; remove it"
            )
        if self.metric != "loss" and not self.selects:
            raise ValueError(f"metric: {self.metric} has no effect without `keep: best` or `stop_if`")
        return self


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
