"""Compare earlier runs (`report.compare`) with those of this config: what differs, and how they turned out.

Each earlier run is compared with the run of this config whose spec is most similar. Its files may come from elsewhere and
are untrusted: digests are verified, no file outside its folder is opened, what is read by key has to have its form (`forms`),
and other values that aren't numbers are ignored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.publishing.results import Result, is_number, read_json
from snaketune.publishing.scored_models import ScoredModel, scored_of
from snaketune.report.charts.style import Chart, Style, message
from snaketune.report.charts.training_charts import curve, throughput
from snaketune.report.compare.earlier_results import COMPARED, KEY, result_of
from snaketune.report.compare.forms import TABLES, Response, Scores, TrainingRun, check, check_table
from snaketune.report.compare.variants import leaves, value_text
from snaketune.report.data.results import ResultSet, logged_numbers, natural
from snaketune.report.judge.verdict import Difference, differences, interval_scales
from snaketune.stages.cache.status import differing as differing_paths
from snaketune.stages.specs import ReportedJob
from snaketune.tables import read_table
from snaketune.text import NOTHING, clean, decimal, duration, percent, whole

DIGITS = 8
Rows = dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """An earlier training, whose name is its entry in the config.

    Attributes:
        evaluations: Evaluations of its model.
        ours: The run of this config that it is compared with; None if there is none of its stage.
    """

    run: Result
    evaluations: list[ScoredModel]
    ours: Result | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of all runs of one stage.

    Attributes:
        runs: Runs of this config, then the earlier ones.
        nearest: By label of an earlier run, the label of the run of this config that it is compared with.
        differing: The keys, inputs, code and versions that aren't the same for all runs: name → run label → value as text.
        outcomes: Loss, time, memory and other figures of the trainings, likewise.
        scores: By label of an earlier run, the score differences of the run of this config, or why there are none.
    """

    stage: str
    runs: list[Result]
    nearest: dict[str, str]
    differing: Rows
    outcomes: Rows
    scores: dict[str, list[Difference] | str]

    @property
    def scales(self) -> dict[str, float]:
        """By unit, the end of the scale to which intervals are drawn."""
        return interval_scales(
            difference for some in self.scores.values() if not isinstance(some, str) for difference in some
        )


class EarlierRuns:
    """All runs that `report.compare` names."""

    def __init__(
        self,
        results: ResultSet,
        entries: Iterable[str],
        manifests: Sequence[Path],
        runs: Sequence[Path],
        evaluations: Sequence[Path],
    ):
        """Read the manifests and run.json files of all entries.

        Args:
            entries: Their names, in the order of `manifests`.
        Raises:
            SnaketuneError: If a result isn't in the form that stages write.
        """
        self.results = results
        run_of = {path.parent: check(path, TrainingRun, read_json(path)) for path in runs}
        of_models = [result_of(path, ("eval",)) for path in evaluations]
        self.others = [
            self._other(clean(entry), result_of(path, COMPARED), run_of.get(path.parent, {}), of_models)
            for entry, path in zip(entries, manifests, strict=True)
        ]
        self.labels = [other.run.label for other in self.others]

    def _other(self, entry: str, artifact: Artifact, run: dict[str, Any], of_models: list[Artifact]) -> EarlierRun:
        stage = artifact.manifest["stage"]
        result = Result(job=ReportedJob(stage=stage, name=entry), artifact=artifact, run=run)
        ours = sorted(
            self.results.of(stage),
            key=lambda candidate: (len(differing_paths(candidate.spec, result.spec)), natural(candidate.name)),
        )
        job = ReportedJob(stage="eval", name=f"{KEY}/{stage}-{entry}")
        evaluations = [
            evaluation
            for evaluation in of_models
            if evaluation.manifest["inputs"].get("model", [])[:1] == [artifact.content]
        ]
        scored = [_checked(scored_of(Result(job=job, artifact=evaluation))) for evaluation in evaluations]
        return EarlierRun(run=result, evaluations=scored, ours=ours[0] if ours else None)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of all results that were read, so that the clean target keeps them."""
        read = [
            result for other in self.others for result in (other.run, *(scored.result for scored in other.evaluations))
        ]
        return sorted({result.manifest["fingerprint"] for result in read})

    @property
    def runs(self) -> list[tuple[str, dict[str, Any]]]:
        return [(other.run.label, other.run.run) for other in self.others]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        by_stage = {stage: [other for other in self.others if other.run.stage == stage] for stage in COMPARED}
        return [self._comparison(stage, others) for stage, others in by_stage.items() if others]

    def _comparison(self, stage: str, others: list[EarlierRun]) -> Comparison:
        ours = {other.ours.label: other.ours for other in others if other.ours}
        runs = [*ours.values(), *(other.run for other in others)]
        # Values that aren't numbers are ignored.
        runs = [replace(run, run=run.run | {"history": _numbers_of(run)}) for run in runs]
        return Comparison(
            stage=stage,
            runs=runs,
            nearest={other.run.label: other.ours.label for other in others if other.ours},
            differing=_differing(runs),
            outcomes=_outcomes(runs),
            scores={other.run.label: self._scores(other) for other in others},
        )

    def _scores(self, other: EarlierRun) -> list[Difference] | str:
        """The score differences of our run to `other`, or the reason why there are none."""
        if not other.evaluations:
            return "it has no evaluation"
        if other.ours is None:
            return f"this config has no run of {other.run.stage}"
        ours = [scored for scored in self.results.scored if scored.model == other.ours.label]
        pairs = [(theirs, model) for theirs in other.evaluations for model in ours]
        if not pairs:
            return f"{other.ours.label} wasn't evaluated"
        # With several evaluations, the two most similar ones.
        theirs, model = min(pairs, key=_dissimilarity)
        # Where the held-out rows differ, only measures over common rows can be compared.
        scores = [
            difference for difference in differences(theirs, model) if difference.rows or _same_rows(theirs, model)
        ]
        return scores or f"{other.ours.label} wasn't evaluated on the same held-out rows"

    def chart(self, styles: dict[str, Style]) -> Chart:
        """Loss and throughput curves of our and the earlier runs, by stage."""
        panels = []
        for comparison in self.comparisons:
            panels.append(curve("loss", f"{comparison.stage}: Training loss", "loss", comparison.runs, styles, decimal))
            panels.append(throughput(comparison.runs, styles, f"{comparison.stage}: "))
        drawn = [panel for panel in panels if panel] or [message("None of the runs has a log.")]
        key = {run.label: styles[run.label] for comparison in self.comparisons for run in comparison.runs}
        return Chart(name="compare", panels=drawn, key=key)


def _checked(scored: ScoredModel) -> ScoredModel:
    """The evaluation, with all files in the form that stages write; SnaketuneError if one isn't."""
    file = scored.result.artifact.file
    check(file("scores.json"), Scores, scored.scores)
    check(file("responses.jsonl"), list[Response], scored.responses)
    for name in TABLES:
        check_table(file(name), read_table(file(name)))
    return scored


def _numbers_of(run: Result) -> list[dict[str, float]]:
    entries = (entry for entry in run.history if isinstance(entry, dict))
    return [{str(key): float(value) for key, value in entry.items() if is_number(value)} for entry in entries]


def _dissimilarity(pair: tuple[ScoredModel, ScoredModel]) -> tuple[bool, int]:
    theirs, ours = pair
    return not _same_rows(theirs, ours), len(differing_paths(theirs.result.spec, ours.result.spec))


def _same_rows(model: ScoredModel, other: ScoredModel) -> bool:
    inputs, others = (scored.result.manifest["inputs"] for scored in (model, other))
    return all(inputs.get(role) == others.get(role) for role in ("corpora", "packs"))


def _differing(runs: list[Result]) -> Rows:
    """The keys that aren't the same for all runs, with inputs and code as the first digits of their digests."""
    specs = {}
    for run in runs:
        made_from = {
            role: ", ".join(str(digest)[:DIGITS] for digest in digests)
            for role, digests in run.manifest["inputs"].items()
        }
        about = {"code": str(run.manifest["code"])[:DIGITS], "version of": run.manifest["versions"]}
        specs[run.label] = run.spec | {"made from": made_from} | about
    return {clean(key): values for key, values in leaves(specs)}


def _outcomes(runs: list[Result]) -> Rows:
    """Loss, time, throughput and memory of each run; a row without any value is omitted."""
    figures = {
        "time": ("seconds", duration),
        "tokens per second": ("tokens_per_second_median", whole),
        "MFU": ("mfu_median", percent),
        "peak memory, GB": ("peak_memory_gb", decimal),
        "micro-batch, rows": ("micro_batch_rows", whole),
        "processes": ("processes", whole),
    }
    rows = {
        "final loss": {run.label: decimal(_final_loss(run)) for run in runs},
        "steps": {run.label: whole(_number(run.counts.get("steps"))) for run in runs},
    }
    for name, (key, shown) in figures.items():
        rows[name] = {run.label: shown(_number(run.run.get(key))) for run in runs}
    rows["device"] = {run.label: value_text(run.run.get("device")) for run in runs}
    rows["stopped early"] = {run.label: value_text((run.manifest.get("stopped") or {}).get("reason")) for run in runs}
    return {name: values for name, values in rows.items() if set(values.values()) != {NOTHING}}


def _final_loss(run: Result) -> float | None:
    """The mean loss over the last tenth of the log."""
    losses = logged_numbers(run, "loss")
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last) if last else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
