"""The results that a card tells of: the training, those that it goes on from, their rows, and what was measured of it."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.config.load import HUB_ID
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import CardSpec, CorpusDescription, ReportedJob
from snaketune.stages.table import STAGES

NO_WORDS = CorpusDescription(license=None, description=None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished job, with what it was made from as `stage/name`."""

    job: ReportedJob
    artifact: Artifact

    @property
    def manifest(self) -> dict[str, Any]:
        return self.artifact.manifest

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest["counts"]


class Told:
    """All of them, by what they are."""

    def __init__(self, spec: CardSpec, manifests: list[Path]):
        """Raises SnaketuneError if a manifest can't be read or isn't that of its job."""
        if len(spec.jobs) != len(manifests):
            raise SnaketuneError(f"--spec names {len(spec.jobs)} jobs, but there are {len(manifests)} manifests")
        self.spec = spec
        self.results = {f"{job.stage}/{job.name}": _result(job, path) for job, path in zip(spec.jobs, manifests)}

    def of(self, *stages: str) -> list[Result]:
        return [result for result in self.results.values() if result.job.stage in stages]

    def made_from(self, result: Result, role: str) -> Result | None:
        return next((self.results[key] for key in result.job.made_from.get(role, ())), None)

    @property
    def trainings(self) -> list[Result]:
        """The model's own first, then those that it goes on from."""
        return self.of("sft", "dpo")

    @property
    def model(self) -> Result:
        return self.trainings[0]

    @cached_property
    def corpora(self) -> list[Result]:
        """That were trained on, in the order of the trainings."""
        packs = [self.made_from(run, "pack") for run in reversed(self.trainings)]
        found = [self.made_from(pack, "corpus") for pack in packs if pack]
        return list({corpus.job.name: corpus for corpus in found if corpus}.values())

    def words(self, corpus: str) -> CorpusDescription:
        """What the config says of it."""
        return self.spec.corpora.get(corpus, NO_WORDS)

    @property
    def base(self) -> dict[str, Any]:
        """What all of it began with, as the first training's spec has it: a model with a `path`, or the shape of a new one."""
        return self.trainings[-1].spec["base"]

    @property
    def base_on_hub(self) -> dict[str, Any] | None:
        """The same, where it is a model on the Hub: files of a folder are in the manifest, and a new one has no path."""
        local = self.trainings[-1].manifest["inputs"].get("base")
        return self.base if not local and HUB_ID.fullmatch(self.base.get("path", "")) else None

    @property
    def is_adapter(self) -> bool:
        """Whether the model's weights lie elsewhere, and the result is what is added to them."""
        return "base_dtype" in self.model.manifest

    def hub_datasets(self, corpus: Result) -> list[str]:
        """The datasets on the Hub that a corpus is made of."""
        paths = (source["hub"]["path"] for source in corpus.spec["sources"] if source["hub"])
        # A manifest from elsewhere may say anything, and these become addresses.
        return [path for path in paths if HUB_ID.fullmatch(path)]

    def scores(self, evaluation: Result) -> dict[str, Any]:
        """Raises SnaketuneError if they were damaged."""
        return json.loads(evaluation.artifact.file("scores.json").read_text(encoding="utf-8"))


def _result(job: ReportedJob, path: Path) -> Result:
    artifact = read_artifact(path, STAGES[job.stage].payload)
    if path.parent.parts[-len(job.name.split("/")) - 1 :] != (job.stage, *job.name.split("/")):
        raise SnaketuneError(
            f"{path} isn't the manifest of {job.stage}/{job.name}: give them in the order of spec.jobs"
        )
    return Result(job=job, artifact=artifact)
