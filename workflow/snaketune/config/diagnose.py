"""`diagnose:`, what would make a run faster: changes to try, each in a short training of its own."""

from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from snaketune.config.base import NAME_PATTERN, Model, Name, PositiveInt
from snaketune.config.training_runs import Dpo, Sft
from snaketune.errors import SnaketuneError

BASELINE = "baseline"
# What a training's rows, steps and portions follow from; of other rows or other weights, nothing could be compared.
CHANGEABLE = ("packing", "training", "lora", "quantization", "operation")
Change = Annotated[dict[str, Any], Field(min_length=1)]


class Diagnosis(Model):
    """Changes of a run, tried in short trainings on the same rows with the same seed, one after the other in rounds, so that a
    machine that gets warm favours none."""

    run: Annotated[str, Field(pattern=f"^(sft|dpo):{NAME_PATTERN}$")]
    """`sft:NAME` or `dpo:NAME`, which is the baseline."""
    changes: Annotated[dict[Name, Change], Field(min_length=1)]
    """By a name of yours, dotted keys of the run and their values: `{longer: {packing.length: 2048}}`. Keys of `packing`,
    `training`, `lora`, `quantization` and `operation` can be changed."""
    mode: Literal["one-at-a-time", "add-one-in"] = "one-at-a-time"
    """`one-at-a-time` puts each change on the baseline alone; `add-one-in` puts each on those before it, in their order."""
    steps: Annotated[int, Field(ge=4)] = 20
    """Optimizer steps that are measured, of each variant in each round."""
    warmup_steps: PositiveInt = 3
    """Steps before these, which aren't."""
    repeats: PositiveInt = 3
    """Rounds, each with every variant; figures are medians over them, with the least and the most."""

    def variants(self, name: str, run: Sft | Dpo) -> dict[str, Sft | Dpo]:
        """As `variants_of`. Args: name: of the diagnosis; run: that it is of."""
        return variants_of(f"diagnose.{name}.changes", self.changes, run, self.mode == "add-one-in")

    @field_validator("changes")
    @classmethod
    def _of_what_can_be_changed(cls, changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, change in changes.items():
            if name == BASELINE:
                raise ValueError(f"{BASELINE!r} is the run itself; call the change something else")
            for key in change:
                if key.partition(".")[0] not in CHANGEABLE:
                    raise ValueError(
                        f"{name}.{key}: can't be changed here; expected a key below {', '.join(CHANGEABLE)}"
                    )
        return changes


def slow_settings(run: Sft | Dpo) -> dict[str, dict[str, Any]]:
    """What of a run is set to what is slow on most machines, as changes to try."""
    found: dict[str, dict[str, Any]] = {}
    if run.packing.strategy == "none":
        found["packed"] = {"packing.strategy": "best-fit-decreasing"}
    if run.training.gradient_checkpointing is True:
        found["activations-kept"] = {"training.gradient_checkpointing": False}
    if run.training.precision == "float32":
        found["precision-auto"] = {"training.precision": "auto"}
    if run.training.optimizer == "adamw_torch":
        found["fused-optimizer"] = {"training.optimizer": "adamw_torch_fused"}
    if run.training.compile is False and run.packing.strategy != "none":
        # Not `true`, which stops a training where nothing can be compiled.
        found["compile-auto"] = {"training.compile": "auto"}
    return found


def variants_of(
    key: str, changes: dict[str, dict[str, Any]], run: Sft | Dpo, adding: bool = False
) -> dict[str, Sft | Dpo]:
    """By name, the baseline and what the changes make of it, in their order.

    Args:
        key: where the changes are in the config.
        run: the baseline.
        adding: whether each change is put on those before it.
    Raises:
        SnaketuneError: a change makes no run.
    """
    found: dict[str, Sft | Dpo] = {BASELINE: run}
    told = run.model_dump(by_alias=True, exclude_unset=True)
    for change, keys in changes.items():
        changed = deepcopy(told)
        for dotted, value in keys.items():
            _put(changed, dotted.split("."), value)
        try:
            found[change] = type(run).model_validate(changed)
        except ValidationError as error:
            issue = error.errors()[0]
            at = ".".join(str(part) for part in issue["loc"])
            raise SnaketuneError(
                f"{key}.{change}: {f'{at}: ' if at else ''}{issue['msg']}, found {issue['input']!r}"
            ) from None
        if adding:
            told = changed
    return found


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for folder in path[:-1]:
        inner = into.get(folder)
        into[folder] = inner = inner if isinstance(inner, dict) else {}
        into = inner
    into[path[-1]] = value
