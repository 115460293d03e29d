"""What the rules of `rules.py` look at: a few numbers of each training, pack, corpus and evaluation, taken from its results."""

import math
from dataclasses import dataclass, field
from typing import Any

from snaketune.packing.truncation import is_worth_a_warning
from snaketune.report.compare.variants import EarlyStop, TrainingWarning, Variants, stopped_early, warnings_of
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.packing_flow import PackFlow, SplitFlow, pack_flows, training_flow
from snaketune.report.data.results import Result, ResultSet, ScoredModel

# Fewer lines of a log than this tell noise from a trend badly.
MIN_LOGGED = 10
NO_GPU = ("", "cpu", "mps")


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """One SFT or DPO run.

    Attributes:
        label, key: `dpo:demo`, and the key of the config that asks for it, `dpo.demo`.
        epochs: of the steps that were done; None where that isn't known.
        loss, chosen: means of the first and of the last tenth of what was logged: loss, and log-probability of chosen
            completions per token; None where too little was.
        held_out: by corpus, held-out loss before and after; of SFT runs whose start was evaluated too.
        waited, seconds: how long its last attempt waited for data, and how long that took.
        measured: whether its portions were chosen by what was measured.
        slower: percent of the best measured speed that a choice by hand costs.
    """

    label: str
    key: str
    epochs: float | None
    gpu: bool = False
    loss: tuple[float, float] | None = None
    chosen: tuple[float, float] | None = None
    held_out: dict[str, tuple[float, float]] = field(default_factory=dict)
    stopped: EarlyStop | None = None
    warnings: tuple[TrainingWarning, ...] = ()
    mfu: float | None = None
    waited_s: float | None = None
    seconds: float | None = None
    calibrated: bool = False
    slowdown_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class PackFacts:
    """One split of one pack.

    Attributes:
        key: of its `packing`, in the config; of the first that uses it.
        lost: shares of sequences and tokens that are lost because rows are short, and the length that would do; None where
            that is little.
    """

    name: str
    key: str
    split: str
    unit: str
    length: int
    tokens: int
    supervised: int
    lost_to_length: tuple[float, float, int] | None = None
    count_errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """One corpus."""

    name: str
    read: int
    quarantined: dict[str, int]
    count_errors: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"corpora.{self.name}"


@dataclass(frozen=True, kw_only=True)
class EvaluatedPrompts:
    """One corpus of prompts in one evaluation.

    Attributes:
        model: of which the answers are; the last of those that the verdict is about.
        cut_off: answers that were as long as they may be.
    """

    evaluation: str
    corpus: str
    model: str
    prompts: int
    distinct: int
    answers: int
    truncated: int
    max_new_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class SweptKey:
    """A key of the config that DPO runs have several numbers for, and the number of the best."""

    key: str
    name: str
    values: tuple[float, ...]
    best: float
    run: str


@dataclass(frozen=True, kw_only=True)
class BestRun:
    """The best of so many evaluated runs, by a figure of the very rows that its verdict is of."""

    run: str
    candidates: int


def trainings(results: ResultSet) -> list[TrainingFacts]:
    """Of every run."""
    return [_training(results, result) for result in results.of("sft", "dpo")]


def _training(results: ResultSet, result: Result) -> TrainingFacts:
    run = result.run
    return TrainingFacts(
        label=result.label,
        key=result.key,
        epochs=training_flow(results, result).epochs,
        gpu=is_gpu(run),
        loss=first_and_last(result, "loss"),
        chosen=first_and_last(result, "chosen_logp_per_token"),
        held_out=_held_out(results, result) if result.stage == "sft" else {},
        stopped=stopped_early(result),
        warnings=tuple(warnings_of(result)),
        mfu=run.get("mfu_median"),
        waited_s=run.get("waited_for_data_s"),
        seconds=(run.get("attempts") or [run.get("seconds")])[-1],
        calibrated=bool(run.get("calibration")),
        slowdown_percent=run.get("slower_than_best_percent"),
    )


def is_gpu(run: dict[str, Any]) -> bool:
    """Whether a run.json tells of a GPU."""
    return str(run.get("device") or "").partition(":")[0] not in NO_GPU


def first_and_last(result: Result, key: str) -> tuple[float, float] | None:
    """Means of the first and the last tenth of what was logged; None where that are fewer than LINES lines."""
    values = numbers(result.history, key)
    if len(values) < MIN_LOGGED:
        return None
    tenth = len(values) // 10
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def numbers(history: list[dict[str, Any]], key: str) -> list[float]:
    """What was logged under a key and is a number."""
    return [float(entry[key]) for entry in history if isinstance(entry, dict) and is_number(entry.get(key))]


def is_number(value: Any) -> bool:
    """Whether a file from anywhere holds a number that can be counted with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _held_out(results: ResultSet, run: Result) -> dict[str, tuple[float, float]]:
    """By corpus, from the first evaluation that asked both."""
    begun = results.made_from(run, "model")
    before = begun[0].label if begun else f"base:{run.name}"
    found: dict[str, tuple[float, float]] = {}
    for models in results.evaluations.values():
        by_label = {scored.model: scored.scores.get("conversations") or {} for scored in models}
        was, now = by_label.get(before, {}), by_label.get(run.label, {})
        for corpus in was.keys() & now.keys():
            losses = (was[corpus].get("held_out_loss"), now[corpus].get("held_out_loss"))
            if None not in losses:
                found.setdefault(corpus, losses)
    return dict(sorted(found.items()))


def packs(results: ResultSet) -> list[PackFacts]:
    """Of every split that was packed, and of raw rows."""
    users = _users_of_packs(results)
    return [
        _pack(flow, split, users.get(f"pack/{flow.name}", "")) for flow in pack_flows(results) for split in flow.splits
    ]


def _pack(flow: PackFlow, split: SplitFlow, key: str) -> PackFacts:
    lost_to_length = split.lost_to_length
    much = lost_to_length and is_worth_a_warning(
        lost_to_length["rows"], lost_to_length["tokens"], split.read, split.read_tokens
    )
    return PackFacts(
        name=flow.name,
        key=key,
        split=split.split,
        unit=flow.unit,
        length=flow.length,
        tokens=split.tokens,
        supervised=split.supervised,
        lost_to_length=(
            lost_to_length["rows"] / split.read,
            lost_to_length["tokens"] / split.read_tokens,
            lost_to_length["enough"],
        )
        if much
        else None,
        # Of the pack as a whole, told once.
        count_errors=tuple(flow.count_errors) if split is flow.splits[0] else (),
    )


def _users_of_packs(results: ResultSet) -> dict[str, str]:
    """By pack, as `pack/NAME`, the `packing` of the config that asks for it first."""
    users: dict[str, str] = {}
    for stage, role in (("sft", "pack"), ("dpo", "pack"), ("eval", "packs")):
        for result in results.of(stage):
            for pack in result.made_from.get(role, ()):
                users.setdefault(pack, f"{result.key}.packing")
    return users


def corpora(results: ResultSet) -> list[CorpusFacts]:
    """Of every corpus."""
    return [
        CorpusFacts(
            name=flow.name, read=flow.corpora.read, quarantined=flow.quarantined, count_errors=tuple(flow.count_errors)
        )
        for flow in corpus_flows(results)
    ]


def evaluated_prompts(results: ResultSet, line: list[str]) -> list[EvaluatedPrompts]:
    """Of every corpus of prompts in every evaluation that asked one of these models, the last of them."""
    found = []
    for evaluation, models in results.evaluations.items():
        by_label = {scored.model: scored for scored in models}
        if last := next((by_label[label] for label in reversed(line) if label in by_label), None):
            corpora = dict.fromkeys(row["corpus"] for row in last.responses)
            found += [_evaluated_prompts(evaluation, corpus, last) for corpus in corpora]
    return found


def _evaluated_prompts(evaluation: str, corpus: str, scored: ScoredModel) -> EvaluatedPrompts:
    answers = [row for row in scored.responses if row["corpus"] == corpus]
    checked = [row["prompt"] for row in answers if row["correct"] is not None]
    generation = scored.result.spec.get("generation") or {}
    most = generation.get("max_new_tokens")
    return EvaluatedPrompts(
        evaluation=evaluation,
        corpus=corpus,
        model=scored.model,
        prompts=len(checked),
        distinct=len(set(checked)),
        answers=len(answers),
        truncated=sum(row["tokens"] >= most for row in answers) if most else 0,
        max_new_tokens=most,
    )


def swept_keys(results: ResultSet, found: Variants) -> list[SweptKey]:
    """The keys with three numbers and more, if some run is the best."""
    best = next((run for run in results.of("dpo") if run.label == found.best), None)
    if best is None:
        return []
    keys = []
    for name, texts in found.keys.items():
        try:
            values = {label: float(text) for label, text in texts.items()}
        except ValueError:
            continue
        if len(set(values.values())) > 2:
            several = tuple(sorted(set(values.values())))
            keys.append(SweptKey(key=best.key, name=name, values=several, best=values[best.label], run=best.label))
    return keys


def best_runs(found: Variants) -> list[BestRun]:
    """One, if some run is the best."""
    if found.best is None or found.sorted_by is None:
        return []
    return [BestRun(run=found.best, candidates=sum(value is not None for value in found.sorted_by.values.values()))]
