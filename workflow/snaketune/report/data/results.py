"""All results of a report: manifests, run.json files, and the scores and responses of every evaluated model."""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.publishing.results import Result, Results, is_number
from snaketune.publishing.scored_models import ScoredModel, scored_of
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES

MODEL_KINDS = ("base", "sft", "dpo", "merge", "reward")


class ResultSet(Results):
    """All results of a report, in an order that doesn't depend on the order of the arguments."""

    def __init__(self, jobs: tuple[ReportedJob, ...], manifests: list[Path], runs: list[Path]):
        super().__init__(jobs, manifests, runs)
        order = list(STAGES)
        self.all = sorted(self.by_key.values(), key=lambda result: (order.index(result.stage), natural(result.name)))
        self.by_key = {f"{result.stage}/{result.name}": result for result in self.all}
        self.stages = {result.stage for result in self.all}

    @cached_property
    def all_evaluations(self) -> dict[str, list[ScoredModel]]:
        """The models of each evaluation, from base to DPO, then reward models, by its name."""
        by_name: dict[str, list[ScoredModel]] = {}
        for scored in map(scored_of, self.of("eval")):
            by_name.setdefault(scored.evaluation, []).append(scored)
        return {name: sorted(models, key=lambda model: model_order(model.model)) for name, models in by_name.items()}

    @cached_property
    def evaluations(self) -> dict[str, list[ScoredModel]]:
        """The same without reward models, which answer no prompt."""
        of_policies = ((name, [one for one in all_ if not one.rewards]) for name, all_ in self.all_evaluations.items())
        return {name: models for name, models in of_policies if models}

    @property
    def reward_models(self) -> list[ScoredModel]:
        return [scored for models in self.all_evaluations.values() for scored in models if scored.rewards]

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
        evaluated = {scored.model for models in self.all_evaluations.values() for scored in models}
        return sorted(evaluated | trained, key=model_order)


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
