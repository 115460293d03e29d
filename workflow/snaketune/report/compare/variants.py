"""The table of all DPO runs: the spec keys and inputs in which they differ, scores, cost, and the best run.

`sort_by` is the path of a measure (`publishing.measures`) in scores.json. For losses, perplexities, error rates and lengths
lower is better, for all other scores higher. Runs without the score are last; ties are in the order of names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.publishing.measures import Measure, measures
from snaketune.publishing.results import Result, is_number
from snaketune.report.data.races import paused_runs
from snaketune.report.data.results import ResultSet, natural
from snaketune.stages.table import STAGES
from snaketune.suggestions import unknown
from snaketune.text import NOTHING, clean, words

# Keys to list first: most sweeps vary them.
FIRST = ("loss", "beta")
# Keys that only decide whether a run is stopped early.
MONITORED = ("stop_if",)
# Keys whose value is compared as a whole, though it is a mapping.
ATOMIC = ("loss", *MONITORED)
# Role of an input that may differ between runs, and the name of its column.
MADE_FROM = {"model": "from", "pack": "pairs"}

# Words in the names of scores where lower is better.
LOWER_IS_BETTER = {"bits", "brier", "cer", "error", "kl", "loss", "nll", "perplexity", "ter", "tokens", "wer"}
# Redundant measures that the table omits; evaluation.csv has them all.
EXCLUDED = ("perplexity", "log-prob margin", "log-prob accuracy", "chosen log-prob", "rejected log-prob")


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """The step at which, and the reason why, a run was stopped early."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrainingWarning:
    """A warning of a training: its first message, and the message at the end of the run, None if it was resolved by then."""

    kind: str
    step: int
    text: str
    at_end: str | None


@dataclass(frozen=True, kw_only=True)
class Variants:
    """The DPO runs in the order of the table.

    Attributes:
        labels: The best first; by name without `sort_by`.
        names: By label, a name made of the differing keys.
        keys: The differing keys: key → label → value as text.
        columns: The measures.
        sort_by: As configured.
        sorted_by: The column of `sort_by`; None if it is a reward, and no run has rewards.
        best: Label of the run that `results/best` links to.
        tied: Labels of other runs with the same value.
        stopped, warnings: By label, runs that were stopped early, and warnings of the trainings.
    """

    labels: list[str]
    names: dict[str, str]
    keys: dict[str, dict[str, str]]
    columns: list[Measure]
    sort_by: str | None
    sorted_by: Measure | None
    best: str | None
    tied: list[str]
    stopped: dict[str, EarlyStop]
    warnings: dict[str, list[TrainingWarning]]

    @property
    def highest_first(self) -> bool:
        return bool(self.sort_by and higher_is_better(self.sort_by))


def compare_variants(results: ResultSet, sort_by: str | None) -> Variants:
    """Compare all DPO runs.

    Args:
        sort_by: A dotted path in scores.json.
    Raises:
        SnaketuneError: If no run has a number there; the message lists the known paths.
    """
    runs = results.of("dpo")
    labels = [run.label for run in runs]
    measured = list(_measured(results, labels))
    shown = (one for one in measured if one.path == sort_by or not (one.detail or one.name in EXCLUDED))
    columns = [*shown, *_trained(runs)]
    stopped = {run.label: stop for run in runs if (stop := stopped_early(run))}
    paused = paused_runs(results)
    for run in (run for run in runs if run.label in paused and run.label not in stopped):
        reason = f"paused by its race after {paused[run.label]:.0%} of the steps"
        stopped[run.label] = EarlyStop(step=run.counts["steps"], reason=reason)
    best, tied = None, []
    sorted_by = _sort_measure(measured, sort_by) if sort_by and runs else None
    if sorted_by:
        values, way = sorted_by.values, -1 if higher_is_better(sort_by) else 1
        labels.sort(key=lambda run: (values[run] is None, way * (values[run] or 0.0), natural(run)))
        known = [run for run in labels if values[run] is not None]
        # A run that was stopped early is the best only if all were.
        best = next((run for run in known if run not in stopped), known[0])
        tied = [run for run in known if run != best and values[run] == values[best]]
        others = [column for column in columns if column is not sorted_by]
        columns = [sorted_by, *sorted(others, key=lambda column: column.on != sorted_by.on)]
    keys = differing(results, runs)
    return Variants(
        labels=labels,
        names={label: run_name(label, keys) for label in labels},
        keys=keys,
        columns=columns,
        sort_by=sort_by,
        sorted_by=sorted_by,
        best=best,
        tied=tied,
        stopped=stopped,
        warnings={run.label: warnings for run in runs if (warnings := warnings_of(run))},
    )


def stopped_early(run: Result) -> EarlyStop | None:
    """The step and reason if a threshold of `stop_if` stopped the run, else None; held-out rows that rise are no failure."""
    stop = run.manifest.get("stopped") or run.run.get("stopped")
    failed = stop and not stop.get("held_out")
    return EarlyStop(step=int(stop["step"]), reason=clean(stop["reason"])) if failed else None


def warnings_of(run: Result) -> list[TrainingWarning]:
    return [
        TrainingWarning(
            kind=words(warning["kind"]),
            step=int(warning["step"]),
            text=clean(warning["text"]),
            at_end=clean(warning["at_end"]["text"]) if warning.get("at_end") else None,
        )
        for warning in run.run.get("warnings") or []
    ]


def best_entry(variants: Variants) -> dict[str, Any]:
    """The entry `best` of the manifest: run, measure, value and the model's folder. Empty if there is no best run."""
    if variants.best is None:
        return {}
    stage, _, name = variants.best.partition(":")
    facts = {
        "run": variants.best,
        "sort_by": variants.sorted_by.path,
        "value": variants.sorted_by.values[variants.best],
    }
    return {"best": facts | {"payload": f"{stage}/{name}/{STAGES[stage].payload}"}}


def _sort_measure(measured: list[Measure], path: str) -> Measure | None:
    """The measure with this path; of several evaluations, each run has the value of the first that has one.

    Prints a warning and returns None if the score is a reward and no run has rewards: that may be known only now, and the rest
    of the report is still useful.
    """
    found = [measure for measure in measured if measure.path == path]
    if not found:
        known = sorted({measure.path for measure in measured})
        missing = f"report.sort_by: no evaluated run of `dpo:` has a number at {path!r}{unknown(path, known)}"
        if not path.startswith("preferences.") or "reward" not in path.rpartition(".")[2]:
            raise SnaketuneError(missing)
        print(f"warning: {missing}; the runs aren't sorted, and none is the best", flush=True)
        return None
    values = dict.fromkeys(found[0].values)
    for measure in reversed(found):
        values |= {run: value for run, value in measure.values.items() if value is not None}
    return found[0] if values == found[0].values else replace(found[0], values=values)


def _measured(results: ResultSet, labels: list[str]) -> Iterator[Measure]:
    for evaluation, models in results.evaluations.items():
        where = f" ({evaluation})" if len(results.evaluations) > 1 else ""
        for measure in measures([scored for scored in models if scored.model in labels], where):
            yield measure.of(labels)


def _trained(runs: list[Result]) -> Iterator[Measure]:
    """KL to the reference, time and throughput of the runs."""
    kl = {run.label: [entry["kl"] for entry in run.history if is_number(entry.get("kl"))] for run in runs}
    for name, unit, better, values in (
        ("KL", "nats", 0, {label: logged[-1] if logged else None for label, logged in kl.items()}),
        ("time", "seconds", -1, {run.label: run.run.get("seconds") for run in runs}),
        ("tokens/s", "rate", 1, {run.label: run.run.get("tokens_per_second_median") for run in runs}),
    ):
        if any(value is not None for value in values.values()):
            yield Measure(path="", on="training", name=name, unit=unit, better=better, values=values)


def higher_is_better(path: str) -> bool:
    """False for losses, perplexities, error rates and lengths, by the words of the last name in `path`.

    >>> higher_is_better("preferences.pairs.reward_accuracy"), higher_is_better("conversations.chat.held_out_loss")
    (True, False)
    >>> higher_is_better("tasks.wiki.word_perplexity"), higher_is_better("tasks.choice.acc_norm")
    (False, True)
    """
    last = path.rpartition(".")[2].replace(",", "_").replace("-", "_")
    return LOWER_IS_BETTER.isdisjoint(last.lower().split("_"))


def differing(results: ResultSet, runs: list[Result]) -> dict[str, dict[str, str]]:
    """The keys that differ between runs: key → run label → value as text. A key has its last name only, if that is unique."""
    columns = {}
    for role, name in MADE_FROM.items():
        inputs = {
            run.label: ", ".join(result.name for result in results.made_from(run, role)) or NOTHING for run in runs
        }
        if len(set(inputs.values())) > 1:
            columns[name] = inputs
    differ = dict(leaves({run.label: run.spec for run in runs}))
    ends = [dotted.rpartition(".")[2] for dotted in differ]
    for dotted in sorted(differ, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST)):
        end = dotted.rpartition(".")[2]
        columns[end if ends.count(end) == 1 and end not in columns else dotted] = differ[dotted]
    return columns


def run_name(label: str, keys: dict[str, dict[str, str]]) -> str:
    """A name for a run from its values of the differing keys: numbers with their key, and no values that most runs have.

    >>> keys = {"loss": {"dpo:a": "ipo", "dpo:b": "ipo"}, "beta": {"dpo:a": "0.1", "dpo:b": "0.2"}}
    >>> run_name("dpo:a", keys | {"seed": {"dpo:a": "0", "dpo:b": "1", "dpo:c": "0"}}), run_name("dpo:a", {})
    ('ipo, beta 0.1', 'a')
    """
    parts = []
    for key, values in keys.items():
        text, all_ = values[label], list(values.values())
        usual = key not in FIRST and 2 * all_.count(text) > len(all_)
        if text != NOTHING and key not in MONITORED and not usual:
            parts.append(f"{key} {text}" if _is_number(text) and key not in ATOMIC else text)
    return ", ".join(parts) or label.partition(":")[2]


def loss_text(loss: Any) -> str:
    """A loss, or a weighted sum of losses with the largest weight first.

    >>> loss_text("sigmoid"), loss_text({"sft": 0.2, "sigmoid": 1.0})
    ('sigmoid', 'sigmoid + 0.2 sft')
    """
    if not isinstance(loss, dict):
        return value_text(loss)
    parts = sorted(loss.items(), key=lambda part: (-part[1], part[0]))
    return " + ".join(clean(name) if weight == 1 else f"{weight:g} {clean(name)}" for name, weight in parts)


def value_text(value: Any) -> str:
    """A config value on one line.

    >>> value_text(5e-05), value_text(True), value_text({"rank": 4, "dropout": 0.0, "alpha": None}), value_text(None)
    ('5e-05', 'true', 'rank 4, dropout 0', '–')
    """
    match value:
        case None:
            return NOTHING
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case dict():
            texts = (f"{clean(name)} {value_text(entry)}" for name, entry in value.items() if entry is not None)
            return ", ".join(texts) or NOTHING
        case list() | tuple():
            return ", ".join(map(value_text, value)) or NOTHING
    return clean(value)


def leaves(specs: dict[str, Any], key: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """The leaf keys that differ: dotted path, and the value as text by run label. Descends where every run has a mapping."""
    if key not in ATOMIC and all(isinstance(spec, dict) for spec in specs.values()):
        for name in dict.fromkeys(name for spec in specs.values() for name in spec):
            inside = {label: spec.get(name) for label, spec in specs.items()}
            yield from leaves(inside, f"{key}.{name}" if key else str(name))
        return
    shown = {label: loss_text(value) if key == "loss" else value_text(value) for label, value in specs.items()}
    if len(set(shown.values())) > 1:
        yield key, shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("true", "false")
    return True
