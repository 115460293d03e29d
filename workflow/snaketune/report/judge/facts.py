"""Input of the rules in `rules.py`: a few numbers of each training, pack, corpus and evaluation."""

import math
from dataclasses import dataclass, field
from typing import Any

from snaketune.packing.truncation import is_worth_a_warning
from snaketune.report.compare.variants import EarlyStop, TrainingWarning, Variants, stopped_early, warnings_of
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.packing_flow import PackFlow, SplitFlow, pack_flows, training_flow
from snaketune.report.data.results import Result, ResultSet, ScoredModel

# Fewer logged steps than this don't separate a trend from noise.
MIN_LOGGED = 10
NO_GPU = ("", "cpu", "mps")


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """One SFT or DPO run.

    Attributes:
        label, key: `dpo:demo`, and the config key that defines it, `dpo.demo`.
        epochs: Epochs that ran; None if unknown.
        loss, chosen: Means over the first and the last tenth of the log, of the loss and of the log-probability per token of
            chosen completions; None if fewer than MIN_LOGGED steps were logged.
        held_out: By corpus, held-out loss before and after; only for SFT runs whose initial model was evaluated too.
        waited_s, seconds: Time that the last attempt waited for data, and its duration.
        calibrated: Whether a calibration of this run on its device exists; a configured batch plan may differ from its best.
        slowdown_percent: Throughput lost by a configured batch plan, relative to the best measured one.
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
        key: The config key of its `packing`, in the first run that uses it.
        lost_to_length: Shares of sequences and of tokens lost because they exceed the row length, and the length that would
            suffice; None if the loss is small.
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
        model: The model that answered: the last one of the lineage.
        prompts, distinct: Prompts with a checkable answer, and how many of them are distinct.
        truncated: Responses that reached `max_new_tokens`.
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
    """A config key with several numeric values among the DPO runs, and the value of the best run."""

    key: str
    name: str
    values: tuple[float, ...]
    best: float
    run: str


@dataclass(frozen=True, kw_only=True)
class BestRun:
    """The best of `candidates` evaluated runs, selected on the same rows that its verdict uses."""

    run: str
    candidates: int


def trainings(results: ResultSet) -> list[TrainingFacts]:
    """The facts of every SFT and DPO run."""
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
    """Return True if a run.json names a GPU as device."""
    return str(run.get("device") or "").partition(":")[0] not in NO_GPU


def first_and_last(result: Result, key: str) -> tuple[float, float] | None:
    """Means of the first and the last tenth of the logged values; None for fewer than MIN_LOGGED values."""
    values = numbers(result.history, key)
    if len(values) < MIN_LOGGED:
        return None
    tenth = len(values) // 10
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def numbers(history: list[dict[str, Any]], key: str) -> list[float]:
    """All logged values of a key that are finite numbers."""
    return [float(entry[key]) for entry in history if isinstance(entry, dict) and is_number(entry.get(key))]


def is_number(value: Any) -> bool:
    """Return True for a finite number. Bools and strings, which untrusted files may have, aren't numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _held_out(results: ResultSet, run: Result) -> dict[str, tuple[float, float]]:
    """Held-out loss before and after by corpus, from the first evaluation of both models."""
    initial = results.made_from(run, "model")
    before = initial[0].label if initial else f"base:{run.name}"
    held_out: dict[str, tuple[float, float]] = {}
    for models in results.evaluations.values():
        by_label = {scored.model: scored.scores.get("conversations") or {} for scored in models}
        was, now = by_label.get(before, {}), by_label.get(run.label, {})
        for corpus in was.keys() & now.keys():
            losses = (was[corpus].get("held_out_loss"), now[corpus].get("held_out_loss"))
            if None not in losses:
                held_out.setdefault(corpus, losses)
    return dict(sorted(held_out.items()))


def packs(results: ResultSet) -> list[PackFacts]:
    """The facts of every split of every pack, raw rows included."""
    users = _users_of_packs(results)
    return [
        _pack(flow, split, users.get(f"pack/{flow.name}", "")) for flow in pack_flows(results) for split in flow.splits
    ]


def _pack(flow: PackFlow, split: SplitFlow, key: str) -> PackFacts:
    lost = split.lost_to_length
    much = lost and is_worth_a_warning(lost["rows"], lost["tokens"], split.read, split.read_tokens)
    return PackFacts(
        name=flow.name,
        key=key,
        split=split.split,
        unit=flow.unit,
        length=flow.length,
        tokens=split.tokens,
        supervised=split.supervised,
        lost_to_length=(lost["rows"] / split.read, lost["tokens"] / split.read_tokens, lost["enough"])
        if much
        else None,
        # The errors are of the whole pack; the first split reports them.
        count_errors=tuple(flow.count_errors) if split is flow.splits[0] else (),
    )


def _users_of_packs(results: ResultSet) -> dict[str, str]:
    """The config key of the first `packing` that uses each pack, by `pack/NAME`."""
    users: dict[str, str] = {}
    for stage, role in (("sft", "pack"), ("dpo", "pack"), ("eval", "packs")):
        for result in results.of(stage):
            for pack in result.made_from.get(role, ()):
                users.setdefault(pack, f"{result.key}.packing")
    return users


def corpora(results: ResultSet) -> list[CorpusFacts]:
    """The facts of every corpus."""
    return [
        CorpusFacts(
            name=flow.name, read=flow.rows.read, quarantined=flow.quarantined, count_errors=tuple(flow.count_errors)
        )
        for flow in corpus_flows(results)
    ]


def evaluated_prompts(results: ResultSet, lineage: list[str]) -> list[EvaluatedPrompts]:
    """The prompts of every corpus in every evaluation, answered by the last evaluated model of the lineage."""
    prompts = []
    for evaluation, models in results.evaluations.items():
        by_label = {scored.model: scored for scored in models}
        if last := next((by_label[label] for label in reversed(lineage) if label in by_label), None):
            names = dict.fromkeys(row["corpus"] for row in last.responses)
            prompts += [_evaluated_prompts(evaluation, name, last) for name in names]
    return prompts


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


def swept_keys(results: ResultSet, variants: Variants) -> list[SweptKey]:
    """The keys with three or more distinct numbers, if there is a best run."""
    best = next((run for run in results.of("dpo") if run.label == variants.best), None)
    if best is None:
        return []
    keys = []
    for name, texts in variants.keys.items():
        try:
            values = {label: float(text) for label, text in texts.items()}
        except ValueError:
            continue
        if len(set(values.values())) > 2:
            several = tuple(sorted(set(values.values())))
            keys.append(SweptKey(key=best.key, name=name, values=several, best=values[best.label], run=best.label))
    return keys


def best_runs(variants: Variants) -> list[BestRun]:
    """The best run, if there is one, in a list."""
    if variants.best is None or variants.sorted_by is None:
        return []
    return [
        BestRun(run=variants.best, candidates=sum(value is not None for value in variants.sorted_by.values.values()))
    ]
