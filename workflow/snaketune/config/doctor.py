"""The `doctor:` section: which runs are timed, and which changes of them are tried, to find what makes them faster."""

from typing import Annotated, Any

from pydantic import Field

from snaketune.config.base import Model, Name, PositiveInt, TrainedModel
from snaketune.config.nested import changed
from snaketune.config.training_runs import Dpo, Sft
from snaketune.errors import SnaketuneError

BASELINE = "baseline"
# Keys that keep the corpus and the initial weights the same; otherwise trainings couldn't be compared.
CHANGEABLE = ("packing", "training", "lora", "quantization", "operation")
Change = Annotated[dict[str, Any], Field(min_length=1)]


class Doctor(Model):
    """Runs that `snakemake doctor` times in short trainings, and changes of them. Variants run in turn, in several rounds, so
    that a machine that heats up doesn't favour one of them."""

    runs: tuple[TrainedModel, ...] | None = None
    """Runs to examine: `sft:NAME` or `dpo:NAME`. By default all, of those that take the same time and memory the first one."""
    changes: dict[Name, Change] = {}
    """Changes to try on each of these runs, besides settings that are slow on most machines. By a name of your choice: dotted
    keys of the run and their values, such as `{longer: {packing.length: 2048}}`. Only keys of `packing`, `training`, `lora`,
    `quantization` and `operation` can be changed, and of SFT runs `loss`."""
    steps: Annotated[int, Field(ge=4)] = 20
    """Measured optimizer steps per variant and round."""
    repeats: PositiveInt = 3
    """Rounds, each with every variant; without variants there is one. Results are medians over rounds, with minimum and
    maximum."""

    def examines(self, section: str, name: str) -> bool:
        return self.runs is None or f"{section}:{name}" in self.runs

    def tried_on(self, run: Sft | Dpo) -> dict[str, Change]:
        """The changes that are tried on a run, by name: of settings that are slow on most machines, and those configured."""
        training, is_raw = run.training, run.packing.strategy == "none"
        slow = (
            (is_raw, "packed", "packing.strategy", "best-fit-decreasing"),
            (training.gradient_checkpointing is True, "activations-kept", "training.gradient_checkpointing", False),
            (run.operation.activation_offloading, "activations-on-device", "operation.activation_offloading", False),
            (training.precision == "float32", "precision-auto", "training.precision", "auto"),
            (training.optimizer == "adamw_torch", "fused-optimizer", "training.optimizer", "adamw_torch_fused"),
            # Not `true`, which fails if the model can't be compiled.
            (training.compile is False and not is_raw, "compile-auto", "training.compile", "auto"),
        )
        return {name: {key: value} for is_slow, name, key, value in slow if is_slow} | self.changes

    def variants(self, run: Sft | Dpo) -> dict[str, Sft | Dpo]:
        """The baseline and its variants by name; SnaketuneError if a change doesn't result in a valid run."""
        return {BASELINE: run} | {name: _varied(run, name, change) for name, change in self.tried_on(run).items()}


def _varied(run: Sft | Dpo, name: str, change: Change) -> Sft | Dpo:
    # Other losses of DPO runs may need other log-probabilities of the reference.
    changeable = (*CHANGEABLE, "loss") if isinstance(run, Sft) else CHANGEABLE
    for dotted in change:
        if dotted.partition(".")[0] not in changeable:
            raise SnaketuneError(
                f"doctor.changes.{name}.{dotted}: can't be changed here; expected a key below {', '.join(changeable)}"
            )
    return changed(f"doctor.changes.{name}", run, change)
