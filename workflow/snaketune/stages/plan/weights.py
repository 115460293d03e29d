"""Where a model's weights lie: in which results, and in what from outside."""

from dataclasses import dataclass
from pathlib import Path

from snaketune.config.training_runs import Pretrained, Scratch
from snaketune.stages.job import Job, files_in

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a model is made of; `models.adapter_stack` puts it together.

    Attributes:
        results: jobs; all but the last hold adapters only, each for the model that follows.
        base: the base model, where the last result holds an adapter only, or there are no results.
    """

    results: tuple[Job, ...] = ()
    base: Pretrained | Scratch | None = None

    @property
    def artifacts(self) -> dict[str, tuple[Job, ...]]:
        """By role."""
        return {"model": self.results[:1], "base_layers": self.results[1:]}

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a base in a local folder."""
        return local_files(self.base.path) if isinstance(self.base, Pretrained) else ()

    def with_adapter(self, job: Job) -> "Weights":
        """These weights and the adapter that a job trained for them."""
        return Weights(results=(job, *self.results), base=self.base)


def local_files(path: str | None) -> tuple[str, ...]:
    """The files of a model in a local folder; none for a Hub id, whose revision stands for its content."""
    return files_in(path, MODEL_FILES) if path and Path(path).is_dir() else ()
