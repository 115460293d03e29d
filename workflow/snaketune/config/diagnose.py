"""The `diagnose:` section: changes of a run that are timed in short trainings, to find what makes it faster."""

from copy import deepcopy
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from snaketune.config.base import NAME_PATTERN, Model, Name, PositiveFloat, PositiveInt
from snaketune.config.training_runs import Dpo, Sft
from snaketune.errors import SnaketuneError

BASELINE, LEARNING_RATES = "baseline", "learning-rates"
# Fewer losses have no slope.
MIN_RANGE_STEPS = 20
# Keys that keep the corpus and the initial weights the same; otherwise the trials couldn't be compared.
CHANGEABLE = ("packing", "training", "lora", "quantization", "operation")
# Losses of DPO runs may need other log-probabilities of the reference, so of losses only that of SFT runs can be changed.
SFT_ONLY = ("loss",)
Change = Annotated[dict[str, Any], Field(min_length=1)]


class Diagnosis(Model):
    """Changes of a run, timed in short trainings on the same rows with the same seed. Variants run in turn, in several rounds,
    so that a machine that heats up doesn't favour one of them."""

    run: Annotated[str, Field(pattern=f"^(sft|dpo):{NAME_PATTERN}$")]
    """Baseline: `sft:NAME` or `dpo:NAME`."""
    changes: dict[Name, Change] = {}
    """Changes by a name of your choice: dotted keys of the run and their values, such as `{longer: {packing.length: 2048}}`.
    Only keys of `packing`, `training`, `lora`, `quantization` and `operation` can be changed, and of SFT runs `loss`."""
    learning_rates: tuple[PositiveFloat, PositiveFloat] | None = None
    """Range of a test of learning rates (Smith, 2017), such as `[1.0e-6, 1.0e-2]`: one more trial of `steps` steps, at least 20
    and better 100, in which the learning rate rises from the first to the second by equal factors. The result says at which
    one the loss falls fastest."""
    mode: Literal["one-at-a-time", "add-one-in"] = "one-at-a-time"
    """`one-at-a-time` applies each change to the baseline; `add-one-in` applies each change on top of those before it."""
    steps: Annotated[int, Field(ge=4)] = 20
    """Measured optimizer steps per variant and round."""
    warmup_steps: PositiveInt = 3
    """Unmeasured optimizer steps before them."""
    repeats: PositiveInt = 3
    """Rounds, each with every variant. Results are medians over rounds, with minimum and maximum."""

    def variants(self, name: str, run: Sft | Dpo) -> dict[str, Sft | Dpo]:
        """The variants of this diagnosis, as `variants_of` returns them. Args: name: of the diagnosis; run: the baseline."""
        return variants_of(f"diagnose.{name}.changes", self.changes, run, self.mode == "add-one-in")

    @field_validator("changes")
    @classmethod
    def _changeable(cls, changes: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        changeable = (*CHANGEABLE, *(SFT_ONLY if info.data.get("run", "").startswith("sft:") else ()))
        for name, change in changes.items():
            if name in (BASELINE, LEARNING_RATES):
                raise ValueError(f"{name!r} is the name of a trial of its own; choose another name for the change")
            if wrong := next((key for key in change if key.partition(".")[0] not in changeable), None):
                raise ValueError(f"{name}.{wrong}: can't be changed here; expected a key below {', '.join(changeable)}")
        return changes

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        if not self.changes and not self.learning_rates:
            raise ValueError("expected `changes`, or `learning_rates` to test, or both; found neither")
        if self.learning_rates and self.learning_rates[0] >= self.learning_rates[1]:
            raise ValueError(f"learning_rates: expected the lowest and the highest, found {list(self.learning_rates)}")
        if self.learning_rates and self.steps < MIN_RANGE_STEPS:
            raise ValueError(
                f"steps: {self.steps} are too few to test learning_rates; expected {MIN_RANGE_STEPS} or more"
            )
        return self


def slow_settings(run: Sft | Dpo) -> dict[str, dict[str, Any]]:
    """Settings of a run that are slow on most machines, as changes to try: names and the keys to set."""
    training, is_raw = run.training, run.packing.strategy == "none"
    doubts = (
        (is_raw, "packed", "packing.strategy", "best-fit-decreasing"),
        (training.gradient_checkpointing is True, "activations-kept", "training.gradient_checkpointing", False),
        (run.operation.activation_offloading, "activations-on-device", "operation.activation_offloading", False),
        (training.precision == "float32", "precision-auto", "training.precision", "auto"),
        (training.optimizer == "adamw_torch", "fused-optimizer", "training.optimizer", "adamw_torch_fused"),
        # Not `true`, which fails if the model can't be compiled.
        (training.compile is False and not is_raw, "compile-auto", "training.compile", "auto"),
    )
    return {name: {key: value} for is_slow, name, key, value in doubts if is_slow}


def variants_of(
    key: str, changes: dict[str, dict[str, Any]], run: Sft | Dpo, adding: bool = False
) -> dict[str, Sft | Dpo]:
    """The baseline and its variants by name; SnaketuneError if a change doesn't result in a valid run.

    Args:
        key: dotted key of the changes in the config, for messages.
        adding: whether each change is applied on top of those before it.
    """
    variants: dict[str, Sft | Dpo] = {BASELINE: run}
    base = run.model_dump(by_alias=True, exclude_unset=True)
    for change, keys in changes.items():
        changed = deepcopy(base)
        for dotted, value in keys.items():
            *sections, leaf = dotted.split(".")
            section = changed
            for name in sections:
                if not isinstance(section.get(name), dict):
                    section[name] = {}
                section = section[name]
            section[leaf] = value
        try:
            variants[change] = type(run).model_validate(changed)
        except ValidationError as error:
            issue = error.errors()[0]
            at = f"{'.'.join(map(str, issue['loc']))}: " if issue["loc"] else ""
            raise SnaketuneError(f"{key}.{change}: {at}{issue['msg']}, found {issue['input']!r}") from None
        if adding:
            base = changed
    return variants
