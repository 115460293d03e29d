"""All results of a report: their names, inputs, manifests, run.json files and scores."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES
from snaketune.tables import read_table

MODEL_KINDS = ("base", "sft", "dpo")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished job.

    Attributes:
        name: Its folder below `results/<stage>/`, which has two levels for evaluations and for results made in parts.
        made_from: By role, the jobs of its inputs, as `stage/name`.
        config_key: The config key that defines it, if it isn't its own name: that of its grid.
        run: Content of run.json; may be empty.
    """

    stage: str
    name: str
    made_from: dict[str, tuple[str, ...]]
    artifact: Artifact
    run: dict[str, Any]
    config_key: str = ""

    @property
    def key(self) -> str:
        """The config key that defines it: `dpo.demo`, `eval.demo`; `dpo.sweep` for all variants of a grid."""
        return self.config_key or f"{self.stage}.{self.name.partition('/')[0]}"

    @property
    def manifest(self) -> dict[str, Any]:
        return self.artifact.manifest

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest["counts"]

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    @property
    def name_without_part(self) -> str:
        """The name without the number of the part: `demo` for `demo/1-of-3`."""
        return self.name.partition("/")[0] if "{part}" in STAGES[self.stage].job_name else self.name

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log of a training, a dict per logged step."""
        return self.run.get("history") or []

    @property
    def label(self) -> str:
        """The name that evaluations use for a trained model, `sft:demo`; the plain name for other jobs."""
        return f"{self.stage}:{self.name}" if self.stage in MODEL_KINDS else self.name


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """One model in one evaluation, with its scores and responses."""

    result: Result
    scores: dict[str, Any]
    responses: list[dict[str, Any]]

    @property
    def evaluation(self) -> str:
        return self.result.name.partition("/")[0]

    @property
    def model(self) -> str:
        """`base:NAME`, `sft:NAME` or `dpo:NAME`."""
        kind, _, name = self.result.name.partition("/")[2].partition("-")
        return f"{kind}:{name}"

    @cached_property
    def pairs(self) -> pa.Table | None:
        """Log-probabilities of the held-out pairs (columns: `evaluation.preference_accuracy.PAIRS`); None for older results."""
        known = "pairs.arrow" in self.result.manifest["payload"]
        return read_table(self.result.artifact.file("pairs.arrow")) if known else None

    @cached_property
    def losses(self) -> dict[str, dict[tuple[str, int], tuple[float, int]]]:
        """Summed loss and tokens of each held-out document: corpus → (pack digest, document) → (nats, tokens).

        Empty for older results.
        """
        if "losses.arrow" not in self.result.manifest["payload"]:
            return {}
        packs = dict(
            zip(self.result.manifest["spec"]["conversations"], self.result.manifest["inputs"].get("packs", ()))
        )
        losses: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
        for row in read_table(self.result.artifact.file("losses.arrow")).to_pylist():
            key = packs.get(row["corpus"], ""), row["document"]
            losses.setdefault(row["corpus"], {})[key] = row["loss_nats"], row["tokens"]
        return losses


class ResultSet:
    """All results, in an order that doesn't depend on the order of the arguments."""

    def __init__(self, jobs: tuple[ReportedJob, ...], manifests: list[Path], runs: list[Path]):
        """Read all manifests and run.json files.

        Args:
            jobs: Names and inputs of the results, in the order of their manifests.
        Raises SnaketuneError if a manifest or a run.json can't be read.
        """
        run_of = {path.parent: _read_json(path) for path in runs}
        if len(jobs) != len(manifests):
            raise SnaketuneError(f"the spec names {len(jobs)} jobs, but there are {len(manifests)} manifests")
        unsorted = [_result(job, path, run_of.get(path.parent, {})) for job, path in zip(jobs, manifests)]
        self.all = sorted(unsorted, key=lambda result: (list(STAGES).index(result.stage), natural(result.name)))
        self._by_key = {f"{result.stage}/{result.name}": result for result in self.all}

    @property
    def stages(self) -> set[str]:
        return {result.stage for result in self.all}

    def of(self, *stages: str) -> list[Result]:
        return [result for result in self.all if result.stage in stages]

    def made_from(self, result: Result, role: str) -> list[Result]:
        """The inputs of `result` in a role, as far as they are in the report."""
        return [self._by_key[key] for key in result.made_from.get(role, ()) if key in self._by_key]

    @cached_property
    def evaluations(self) -> dict[str, list[ScoredModel]]:
        """The models of each evaluation, from base to DPO, by its name."""
        by_evaluation: dict[str, list[ScoredModel]] = {}
        for result in self.of("eval"):
            scored = scored_of(result)
            by_evaluation.setdefault(scored.evaluation, []).append(scored)
        return {
            name: sorted(models, key=lambda scored: model_order(scored.model)) for name, models in by_evaluation.items()
        }

    @cached_property
    def initial_models(self) -> dict[str, str]:
        """The label of the initial model of each DPO run, by the label of the run."""
        return {run.label: made[0].label for run in self.of("dpo") if (made := self.made_from(run, "model"))}

    @property
    def models(self) -> list[str]:
        """Labels of all models, from base to DPO."""
        evaluated = (scored.model for models in self.evaluations.values() for scored in models)
        return sorted({*evaluated, *(result.label for result in self.of("sft", "dpo"))}, key=model_order)


def natural(name: str) -> list[tuple[int, Any]]:
    """Sort key that puts `lr-2` before `lr-10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def model_order(label: str) -> tuple[int, list[tuple[int, Any]]]:
    """Sort key: base, then SFT, then DPO."""
    kind, _, name = label.partition(":")
    return MODEL_KINDS.index(kind), natural(name)


def unique(values: Iterable[Any]) -> list[Any]:
    """Distinct values in order of first appearance."""
    return list(dict.fromkeys(values))


def _result(job: ReportedJob, path: Path, run: dict[str, Any]) -> Result:
    artifact = read_artifact(path, STAGES[job.stage].payload)
    # The manifest doesn't hold the name of its job; its folder does.
    if path.parent.parts[-len(job.name.split("/")) - 1 :] != (job.stage, *job.name.split("/")):
        raise SnaketuneError(
            f"{path} isn't the manifest of {job.stage}/{job.name}: give them in the order of spec.jobs"
        )
    return Result(
        stage=job.stage, name=job.name, made_from=job.made_from, artifact=artifact, run=run, config_key=job.config_key
    )


def scored_of(result: Result) -> ScoredModel:
    """Read the scores and responses of an evaluation. Raises SnaketuneError if they can't be read."""
    lines = result.artifact.file("responses.jsonl").read_text(encoding="utf-8").split("\n")
    return ScoredModel(
        result=result,
        scores=_read_json(result.artifact.file("scores.json")),
        responses=[json.loads(line) for line in lines if line],
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{path} can't be read: {error}") from None
