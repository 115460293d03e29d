"""All results of a report: manifests, run.json files, and the scores and responses of every evaluated model."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.publishing.results import Result, Results, is_number, read_json, read_lines
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES
from snaketune.tables import read_table

MODEL_KINDS = ("base", "sft", "dpo", "merge", "reward")


def model_named(job: str) -> str:
    """The model of an evaluation's job.

    >>> model_named("all/sft-my-model")
    'sft:my-model'
    """
    kind, _, name = job.partition("/")[2].partition("-")
    return f"{kind}:{name}"


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
        return model_named(self.result.name)

    @property
    def engine(self) -> str:
        """The engine that generated the responses, with its version; empty without responses."""
        return engine_name((self.result.manifest.get("generation") or {}).get("engine", {}))

    @cached_property
    def pairs(self) -> pa.Table:
        """Log-probabilities of the held-out pairs (columns: `evaluation.held_out.PAIRS`)."""
        return read_table(self.result.artifact.file("pairs.arrow"))

    @cached_property
    def losses(self) -> dict[str, dict[tuple[str, int], tuple[float, int]]]:
        """Summed loss and tokens of each held-out document: corpus → (pack digest, document) → (nats, tokens)."""
        manifest, table = self.result.manifest, read_table(self.result.artifact.file("losses.arrow"))
        packs = dict(zip(manifest["spec"].get("conversations", ()), manifest["inputs"].get("packs", ())))
        losses: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
        for row in table.to_pylist():
            document = packs.get(row["corpus"], ""), row["document"]
            losses.setdefault(row["corpus"], {})[document] = row["loss_nats"], row["tokens"]
        return losses


class ResultSet(Results):
    """All results of a report, in an order that doesn't depend on the order of the arguments."""

    def __init__(self, jobs: tuple[ReportedJob, ...], manifests: list[Path], runs: list[Path]):
        super().__init__(jobs, manifests, runs)
        order = list(STAGES)
        self.all = sorted(self.by_key.values(), key=lambda result: (order.index(result.stage), natural(result.name)))
        self.by_key = {f"{result.stage}/{result.name}": result for result in self.all}
        self.stages = {result.stage for result in self.all}

    @cached_property
    def evaluations(self) -> dict[str, list[ScoredModel]]:
        """The models of each evaluation, from base to DPO, by its name; reward models are apart."""
        by_name: dict[str, list[ScoredModel]] = {}
        policies = (result for result in self.of("eval") if not result.spec.get("rewards"))
        for scored in map(scored_of, policies):
            by_name.setdefault(scored.evaluation, []).append(scored)
        return {name: sorted(models, key=lambda model: model_order(model.model)) for name, models in by_name.items()}

    @property
    def of_rewards(self) -> list[Result]:
        """The evaluations of reward models."""
        return [result for result in self.of("eval") if result.spec.get("rewards")]

    @property
    def scored(self) -> list[ScoredModel]:
        return [scored for models in self.evaluations.values() for scored in models]

    @cached_property
    def initial_models(self) -> dict[str, str]:
        """The label of the initial model of each DPO run, by the label of the run."""
        return {run.label: inputs[0].label for run in self.of("dpo") if (inputs := self.made_from(run, "model"))}

    @property
    def models(self) -> list[str]:
        """Labels of all models, from base to DPO."""
        trained = {result.label for result in self.trainings}
        evaluated = {scored.model for scored in self.scored} | {model_named(result.name) for result in self.of_rewards}
        return sorted(evaluated | trained, key=model_order)


def scored_of(result: Result) -> ScoredModel:
    """Read the scores and responses of an evaluation. Raises SnaketuneError if they can't be read."""
    path, lines = (result.artifact.file(name) for name in ("scores.json", "responses.jsonl"))
    return ScoredModel(
        result=result,
        scores=read_json(path),
        responses=read_lines(lines),
    )


def engine_name(about: dict[str, Any]) -> str:
    """An engine as a manifest describes it, in a few words.

    >>> engine_name({"name": "vllm", "version": "0.32.0", "device": "cuda", "dtype": "bfloat16"})
    'vllm 0.32.0 bfloat16'
    """
    return " ".join(str(about[key]) for key in ("name", "version", "model", "dtype") if about.get(key))


def by_whole(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """The parts of each result, by its stage and its name without the number of the part (`demo` for `demo/1-of-3`)."""
    parts: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        in_parts = "{part}" in STAGES[result.stage].job_name
        name = result.name.partition("/")[0] if in_parts else result.name
        parts.setdefault((result.stage, name), []).append(result)
    return parts


def natural(name: str) -> list[tuple[int, Any]]:
    """Sort key that puts `lr-2` before `lr-10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def model_order(label: str) -> tuple[int, list[tuple[int, Any]], float]:
    """Sort key: base, then SFT, then DPO; the snapshots of a run before it, in the order of its steps."""
    kind, _, name = label.partition(":")
    run, _, share = name.partition("@")
    return MODEL_KINDS.index(kind), natural(run), float(share or 1)


def unique(values: Iterable[Any]) -> list[Any]:
    """Distinct values in order of first appearance."""
    return list(dict.fromkeys(values))


def logged_numbers(run: Result, key: str) -> list[float]:
    """All logged values of a key that are finite numbers."""
    return [float(entry[key]) for entry in run.history if isinstance(entry, dict) and is_number(entry.get(key))]


def is_gpu(run: dict[str, Any]) -> bool:
    return str(run.get("device") or "").partition(":")[0] not in ("", "cpu", "mps")


def measurements(run: Result) -> list[dict[str, Any]]:
    """The measurements of a training, in order; empty if it has none."""
    held_out = run.run.get("held_out")
    points = held_out.get("points") if isinstance(held_out, dict) else None
    return [point for point in points or () if isinstance(point, dict) and is_number(point.get("step"))]
