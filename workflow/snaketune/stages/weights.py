"""Where a model's weights lie: in which results, and in what from outside."""

from dataclasses import dataclass
from pathlib import Path

from snaketune.config.runs import Pretrained, Scratch
from snaketune.stages.jobs import Job, files_in

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a model is made of; `models.stacked` puts it together.

    Attributes:
        results: jobs, from the uppermost down; all but the last hold adapters alone.
        base: what lies beneath them where the last one holds an adapter alone too, or there is none.
    """

    results: tuple[Job, ...] = ()
    base: Pretrained | Scratch | None = None

    @property
    def artifacts(self) -> dict[str, tuple[Job, ...]]:
        """By role."""
        return {"model": self.results[:1], "beneath": self.results[1:]}

    @property
    def files(self) -> tuple[str, ...]:
        return local_files(self.base.path) if isinstance(self.base, Pretrained) else ()


def local_files(path: str | None) -> tuple[str, ...]:
    """The files of a model in a local folder; none for a Hub id, whose revision stands for its content."""
    return files_in(path, MODEL_FILES) if path and Path(path).is_dir() else ()
