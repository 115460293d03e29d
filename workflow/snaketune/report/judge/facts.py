"""What the rules of `rules.py` look at: a few numbers of each training, pack, corpus and evaluation, taken from its results."""

import math
from dataclasses import dataclass, field
from typing import Any

from snaketune.packing.truncation import is_worth_a_warning
from snaketune.report.compare.variants import Caution, Stopped, Variants, stopped_early, warnings_of
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.packing_flow import PackFlow, SplitFlow, pack_flows, training_flow
from snaketune.report.data.results import Findings, Result, Scored

# Fewer lines of a log than this tell noise from a trend badly.
LINES = 10
NO_GPU = ("", "cpu", "mps")


@dataclass(frozen=True, kw_only=True)
class Training:
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
    stopped: Stopped | None = None
    warnings: tuple[Caution, ...] = ()
    mfu: float | None = None
    waited: float | None = None
    seconds: float | None = None
    measured: bool = False
    slower: float | None = None


@dataclass(frozen=True, kw_only=True)
class Packed:
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
    lost: tuple[float, float, int] | None = None
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One corpus."""

    name: str
    read: int
    quarantined: dict[str, int]
    gaps: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"corpora.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One corpus of prompts in one evaluation.

    Attributes:
        model: of which the answers are; the last of those that the verdict is about.
        cut_off: answers that were as long as they may be.
    """

    evaluation: str
    corpus: str
    model: str
    prompts: int
    different: int
    answers: int
    cut_off: int
    most_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A key of the config that DPO runs have several numbers for, and the number of the best."""

    key: str
    name: str
    values: tuple[float, ...]
    best: float
    run: str


@dataclass(frozen=True, kw_only=True)
class Picked:
    """The best of so many evaluated runs, by a figure of the very rows that its verdict is of."""

    run: str
    of: int


def trainings(findings: Findings) -> list[Training]:
    """Of every run."""
    return [_training(findings, result) for result in findings.of("sft", "dpo")]


def _training(findings: Findings, result: Result) -> Training:
    run = result.run
    return Training(
        label=result.label,
        key=result.key,
        epochs=training_flow(findings, result).epochs,
        gpu=is_gpu(run),
        loss=ends(result, "loss"),
        chosen=ends(result, "chosen_logp_per_token"),
        held_out=_held_out(findings, result) if result.stage == "sft" else {},
        stopped=stopped_early(result),
        warnings=tuple(warnings_of(result)),
        mfu=run.get("mfu_median"),
        waited=run.get("waited_for_data_s"),
        seconds=(run.get("attempts") or [run.get("seconds")])[-1],
        measured=bool(run.get("calibration")),
        slower=run.get("slower_than_best_percent"),
    )


def is_gpu(run: dict[str, Any]) -> bool:
    """Whether a run.json tells of a GPU."""
    return str(run.get("device") or "").partition(":")[0] not in NO_GPU


def ends(result: Result, key: str) -> tuple[float, float] | None:
    """Means of the first and the last tenth of what was logged; None where that are fewer than LINES lines."""
    values = numbers(result.history, key)
    if len(values) < LINES:
        return None
    tenth = len(values) // 10
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def numbers(history: list[dict[str, Any]], key: str) -> list[float]:
    """What was logged under a key and is a number."""
    return [float(entry[key]) for entry in history if isinstance(entry, dict) and is_number(entry.get(key))]


def is_number(value: Any) -> bool:
    """Whether a file from anywhere holds a number that can be counted with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _held_out(findings: Findings, run: Result) -> dict[str, tuple[float, float]]:
    """By corpus, from the first evaluation that asked both."""
    begun = findings.made_from(run, "model")
    before = begun[0].label if begun else f"base:{run.name}"
    found: dict[str, tuple[float, float]] = {}
    for models in findings.evaluations.values():
        by_label = {scored.model: scored.scores.get("conversations") or {} for scored in models}
        was, now = by_label.get(before, {}), by_label.get(run.label, {})
        for corpus in was.keys() & now.keys():
            losses = (was[corpus].get("held_out_loss"), now[corpus].get("held_out_loss"))
            if None not in losses:
                found.setdefault(corpus, losses)
    return dict(sorted(found.items()))


def packed(findings: Findings) -> list[Packed]:
    """Of every split that was packed, and of raw rows."""
    users = _users_of_packs(findings)
    return [
        _packed(flow, split, users.get(f"pack/{flow.name}", ""))
        for flow in pack_flows(findings)
        for split in flow.splits
    ]


def _packed(flow: PackFlow, split: SplitFlow, key: str) -> Packed:
    lost = split.lost_to_length
    much = lost and is_worth_a_warning(lost["rows"], lost["tokens"], split.read, split.read_tokens)
    return Packed(
        name=flow.name,
        key=key,
        split=split.split,
        unit=flow.unit,
        length=flow.length,
        tokens=split.tokens,
        supervised=split.supervised,
        lost=(lost["rows"] / split.read, lost["tokens"] / split.read_tokens, lost["enough"]) if much else None,
        # Of the pack as a whole, told once.
        gaps=tuple(flow.gaps) if split is flow.splits[0] else (),
    )


def _users_of_packs(findings: Findings) -> dict[str, str]:
    """By pack, as `pack/NAME`, the `packing` of the config that asks for it first."""
    users: dict[str, str] = {}
    for stage, role in (("sft", "pack"), ("dpo", "pack"), ("eval", "packs")):
        for result in findings.of(stage):
            for pack in result.made_from.get(role, ()):
                users.setdefault(pack, f"{result.key}.packing")
    return users


def rows(findings: Findings) -> list[Rows]:
    """Of every corpus."""
    return [
        Rows(name=flow.name, read=flow.rows.read, quarantined=flow.quarantined, gaps=tuple(flow.gaps))
        for flow in corpus_flows(findings)
    ]


def asked(findings: Findings, line: list[str]) -> list[Asked]:
    """Of every corpus of prompts in every evaluation that asked one of these models, the last of them."""
    found = []
    for evaluation, models in findings.evaluations.items():
        by_label = {scored.model: scored for scored in models}
        if last := next((by_label[label] for label in reversed(line) if label in by_label), None):
            corpora = dict.fromkeys(row["corpus"] for row in last.responses)
            found += [_asked(evaluation, corpus, last) for corpus in corpora]
    return found


def _asked(evaluation: str, corpus: str, scored: Scored) -> Asked:
    answers = [row for row in scored.responses if row["corpus"] == corpus]
    checked = [row["prompt"] for row in answers if row["correct"] is not None]
    generation = scored.result.spec.get("generation") or {}
    most = generation.get("max_new_tokens")
    return Asked(
        evaluation=evaluation,
        corpus=corpus,
        model=scored.model,
        prompts=len(checked),
        different=len(set(checked)),
        answers=len(answers),
        cut_off=sum(row["tokens"] >= most for row in answers) if most else 0,
        most_tokens=most,
    )


def swept(findings: Findings, found: Variants) -> list[Swept]:
    """The keys with three numbers and more, if some run is the best."""
    best = next((run for run in findings.of("dpo") if run.label == found.best), None)
    if best is None:
        return []
    swept_ = []
    for name, texts in found.keys.items():
        try:
            values = {label: float(text) for label, text in texts.items()}
        except ValueError:
            continue
        if len(set(values.values())) > 2:
            several = tuple(sorted(set(values.values())))
            swept_.append(Swept(key=best.key, name=name, values=several, best=values[best.label], run=best.label))
    return swept_


def picked(found: Variants) -> list[Picked]:
    """One, if some run is the best."""
    if found.best is None or found.sorted_by is None:
        return []
    return [Picked(run=found.best, of=sum(value is not None for value in found.sorted_by.values.values()))]
