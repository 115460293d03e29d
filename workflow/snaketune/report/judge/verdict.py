"""Did it work: one model against another on the same held-out rows, measure by measure, each difference with its 95 % interval.

Rows are paired wherever both models were asked about them: what one gets right and the other doesn't is then all that counts,
and the interval is about half as wide as that of two separate shares. So it is of held-out loss, document by document. A
measure whose rows nobody kept one by one (tasks of lm-evaluation-harness) has a difference and no interval, and isn't counted.
"""

import math
from dataclasses import dataclass

import numpy as np

from snaketune.report.compare.scores import FORMATS, Measure, measures
from snaketune.report.data.results import ResultSet, ScoredModel
from snaketune.report.judge.difference_intervals import Interval, paired, paired_per_token, separate, wins

BETTER, WORSE, INCONCLUSIVE, NO_INTERVAL = "better", "worse", "open", "uncounted"
POINTS = " points"
LOSS = ".held_out_loss"
# What says the same again, and, of whole answers, what a short one wins whoever is asked.
EXCLUDED = ("perplexity", "logp_accuracy")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One measure of two models.

    Attributes:
        rows: how many of the same rows both were asked about; 0 where they can't be paired.
        interval: of `after - before`; None where it isn't known.
    """

    measure: Measure
    evaluation: str
    before: float
    after: float
    rows: int
    interval: Interval | None

    @property
    def value(self) -> float:
        return self.after - self.before

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `open` where the interval holds zero, `uncounted` where there is none."""
        if self.interval is None:
            return NO_INTERVAL
        low, high = sorted(self.measure.better * bound for bound in self.interval)
        return BETTER if low > 0 else WORSE if high < 0 else INCONCLUSIVE

    @property
    def name(self) -> str:
        return f"{self.measure.name} of {self.measure.on}"

    def shown(self, value: float) -> str:
        return FORMATS[self.measure.unit](value)

    @property
    def text(self) -> str:
        """As people read it: shares in points, all else in its own unit."""
        return signed(self.value, self.measure.unit)

    @property
    def interval_text(self) -> str:
        if self.interval is None:
            return ""
        low, high = (signed(bound, self.measure.unit).removesuffix(POINTS) for bound in self.interval)
        return f"{low} to {high}"

    @property
    def positions(self) -> tuple[float, float, float]:
        """Low, difference and high on a line from 0 to 100 with zero in its middle, which is as long as shares can differ."""
        low, high = self.interval or (self.value, self.value)
        return tuple(50 + 50 * max(-1.0, min(1.0, value)) for value in (low, self.value, high))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One model against one that it came from.

    Attributes:
        model, against: labels.
        key: the key of the config that asks for the model, if it is trained.
    """

    model: str
    against: str
    key: str = ""
    differences: list[Difference]

    @property
    def counted(self) -> list[Difference]:
        return [one for one in self.differences if one.outcome != NO_INTERVAL]

    def of(self, outcome: str) -> list[Difference]:
        return [one for one in self.differences if one.outcome == outcome]

    @property
    def tone(self) -> str:
        """`better`, `worse`, or `open` where it is neither or both."""
        won, lost = bool(self.of(BETTER)), bool(self.of(WORSE))
        return INCONCLUSIVE if won == lost else BETTER if won else WORSE

    @property
    def sentence(self) -> str:
        """The verdict."""
        return sentence(
            self.model,
            self.against,
            *(len(self.of(outcome)) for outcome in (BETTER, WORSE, INCONCLUSIVE)),
            self.of(NO_INTERVAL),
        )


def sentence(model: str, against: str, better: int, worse: int, open_: int, uncounted: list[Difference]) -> str:
    """
    >>> sentence("dpo:a", "base:a", 3, 0, 1, [])
    'dpo:a is better than base:a on 3 of 4 measures; 1 is too close to call.'
    >>> sentence("dpo:a", "base:a", 2, 1, 0, [])
    'dpo:a is better than base:a on 2 of 3 measures and worse on 1.'
    >>> sentence("dpo:a", "base:a", 0, 2, 0, [])
    'dpo:a is worse than base:a on both measures.'
    >>> sentence("dpo:a", "base:a", 0, 0, 2, [])
    "dpo:a can't be told from base:a: both measures are too close to call."
    """
    number = better + worse + open_
    if not number:
        moved = "; ".join(f"{one.name} {one.shown(one.before)} → {one.shown(one.after)}" for one in uncounted)
        return (
            f"{model} against {against}: {moved or 'nothing was measured of both'}; whether that is noise isn't known."
        )
    every = {1: "the one measure", 2: "both measures"}.get(number, f"all {number} measures")
    if not better and not worse:
        are = "are" if number > 1 else "is"
        return f"{model} can't be told from {against}: {every} {are} too close to call."
    first, second = ("better", "worse") if better >= worse else ("worse", "better")
    more, less = max(better, worse), min(better, worse)
    on = every if more == number else f"{more} of {number} measures"
    text = f"{model} is {first} than {against} on {on}"
    text += f" and {second} on {less}" if less else ""
    return text + (f"; {open_} {'are' if open_ > 1 else 'is'} too close to call." if open_ else ".")


def lineage_verdicts(results: ResultSet, line: list[str]) -> list[Verdict]:
    """The last model of a line against the first, and against the one before it where that is another; in all evaluations.

    Args:
        line: labels, from the base on.
    """
    against = list(dict.fromkeys((line[0], line[-2]))) if len(line) > 1 else []
    key = next((run.key for run in results.of("sft", "dpo") if line and run.label == line[-1]), "")
    return [
        Verdict(model=line[-1], against=one, key=key, differences=_all_differences(results, one, line[-1]))
        for one in against
    ]


def _all_differences(results: ResultSet, before: str, after: str) -> list[Difference]:
    both = {
        evaluation: (by_label[before], by_label[after])
        for evaluation, models in results.evaluations.items()
        if {before, after} <= (by_label := {scored.model: scored for scored in models}).keys()
    }
    return [
        one
        for evaluation, asked in both.items()
        for one in differences(*asked, f" ({evaluation})" if len(both) > 1 else "")
    ]


def differences(before: ScoredModel, after: ScoredModel, where: str = "") -> list[Difference]:
    """Of every measure that has a better end. Args: where: what to add to the name of a corpus or task."""
    rows = [row_outcomes(scored) for scored in (before, after)]
    found = []
    for measure in measures([before, after], where):
        values = [measure.values[scored.model] for scored in (before, after)]
        if measure.detail or not measure.better or None in values or measure.path.rpartition(".")[2] in EXCLUDED:
            continue
        was, now = (of_model.get(measure.path, {}) for of_model in rows)
        both = sorted(was.keys() & now.keys())
        interval = None
        section, _, name = measure.path.partition(".")
        if name.endswith(LOSS) and section == "conversations":
            documents = [scored.losses.get(name.removesuffix(LOSS), {}) for scored in (before, after)]
            both, interval = documents[0].keys() & documents[1].keys(), paired_per_token(*documents)
        elif both:
            was_N, now_N = (np.array([of_row[row] for row in both]) for of_row in (was, now))
            # Of the very rows that are compared; the same as the scores wherever both were asked the same.
            values, interval = [float(was_N.mean()), float(now_N.mean())], paired(was_N, now_N)
        elif measure.unit == "share" and all(sizes := [measure.sizes[one.model] for one in (before, after)]):
            interval = separate(values[0], sizes[0], values[1], sizes[1])
        found.append(
            Difference(
                measure=measure,
                evaluation=after.evaluation,
                before=values[0],
                after=values[1],
                rows=len(both),
                interval=interval,
            )
        )
    return found


def row_outcomes(scored: ScoredModel) -> dict[str, dict[str, float]]:
    """By path of a measure, of each row whether the model got it right, as 1 or 0: prompts; pairs by what is likelier per
    token, and by what gained more since the reference. A pair that neither completion wins is half right."""
    found: dict[str, dict[str, float]] = {}
    for row in scored.responses:
        if row["correct"] is not None:
            found.setdefault(f"conversations.{row['corpus']}.exact_match.share", {})[row["id"]] = float(row["correct"])
    if scored.pairs is None:
        return found
    chosen_P, rejected_P, *references = (
        scored.pairs[f"{side}_logp"].to_numpy().astype(float)
        for side in ("chosen", "rejected", "reference_chosen", "reference_rejected")
    )
    counts = (np.maximum(scored.pairs[f"{side}_tokens"].to_numpy(), 1) for side in ("chosen", "rejected"))
    per_token_P = np.subtract(*(logp_P / count_P for logp_P, count_P in zip((chosen_P, rejected_P), counts)))
    # Not a number where the reference doesn't know the pair.
    gained_P = (chosen_P - references[0]) - (rejected_P - references[1])
    names = [scored.pairs[name].to_pylist() for name in ("corpus", "id")]
    for corpus, pair, likelier, gained in zip(*names, wins(per_token_P).tolist(), wins(gained_P).tolist()):
        found.setdefault(f"preferences.{corpus}.logp_accuracy_per_token", {})[pair] = likelier
        if math.isfinite(gained):
            found.setdefault(f"preferences.{corpus}.reward_accuracy", {})[pair] = gained
    return found


def signed(value: float, unit: str) -> str:
    """
    >>> signed(0.125, "share"), signed(-0.3333, "share"), signed(-1.25, "nats"), signed(0.0, "share")
    ('+12.5 points', '−33.3 points', '−1.25', '0 points')
    """
    sign = "+" if value > 0 else "−" if value < 0 else ""
    if unit == "share":
        number = f"{100 * abs(value):.1f}".removesuffix(".0")
        return f"{sign if float(number) else ''}{number}{POINTS}"
    return sign + FORMATS[unit](abs(value))
