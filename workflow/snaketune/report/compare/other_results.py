"""Compare earlier runs (`report.compare`) with those of this config: what differs, and how they turned out.

Each earlier run is compared with the run of this config whose spec is most similar. Its files may come from elsewhere and
are untrusted: digests are verified, no file outside its folder is opened, and values that aren't numbers are ignored.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.report.charts.style import Chart, Style, message
from snaketune.report.charts.training_curves import curve, throughput
from snaketune.report.compare.differing_keys import leaves, value_text
from snaketune.report.data.results import Result, ResultSet, ScoredModel, natural, scored_of
from snaketune.report.judge.facts import is_number, numbers
from snaketune.report.judge.verdict import Difference, differences
from snaketune.report.text import NOTHING, clean, decimal, duration, percent, whole
from snaketune.stages.cache.status import differing as differing_paths
from snaketune.stages.compared_results import COMPARED, KEY, result_of

DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """An earlier run.

    Attributes:
        run: The training; its name is its entry in the config.
        evaluations: Evaluations of its model.
        ours: The run of this config that it is compared with; None if there is none of its stage.
    """

    run: Result
    evaluations: list[ScoredModel]
    ours: Result | None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table: its name, and the value by run label."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of all runs of one stage.

    Attributes:
        labels: Runs of this config, then the earlier ones.
        nearest: By label of an earlier run, the label of the run of this config that it is compared with.
        differing: The keys, inputs, code and versions that aren't the same for all runs.
        outcomes: Loss, time, memory and other figures of the trainings.
        scores: By label of an earlier run, the score differences of the run of this config.
        unscored: By label of an earlier run, why scores can't be compared.
    """

    stage: str
    labels: list[str]
    nearest: dict[str, str]
    differing: list[TableRow]
    outcomes: list[TableRow]
    scores: dict[str, list[Difference]]
    unscored: dict[str, str]


class ComparedRuns:
    """All runs that `report.compare` names."""

    def __init__(
        self,
        results: ResultSet,
        entries: Iterable[str],
        manifests: list[Path],
        runs: list[Path],
        evaluations: list[Path],
    ):
        """Read the manifests and run.json files of all entries.

        Args:
            entries: Their names, in the order of `manifests`.
        Raises:
            SnaketuneError: If a result isn't in the form that stages write.
        """
        self.results = results
        run_files = {path.parent: path for path in runs}
        of_models = [result_of(path, ("eval",)) for path in evaluations]
        self.others = [
            self._other(clean(entry), result_of(path, COMPARED), run_files.get(path.parent), of_models)
            for entry, path in zip(entries, manifests, strict=True)
        ]

    def _other(self, entry: str, artifact: Artifact, run: Path | None, of_models: list[Artifact]) -> ComparedRun:
        stage = artifact.manifest["stage"]
        result = Result(stage=stage, name=entry, made_from={}, artifact=artifact, run=_run(run) if run else {})
        ours = sorted(self.results.of(stage), key=lambda one: (_distance(one, result), natural(one.name)))
        evaluations = [one for one in of_models if one.manifest["inputs"].get("model", [])[:1] == [artifact.content]]
        scored = [
            scored_of(Result(stage="eval", name=f"{KEY}/{stage}-{entry}", made_from={}, artifact=one, run={}))
            for one in evaluations
        ]
        return ComparedRun(run=result, evaluations=scored, ours=ours[0] if ours else None)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of all results that were read, so that the clean target keeps them."""
        results = [
            result for other in self.others for result in (other.run, *(one.result for one in other.evaluations))
        ]
        return sorted({result.manifest["fingerprint"] for result in results})

    @cached_property
    def labels(self) -> list[str]:
        return [other.run.label for other in self.others]

    @property
    def runs(self) -> list[tuple[str, dict[str, Any]]]:
        """Label and content of run.json of each run."""
        return [(other.run.label, other.run.run) for other in self.others]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """One comparison per stage. Raises SnaketuneError if a result isn't in the form that stages write."""
        with self._check_shape():
            return [self._comparison(stage) for stage in COMPARED if any(o.run.stage == stage for o in self.others)]

    @contextmanager
    def _check_shape(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnaketuneError(
                f"{KEY}: one of {', '.join(self.labels)} isn't in the form that a stage writes: {error!r}; remove it"
            ) from None

    def _comparison(self, stage: str) -> Comparison:
        others = [other for other in self.others if other.run.stage == stage]
        runs = self._runs_to_show(others)
        scores = {other.run.label: self._scores(other) for other in others}
        return Comparison(
            stage=stage,
            labels=[run.label for run in runs],
            nearest={other.run.label: other.ours.label for other in others if other.ours},
            differing=_differing(runs),
            outcomes=_outcomes(runs),
            scores={label: one for label, one in scores.items() if isinstance(one, list)},
            unscored={label: one for label, one in scores.items() if isinstance(one, str)},
        )

    @staticmethod
    def _runs_to_show(others: list[ComparedRun]) -> list[Result]:
        ours = {other.ours.label: other.ours for other in others if other.ours}
        return [*ours.values(), *(other.run for other in others)]

    def _scores(self, other: ComparedRun) -> list[Difference] | str:
        """The score differences of our run to `other`, or the reason why there are none."""
        if not other.evaluations:
            return "it has no evaluation"
        if other.ours is None:
            return f"this config has no run of {other.run.stage}"
        models = [scored for some in self.results.evaluations.values() for scored in some]
        ours = [scored for scored in models if scored.model == other.ours.label]
        pairs = [(theirs, own) for theirs in other.evaluations for own in ours]
        if not pairs:
            return f"{other.ours.label} wasn't evaluated"
        # With several evaluations, the two most similar ones.
        theirs, own = min(pairs, key=_dissimilarity)
        scores = differences(theirs, own)
        if not _same_rows(theirs, own):
            # Where the held-out rows differ, only measures over common rows can be compared.
            scores = [one for one in scores if one.rows]
        return scores or f"{other.ours.label} wasn't evaluated on the same held-out rows"

    def chart(self, styles: dict[str, Style]) -> Chart:
        """Loss and throughput curves of our and the earlier runs, by stage."""
        panels = []
        with self._check_shape():
            for comparison in self.comparisons:
                runs = self._runs_to_show([other for other in self.others if other.run.stage == comparison.stage])
                runs = [replace(run, run=run.run | {"history": _numbers_of(run)}) for run in runs]
                title = f"{comparison.stage}: Training loss"
                speed = throughput(runs, styles)
                panels.append(curve("loss", title, "loss", runs, styles, decimal))
                panels.append(speed and replace(speed, title=f"{comparison.stage}: {speed.title}"))
        drawn = [panel for panel in panels if panel] or [message("None of the runs has a log.")]
        return Chart(name="compare", panels=drawn, key={label: styles[label] for label in self._drawn_labels})

    @property
    def _drawn_labels(self) -> list[str]:
        return [label for comparison in self.comparisons for label in comparison.labels]


def _run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{KEY}: {path} can't be read: {error}") from None
    if not isinstance(run, dict) or not isinstance(run.get("history", []), list):
        raise SnaketuneError(f"{KEY}: {path} isn't in the form that a training writes")
    return run


def _numbers_of(run: Result) -> list[dict[str, float]]:
    return [
        {str(key): float(value) for key, value in entry.items() if is_number(value)}
        for entry in run.history
        if isinstance(entry, dict)
    ]


def _distance(one: Result, other: Result) -> int:
    return len(differing_paths(one.spec, other.spec))


def _dissimilarity(pair: tuple[ScoredModel, ScoredModel]) -> tuple[bool, int]:
    theirs, own = pair
    return not _same_rows(theirs, own), len(differing_paths(theirs.result.spec, own.result.spec))


def _same_rows(one: ScoredModel, other: ScoredModel) -> bool:
    inputs, others = (scored.result.manifest["inputs"] for scored in (one, other))
    return all(inputs.get(role) == others.get(role) for role in ("corpora", "packs"))


def _differing(runs: list[Result]) -> list[TableRow]:
    """The keys that aren't the same for all runs, with inputs and code as the first digits of their digests."""
    specs = {
        run.label: {
            **run.spec,
            "made from": {role: _short(digests) for role, digests in run.manifest["inputs"].items()},
            "code": str(run.manifest["code"])[:DIGITS],
            "version of": run.manifest["versions"],
        }
        for run in runs
    }
    return [TableRow(name=clean(key), values=values) for key, values in leaves(specs)]


def _short(digests: list[Any]) -> str:
    return ", ".join(str(digest)[:DIGITS] for digest in digests)


def _outcomes(runs: list[Result]) -> list[TableRow]:
    """Loss, time, throughput and memory of each run; a row without any value is omitted."""
    rows = {
        "final loss": {run.label: decimal(_final_loss(run)) for run in runs},
        "steps": {run.label: whole(_number(run.counts.get("steps"))) for run in runs},
        "time": {run.label: duration(_number(run.run.get("seconds"))) for run in runs},
        "tokens per second": {run.label: whole(_number(run.run.get("tokens_per_second_median"))) for run in runs},
        "MFU": {run.label: percent(_number(run.run.get("mfu_median"))) for run in runs},
        "peak memory, GB": {run.label: decimal(_number(run.run.get("peak_memory_gb"))) for run in runs},
        "micro-batch, rows": {run.label: whole(_number(run.run.get("micro_batch_rows"))) for run in runs},
        "processes": {run.label: whole(_number(run.run.get("processes"))) for run in runs},
        "device": {run.label: value_text(run.run.get("device")) for run in runs},
        "stopped early": {run.label: value_text((run.manifest.get("stopped") or {}).get("reason")) for run in runs},
    }
    return [TableRow(name=name, values=values) for name, values in rows.items() if set(values.values()) != {NOTHING}]


def _final_loss(run: Result) -> float | None:
    """The mean loss over the last tenth of the log."""
    losses = numbers(run.history, "loss")
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last) if last else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
