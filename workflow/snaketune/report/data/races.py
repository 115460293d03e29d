"""Races: the scores of a grid's variants at each rung, and where variants were paused."""

from dataclasses import dataclass
from typing import Any

from snaketune.publishing.results import Result, read_json
from snaketune.report.data.results import ResultSet, natural
from snaketune.stages.races import FILE
from snaketune.text import words


@dataclass(frozen=True, kw_only=True)
class Race:
    """One race.

    Attributes:
        name: of the grid, `dpo.sweep`.
        metric: as the report writes it.
        rows: the number of held-out rows.
        rungs: ascending.
        measured: by label of the variant and by rung, as long as it ran, its line in the decision of the rung: its mean score,
            and the bounds of its `difference` to the best. Empty for one that was stopped before the first rung.
        paused: by label, the rung at which it was paused.
        stopped: by label, the step at which a threshold ended it.
    """

    name: str
    metric: str
    rows: int
    rungs: list[float]
    measured: dict[str, dict[float, dict[str, Any]]]
    paused: dict[str, float]
    stopped: dict[str, int]


def races_of(results: ResultSet) -> list[Race]:
    """The races of the results, by name; variants that ran longest and scored best first."""
    rungs: dict[str, list[tuple[float, Result, dict[str, Any]]]] = {}
    for result in results.of("race"):
        decisions = read_json(result.artifact.file(FILE))
        rungs.setdefault(result.name.rpartition("@")[0], []).append((result.spec["rung"], result, decisions))
    return [_race(name, sorted(entries, key=lambda entry: entry[0])) for name, entries in sorted(rungs.items())]


def _race(name: str, rungs: list[tuple[float, Result, dict[str, Any]]]) -> Race:
    _, last, decisions = rungs[-1]
    stopped = {_label(run): step for run, step in sorted(decisions.get("stopped", {}).items())}
    measured: dict[str, dict[float, dict[str, Any]]] = {}
    # The last rung first, whose table has the best variant first.
    for rung, _, found in reversed(rungs):
        for line in found["table"]:
            measured.setdefault(_label(line["run"]), {})[rung] = line
    return Race(
        name=name.replace("-", ".", 1),
        metric=words(last.spec["metric"].removesuffix("_nats")),
        rows=decisions["rows"],
        rungs=[rung for rung, *_ in rungs],
        measured=measured | {label: {} for label in stopped if label not in measured},
        stopped=stopped,
        paused={
            _label(run): share
            for run, share in sorted(decisions["paused"].items(), key=lambda pause: natural(pause[0]))
        },
    )


def paused_runs(results: ResultSet) -> dict[str, float]:
    """By label, the share of its steps at which each paused run ended, and each of its later snapshots, which are the same."""
    by_variant = {label: share for race in races_of(results) for label, share in race.paused.items()}
    shares: dict[str, float] = {}
    for run in results.of("sft", "dpo"):
        variant, _, at = run.label.partition("@")
        if variant in by_variant and float(at or 1) > by_variant[variant]:
            shares[run.label] = by_variant[variant]
    return shares


def _label(run: str) -> str:
    return run.replace("/", ":", 1)
