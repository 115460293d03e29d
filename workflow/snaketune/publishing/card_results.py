"""The results of a model card: the training, the trainings that it builds on, their data, and the evaluations of the model."""

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
class CardResult:
    """One finished job; `job` has its inputs as `stage/name`."""

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


class CardResults:
    """All results of a card, by stage and role."""

    def __init__(self, spec: CardSpec, manifests: list[Path]):
        """Read the manifests. Raises SnaketuneError if one can't be read or isn't that of its job."""
        if len(spec.jobs) != len(manifests):
            raise SnaketuneError(f"the spec names {len(spec.jobs)} jobs, but there are {len(manifests)} manifests")
        self.spec = spec
        self.by_job = {f"{job.stage}/{job.name}": _result(job, path) for job, path in zip(spec.jobs, manifests)}

    def of(self, *stages: str) -> list[CardResult]:
        return [result for result in self.by_job.values() if result.job.stage in stages]

    def made_from(self, result: CardResult, role: str) -> CardResult | None:
        return next((self.by_job[key] for key in result.job.made_from.get(role, ())), None)

    @property
    def trainings(self) -> list[CardResult]:
        """The training of the model first, then those that it builds on."""
        return self.of("sft", "dpo")

    @property
    def model(self) -> CardResult:
        return self.trainings[0]

    @cached_property
    def corpora(self) -> list[CardResult]:
        """The corpora that were trained on, in the order of the trainings."""
        packs = [self.made_from(run, "pack") for run in reversed(self.trainings)]
        corpora = [self.made_from(pack, "corpus") for pack in packs if pack]
        return list({corpus.job.name: corpus for corpus in corpora if corpus}.values())

    def words(self, corpus: str) -> CorpusDescription:
        """License and description of a corpus in the config."""
        return self.spec.corpora.get(corpus, NO_WORDS)

    @property
    def base(self) -> dict[str, Any]:
        """The base model in the spec of the first training: a model with a `path`, or the architecture of a new one."""
        return self.trainings[-1].spec["base"]

    @property
    def base_on_hub(self) -> dict[str, Any] | None:
        """The base model if it is on the Hub; None for a local folder, whose files are in the manifest, and for a new model."""
        local = self.trainings[-1].manifest["inputs"].get("base")
        return self.base if not local and HUB_ID.fullmatch(self.base.get("path", "")) else None

    @property
    def is_adapter(self) -> bool:
        """Return True if the result has only adapter weights."""
        return "base_dtype" in self.model.manifest

    def hub_datasets(self, corpus: CardResult) -> list[str]:
        """The Hub datasets that a corpus is made of."""
        paths = (source["hub"]["path"] for source in corpus.spec["sources"] if source["hub"])
        # These become URLs, and manifests of other origin are untrusted.
        return [path for path in paths if HUB_ID.fullmatch(path)]

    def read_scores(self, evaluation: CardResult) -> dict[str, Any]:
        """Read scores.json of an evaluation. Raises SnaketuneError if it is damaged."""
        return json.loads(evaluation.artifact.file("scores.json").read_text(encoding="utf-8"))


def _result(job: ReportedJob, path: Path) -> CardResult:
    artifact = read_artifact(path, STAGES[job.stage].payload)
    if path.parent.parts[-len(job.name.split("/")) - 1 :] != (job.stage, *job.name.split("/")):
        raise SnaketuneError(
            f"{path} isn't the manifest of {job.stage}/{job.name}: give them in the order of spec.jobs"
        )
    return CardResult(job=job, artifact=artifact)
