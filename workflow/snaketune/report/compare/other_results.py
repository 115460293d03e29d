"""Runs of another time beside this config's: what differs between them, and what came of it.

Each is held against the run of this config whose spec is nearest to its own. What is read of them was written elsewhere:
digests are verified, no file outside their folders is opened, and what isn't a number isn't counted with.
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
from snaketune.report.data.results import Findings, Result, Scored, natural, scored_of
from snaketune.report.judge.facts import is_number, numbers
from snaketune.report.judge.verdict import Difference, differences
from snaketune.report.text import NOTHING, clean, decimal, duration, percent, whole
from snaketune.stages.cache.status import differing as differing_keys
from snaketune.stages.compared_results import COMPARED, KEY, result_of

DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class Other:
    """A run of another time.

    Attributes:
        run: its name is the entry of the config.
        evaluations: of its model.
        ours: the run of this config that it is held against, if there is one of its stage.
    """

    run: Result
    evaluations: list[Scored]
    ours: Result | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a table: what it is about, and by label the value."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The compared runs of one stage, and those of this config beside them.

    Attributes:
        labels: ours, then the others.
        differ: what isn't the same for all: keys, what they were made from, code and versions.
        came_out: of the training.
        scores: by label of another run, what ours has more or less than it.
    """

    stage: str
    labels: list[str]
    against: dict[str, str]
    differ: list[Line]
    came_out: list[Line]
    scores: dict[str, list[Difference]]
    unscored: dict[str, str]


class Compared:
    """What the report was asked to compare with."""

    def __init__(
        self,
        findings: Findings,
        entries: Iterable[str],
        manifests: list[Path],
        runs: list[Path],
        evaluations: list[Path],
    ):
        """Args:
            entries: what they are called, in the order of their manifests.
        Raises:
            SnaketuneError: a result that isn't as a stage writes it.
        """
        self.findings = findings
        facts = {path.parent: path for path in runs}
        of_models = [result_of(path, ("eval",)) for path in evaluations]
        self.others = [
            self._other(clean(entry), result_of(path, COMPARED), facts.get(path.parent), of_models)
            for entry, path in zip(entries, manifests, strict=True)
        ]

    def _other(self, entry: str, artifact: Artifact, run: Path | None, of_models: list[Artifact]) -> Other:
        said = artifact.manifest
        result = Result(stage=said["stage"], name=entry, made_from={}, artifact=artifact, run=_run(run) if run else {})
        ours = sorted(self.findings.of(said["stage"]), key=lambda one: (_distance(one, result), natural(one.name)))
        asked = [one for one in of_models if one.manifest["inputs"].get("model", [])[:1] == [artifact.content]]
        scored = [
            scored_of(Result(stage="eval", name=f"{KEY}/{said['stage']}-{entry}", made_from={}, artifact=one, run={}))
            for one in asked
        ]
        return Other(run=result, evaluations=scored, ours=ours[0] if ours else None)

    @property
    def fingerprints(self) -> list[str]:
        """Of all that was read, so that it is kept."""
        results = [
            result for other in self.others for result in (other.run, *(one.result for one in other.evaluations))
        ]
        return sorted({result.manifest["fingerprint"] for result in results})

    @cached_property
    def labels(self) -> list[str]:
        return [other.run.label for other in self.others]

    @property
    def runs(self) -> list[tuple[str, dict[str, Any]]]:
        """Label and run.json of each."""
        return [(other.run.label, other.run.run) for other in self.others]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """By stage. Raises SnaketuneError if a result isn't as a stage writes it."""
        with self._as_written():
            return [self._comparison(stage) for stage in COMPARED if any(o.run.stage == stage for o in self.others)]

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnaketuneError(
                f"{KEY}: one of {', '.join(self.labels)} isn't as a stage writes it: {error!r}; take it out"
            ) from None

    def _comparison(self, stage: str) -> Comparison:
        others = [other for other in self.others if other.run.stage == stage]
        runs = self._beside(others)
        scores = {other.run.label: self._scores(other) for other in others}
        return Comparison(
            stage=stage,
            labels=[run.label for run in runs],
            against={other.run.label: other.ours.label for other in others if other.ours},
            differ=_differ(runs),
            came_out=_came_out(runs),
            scores={label: found for label, found in scores.items() if isinstance(found, list)},
            unscored={label: found for label, found in scores.items() if isinstance(found, str)},
        )

    @staticmethod
    def _beside(others: list[Other]) -> list[Result]:
        ours = {other.ours.label: other.ours for other in others if other.ours}
        return [*ours.values(), *(other.run for other in others)]

    def _scores(self, other: Other) -> list[Difference] | str:
        """What ours has more or less, or why that can't be said."""
        if not other.evaluations:
            return "no evaluation of it is there"
        if other.ours is None:
            return f"this config has no run of {other.run.stage}"
        models = [scored for some in self.findings.evaluations.values() for scored in some]
        ours = [scored for scored in models if scored.model == other.ours.label]
        asked = [(theirs, own) for theirs in other.evaluations for own in ours]
        if not asked:
            return f"{other.ours.label} wasn't evaluated"
        # Of several evaluations, the two that are most alike.
        theirs, own = min(asked, key=_unlike)
        found = differences(theirs, own)
        if not _same_rows(theirs, own):
            # Of other held-out rows, those that both were asked about tell, and no mean over all of them.
            found = [one for one in found if one.rows]
        return found or f"{other.ours.label} wasn't asked about the same held-out rows"

    def chart(self, styles: dict[str, Style]) -> Chart:
        """Loss and speed of every stage's runs, ours and theirs."""
        panels = []
        with self._as_written():
            for found in self.comparisons:
                runs = self._beside([other for other in self.others if other.run.stage == found.stage])
                runs = [replace(run, run=run.run | {"history": _numbers_of(run)}) for run in runs]
                title = f"{found.stage}: Training loss"
                speed = throughput(runs, styles)
                panels.append(curve("loss", title, "loss", runs, styles, decimal))
                panels.append(speed and replace(speed, title=f"{found.stage}: {speed.title}"))
        drawn = [panel for panel in panels if panel] or [message("None of the runs has a log.")]
        return Chart(name="compare", panels=drawn, key={label: styles[label] for label in self._drawn})

    @property
    def _drawn(self) -> list[str]:
        return [label for found in self.comparisons for label in found.labels]


def _run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{KEY}: {path} can't be read: {error}") from None
    if not isinstance(run, dict) or not isinstance(run.get("history", []), list):
        raise SnaketuneError(f"{KEY}: {path} isn't as a training writes it")
    return run


def _numbers_of(run: Result) -> list[dict[str, float]]:
    return [
        {str(key): float(value) for key, value in entry.items() if is_number(value)}
        for entry in run.history
        if isinstance(entry, dict)
    ]


def _distance(one: Result, other: Result) -> int:
    return len(differing_keys(one.spec, other.spec))


def _unlike(asked: tuple[Scored, Scored]) -> tuple[bool, int]:
    theirs, own = asked
    return not _same_rows(theirs, own), len(differing_keys(theirs.result.spec, own.result.spec))


def _same_rows(one: Scored, other: Scored) -> bool:
    inputs, others = (scored.result.manifest["inputs"] for scored in (one, other))
    return all(inputs.get(role) == others.get(role) for role in ("corpora", "packs"))


def _differ(runs: list[Result]) -> list[Line]:
    """What isn't the same for all, inputs and code by the first digits of their digests."""
    said = {
        run.label: {
            **run.spec,
            "made from": {role: _short(digests) for role, digests in run.manifest["inputs"].items()},
            "code": str(run.manifest["code"])[:DIGITS],
            "version of": run.manifest["versions"],
        }
        for run in runs
    }
    return [Line(name=clean(key), values=values) for key, values in leaves(said)]


def _short(digests: list[Any]) -> str:
    return ", ".join(str(digest)[:DIGITS] for digest in digests)


def _came_out(runs: list[Result]) -> list[Line]:
    """Of each run what is known; a line that nobody has anything for isn't there."""
    told = {
        "loss at the end": {run.label: decimal(_last(run)) for run in runs},
        "steps": {run.label: whole(_number(run.counts.get("steps"))) for run in runs},
        "time": {run.label: duration(_number(run.run.get("seconds"))) for run in runs},
        "tokens per second": {run.label: whole(_number(run.run.get("tokens_per_second_median"))) for run in runs},
        "MFU": {run.label: percent(_number(run.run.get("mfu_median"))) for run in runs},
        "most memory, GB": {run.label: decimal(_number(run.run.get("peak_memory_gb"))) for run in runs},
        "rows at once": {run.label: whole(_number(run.run.get("micro_batch_rows"))) for run in runs},
        "processes": {run.label: whole(_number(run.run.get("processes"))) for run in runs},
        "device": {run.label: value_text(run.run.get("device")) for run in runs},
        "ended early": {run.label: value_text((run.manifest.get("stopped") or {}).get("reason")) for run in runs},
    }
    return [Line(name=name, values=values) for name, values in told.items() if set(values.values()) != {NOTHING}]


def _last(run: Result) -> float | None:
    """Mean of the last tenth of the log."""
    losses = numbers(run.history, "loss")
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last) if last else None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
