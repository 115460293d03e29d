"""The weights of a model: the results that hold them, and the base model in a local folder or on the Hub."""

from dataclasses import dataclass
from pathlib import Path

from snaketune.config.training_runs import Pretrained, Scratch
from snaketune.stages.job import Job, files_in

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parts of a model; `models.adapter_stack` assembles them.

    Attributes:
        results: jobs; all but the last hold adapters only, each for the model that the following ones make.
        base: the base model, where the last result holds an adapter only, or there are no results.
    """

    results: tuple[Job, ...] = ()
    base: Pretrained | Scratch | None = None

    @property
    def artifacts(self) -> dict[str, tuple[Job, ...]]:
        """The results by role."""
        return {"model": self.results[:1], "base_layers": self.results[1:]}

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a base in a local folder."""
        return local_files(self.base.path) if isinstance(self.base, Pretrained) else ()

    def with_adapter(self, job: Job) -> "Weights":
        """Return these weights with the adapter that a job trained for them."""
        return Weights(results=(job, *self.results), base=self.base)


def local_files(path: str | None) -> tuple[str, ...]:
    """Return the files of a model in a local folder; none for a Hub id, whose revision identifies its content."""
    return files_in(path, MODEL_FILES) if path and Path(path).is_dir() else ()
