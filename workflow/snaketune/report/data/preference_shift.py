"""Changes that DPO made in held-out pairs: log-probabilities of each pair before and after, and pairs whose preference flipped.

"Before" is the initial model of the run, if the same evaluation scored it on the same pairs; else the reference, whose
log-probabilities are stored with those of the run. Pairs that only one of them has are excluded. A few thousand pairs take
milliseconds; texts are read only for the pairs that are shown.

Preference is by log-probability per token: by summed log-probability, any model prefers shorter completions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.split_files import file_name, read_split
from snaketune.evaluation.pair_scores import wins
from snaketune.publishing.results import Result
from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.results import ResultSet
from snaketune.text import clip

# Limits of excerpts.
CHARACTERS = {"prompt": 500, "chosen": 600, "rejected": 600}


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
        pairs = {"won": ~before_P & after_P, "lost": before_P & ~after_P}
        pairs |= {"right": before_P & after_P, "wrong": ~before_P & ~after_P}
        return {name: int(which_P.sum()) for name, which_P in pairs.items()}

    def flipped(self, won: bool, limit: int) -> list[int]:
        """Indices of the pairs that were won or lost, sorted by the change of their margin per token, largest first."""
        before_P, after_P = self.margins(per_token=True)
        indices = np.flatnonzero(((before_P > 0) != (after_P > 0)) & ((after_P > 0) == won)).tolist()
        return sorted(indices, key=lambda index: (-abs(after_P[index] - before_P[index]), self.ids[index]))[:limit]

    def by_source(self) -> list[dict[str, Any]]:
        """Of each source: name, pairs, accuracy per token before and after, mean rewards after; empty with a single source."""
        if len(self.sources) < 2:
            return []
        (before_P, after_P), (_, reward_P2) = self.margins(per_token=True), self.rewards()
        return [
            {
                "name": name,
                "pairs": int(own_P.sum()),
                "before": float(wins(before_P[own_P]).mean()),
                "after": float(wins(after_P[own_P]).mean()),
            }
            | dict(zip(("chosen", "rejected"), reward_P2[own_P].mean(axis=0).tolist()))
            for name, own_P in self.sources.items()
        ]

    @property
    def gains(self) -> list[float]:
        """Mean log-probability gain (after less before) of chosen and of rejected, in nats."""
        return (self.after_P2 - self.before_P2).mean(axis=0).tolist()


def preference_changes(results: ResultSet) -> list[PreferenceChange]:
    """The changes of every DPO run that was scored on pairs, by evaluation and corpus."""
    runs = {run.label: run for run in results.of("dpo")}
    if not runs:
        return []
    changes = []
    for models in results.evaluations.values():
        pairs_of = {scored.model: scored.pairs for scored in models}
        for scored in models:
            if scored.model in runs:
                initial = results.initial_models.get(scored.model)
                for corpus in scored.pairs["corpus"].unique().to_pylist():
                    changes.append(_change(results, corpus, runs[scored.model], scored, initial, pairs_of.get(initial)))
    return [change for change in changes if change]


def flips(results: ResultSet, change: PreferenceChange, won: bool, limit: int) -> list[dict[str, Any]]:
    """The `limit` pairs that were won or lost by the largest change: id, margins in nats per token before and after, texts.

    Texts are None if the corpus no longer has the pair.
    """
    indices = change.flipped(won, limit)
    texts = _texts(results, change.corpus, [change.ids[index] for index in indices])
    before_P, after_P = change.margins(per_token=True)
    return [
        {"id": change.ids[index], "before": float(before_P[index]), "after": float(after_P[index])}
        | texts.get(change.ids[index], dict.fromkeys(CHARACTERS))
        for index in indices
    ]


def _change(
    results: ResultSet,
    corpus: str,
    run: Result,
    scored: ScoredModel,
    initial: str | None,
    initial_pairs: pa.Table | None,
) -> PreferenceChange | None:
    rows = _of_corpus(scored.pairs, corpus)
    logps, counts = _by_id(rows, "_logp"), _by_id(rows, "_tokens")
    known = {pair: logp for pair, logp in _by_id(rows, "_logp", "reference_").items() if np.isfinite(logp).all()}
    earlier = {} if initial_pairs is None else _by_id(_of_corpus(initial_pairs, corpus), "_logp")
    before, earlier = (initial, earlier) if earlier else ("reference", known)
    ids = [pair for pair in logps if pair in earlier]
    if not ids:
        return None
    # Without a comparable reference, gains are relative to the model before.
    referenced = all(pair in known for pair in ids)
    values = (earlier, logps, counts, known if referenced else earlier)
    before_P2, after_P2, counts_P2, reference_P2 = (np.array([by_id[pair] for pair in ids]) for by_id in values)
    return PreferenceChange(
        evaluation=scored.evaluation,
        corpus=corpus,
        run=run,
        before=before,
        ids=ids,
        before_P2=before_P2,
        after_P2=after_P2,
        counts_P2=counts_P2.astype(np.int64),
        reference_P2=reference_P2,
        sources=_sources(results, corpus, rows, ids),
        beta=run.spec.get("beta") if referenced else None,
    )


def _of_corpus(pairs: pa.Table, corpus: str) -> pa.Table:
    return pairs.filter(pc.equal(pairs["corpus"], corpus))


def _by_id(rows: pa.Table, what: str, whose: str = "") -> dict[str, np.ndarray]:
    """A column of chosen and of rejected by pair id: [2]; NaN if missing."""
    sides = np.stack([rows[f"{whose}{side}{what}"].to_numpy() for side in ("chosen", "rejected")], axis=1)
    return dict(zip(rows["id"].to_pylist(), sides))


def _sources(results: ResultSet, corpus: str, rows: pa.Table, ids: list[str]) -> dict[str, np.ndarray]:
    """For each source name, which pairs are from it: bool[P]."""
    source_of = dict(zip(rows["id"].to_pylist(), rows["source"].to_pylist()))
    source_P = np.array([source_of[pair] for pair in ids])
    sources = next((flow.sources for flow in corpus_flows(results) if flow.name == corpus), [])
    names = {number: f"{number}: {source['name']}" for number, source in enumerate(sources)}
    return {names.get(number, str(number)): source_P == number for number in np.unique(source_P).tolist()}


def _texts(results: ResultSet, corpus: str, ids: list[str]) -> dict[str, dict[str, str]]:
    """Excerpts of the texts of some pairs, by id."""
    result = results.by_key.get(f"corpus/{corpus}")
    if not ids or result is None or file_name("held_out", 0) not in result.manifest["payload"]:
        return {}
    rows = read_split(result.artifact, "held_out")
    return {
        row["id"]: {name: clip(_text(row[name], name == "prompt"), limit) for name, limit in CHARACTERS.items()}
        for row in rows.filter(pc.is_in(rows["id"], pa.array(ids))).to_pylist()
    }


def _text(turns: list[dict], roles: bool) -> str:
    """Turns as text with their roles; a single turn without its role unless `roles`."""
    if not roles and len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"[{turn['role']}] {turn['content']}" for turn in turns)
