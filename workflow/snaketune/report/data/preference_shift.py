"""Changes that DPO made in held-out pairs: log-probabilities of each pair before and after, and pairs whose preference flipped.

"Before" is the initial model of the run, if the same evaluation scored it on the same pairs; else the reference, whose
log-probabilities are stored with those of the run. Pairs that only one of them has are excluded. A few thousand pairs take
milliseconds; texts are read only for the pairs that are shown.

Preference is by log-probability per token: by summed log-probability, any model prefers shorter completions.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.results import Result, ResultSet, ScoredModel
from snaketune.report.judge.difference_intervals import wins
from snaketune.report.text import clip
from snaketune.tables import read_table

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 500, 600
OUTCOMES = ("won", "lost", "right", "wrong")


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """The pairs of one source: their number, the preference accuracy per token before and after, and the mean rewards after."""

    name: str
    pairs: int
    before: float
    after: float
    chosen: float
    rejected: float


@dataclass(frozen=True, kw_only=True)
class PreferenceChange:
    """One DPO run on the held-out pairs of one corpus. The columns of arrays [P, 2] are chosen and rejected.

    Attributes:
        before: Label of the model before, or `reference` if the reference's log-probabilities are used.
        before_P2, after_P2: float64[P, 2], summed log-probabilities in nats.
        counts_P2: int64[P, 2], tokens.
        reference_P2: float64[P, 2], log-probabilities of the reference; `before_P2` if the run has none.
        sources: For each source name, which pairs are from it, bool[P]; in the order of the corpus.
        beta: The factor from log-ratio to reward; None if the run has no reference.
    """

    evaluation: str
    corpus: str
    run: Result
    before: str
    ids: list[str]
    before_P2: np.ndarray
    after_P2: np.ndarray
    counts_P2: np.ndarray
    reference_P2: np.ndarray
    sources: dict[str, np.ndarray]
    beta: float | None

    @property
    def label(self) -> str:
        return self.run.label

    def margins(self, per_token: bool) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of chosen less rejected, summed or per token: float64[P] before, and after."""
        by = np.maximum(self.counts_P2, 1) if per_token else 1
        return tuple((sums / by) @ np.array([1.0, -1.0]) for sums in (self.before_P2, self.after_P2))

    def rewards(self) -> tuple[np.ndarray, np.ndarray]:
        """Rewards (beta times log-ratio), or log-probability gains without a reference: float64[P, 2] before, and after."""
        beta = self.beta or 1.0
        return beta * (self.before_P2 - self.reference_P2), beta * (self.after_P2 - self.reference_P2)

    def outcomes(self, per_token: bool) -> dict[str, int]:
        """Number of pairs that are `won` (chosen preferred after, not before), `lost`, and `right` or `wrong` both times."""
        before_P, after_P = (margins > 0 for margins in self.margins(per_token))
        both = {"won": ~before_P & after_P, "lost": before_P & ~after_P, "right": before_P & after_P}
        return {name: int(both.get(name, ~before_P & ~after_P).sum()) for name in OUTCOMES}

    def flipped(self, won: bool, limit: int) -> list[int]:
        """Indices of the pairs that were won or lost, sorted by the change of their margin per token, largest first."""
        before_P, after_P = self.margins(per_token=True)
        indices = np.flatnonzero((before_P > 0) != (after_P > 0))
        indices = [int(index) for index in indices if (after_P[index] > 0) == won]
        return sorted(indices, key=lambda index: (-abs(after_P[index] - before_P[index]), self.ids[index]))[:limit]

    def by_source(self) -> list[SourceChange]:
        """The change on the pairs of each source; empty with a single source."""
        (before_P, after_P), (_, reward_P2) = self.margins(per_token=True), self.rewards()
        return [
            SourceChange(
                name=name,
                pairs=int(own_P.sum()),
                before=float(wins(before_P[own_P]).mean()),
                after=float(wins(after_P[own_P]).mean()),
                **dict(zip(("chosen", "rejected"), reward_P2[own_P].mean(axis=0).tolist())),
            )
            for name, own_P in self.sources.items()
            if len(self.sources) > 1
        ]

    @cached_property
    def gains(self) -> tuple[float, float]:
        """Mean log-probability gain (after less before) of chosen and of rejected, in nats."""
        chosen, rejected = (self.after_P2 - self.before_P2).mean(axis=0)
        return float(chosen), float(rejected)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A flipped pair with its margins in nats per token. Texts are None if the corpus no longer has the pair."""

    id: str
    prompt: str | None
    chosen: str | None
    rejected: str | None
    before: float
    after: float


def preference_changes(results: ResultSet) -> list[PreferenceChange]:
    """The changes of every DPO run that was scored on pairs, by evaluation and corpus."""
    runs = {run.label: run for run in results.of("dpo")}
    return [
        change
        for evaluation, models in results.evaluations.items()
        for scored in models
        if scored.model in runs and scored.pairs is not None
        for corpus in scored.pairs["corpus"].unique().to_pylist()
        if (change := _change(results, corpus, runs[scored.model], scored, _before(results, scored, models)))
    ]


def flips(results: ResultSet, change: PreferenceChange, won: bool, limit: int) -> list[Flip]:
    """The `limit` pairs that were won or lost by the largest change, with their texts."""
    indices = change.flipped(won, limit)
    texts = _texts(results, change.corpus, [change.ids[index] for index in indices])
    before_P, after_P = change.margins(per_token=True)
    return [
        Flip(
            id=change.ids[index],
            before=float(before_P[index]),
            after=float(after_P[index]),
            **texts.get(change.ids[index], dict.fromkeys(("prompt", "chosen", "rejected"))),
        )
        for index in indices
    ]


def _before(results: ResultSet, scored: ScoredModel, models: list[ScoredModel]) -> ScoredModel | None:
    initial = results.initial_models.get(scored.model)
    return next((one for one in models if one.model == initial and one.pairs is not None), None)


def _change(
    results: ResultSet, corpus: str, run: Result, scored: ScoredModel, before: ScoredModel | None
) -> PreferenceChange | None:
    after = _rows(scored.pairs, corpus)
    logps = {name: _logps(after, name) for name in ("", "reference_")}
    known = {pair: logp for pair, logp in logps["reference_"].items() if np.isfinite(logp).all()}
    earlier = _logps(_rows(before.pairs, corpus), "") if before else {}
    label = before.model if before and earlier else "reference"
    earlier = earlier or known
    ids = [pair for pair in logps[""] if pair in earlier]
    if not ids:
        return None
    counts = dict(zip(after["id"].to_pylist(), _columns(after, "", "tokens").astype(np.int64)))
    # Without a comparable reference, gains are relative to the model before.
    referenced = all(pair in known for pair in ids)
    reference = known if referenced else earlier
    before_P2, after_P2, reference_P2, counts_P2 = (
        np.array([values[pair] for pair in ids]) for values in (earlier, logps[""], reference, counts)
    )
    return PreferenceChange(
        evaluation=scored.evaluation,
        corpus=corpus,
        run=run,
        before=label,
        ids=ids,
        before_P2=before_P2,
        after_P2=after_P2,
        counts_P2=counts_P2,
        reference_P2=reference_P2,
        sources=_sources(results, corpus, after, ids),
        beta=run.spec.get("beta") if referenced else None,
    )


def _rows(pairs: pa.Table, corpus: str) -> pa.Table:
    return pairs.filter(pc.equal(pairs["corpus"], corpus))


def _sources(results: ResultSet, corpus: str, rows: pa.Table, ids: list[str]) -> dict[str, np.ndarray]:
    """For each source name, which pairs are from it. Empty for older results, which don't record sources."""
    if "source" not in rows.schema.names:
        return {}
    source_of = dict(zip(rows["id"].to_pylist(), rows["source"].to_pylist()))
    source_P = np.array([source_of[pair] for pair in ids])
    flow = next((flow for flow in corpus_flows(results) if flow.name == corpus), None)
    names = {number: source.name for number, source in enumerate(flow.sources)} if flow else {}
    return {
        f"{number}: {names[number]}" if number in names else str(number): source_P == number
        for number in np.unique(source_P).tolist()
    }


def _logps(rows: pa.Table, whose: str) -> dict[str, np.ndarray]:
    """Log-probabilities by pair id, float64[2]; NaN if missing."""
    return dict(zip(rows["id"].to_pylist(), _columns(rows, whose, "logp")))


def _columns(rows: pa.Table, whose: str, what: str) -> np.ndarray:
    return np.stack([rows[f"{whose}{side}_{what}"].to_numpy() for side in ("chosen", "rejected")], axis=1)


def _texts(results: ResultSet, corpus: str, ids: list[str]) -> dict[str, dict[str, str]]:
    """Excerpts of the texts of some pairs, by id."""
    result = next((result for result in results.of("corpus") if result.name == corpus), None)
    if not ids or result is None or "held_out.arrow" not in result.manifest["payload"]:
        return {}
    rows = read_table(result.artifact.file("held_out.arrow"))
    return {row["id"]: _excerpts(row) for row in rows.filter(pc.is_in(rows["id"], pa.array(ids))).to_pylist()}


def _excerpts(row: dict) -> dict[str, str]:
    return {
        "prompt": clip(_text(row["prompt"], omit_single_role=False), PROMPT_CHARACTERS),
        "chosen": clip(_text(row["chosen"]), COMPLETION_CHARACTERS),
        "rejected": clip(_text(row["rejected"]), COMPLETION_CHARACTERS),
    }


def _text(turns: list[dict], omit_single_role: bool = True) -> str:
    """Turns as text with their roles; a single turn without its role."""
    if omit_single_role and len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in turns)
