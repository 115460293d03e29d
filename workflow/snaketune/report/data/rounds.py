"""Rounds of training on a model's own responses, found in the results: runs that start from the model whose responses they
train on, whether the config has `rounds` or its entries were written one by one.

    sft:few ── sample, score ── sft:self-1 ── sample, score ── sft:self-2
    round 0                     round 1                        round 2
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from snaketune.evaluation.score_intervals import mean_interval, wilson
from snaketune.publishing.measures import Measure, measures
from snaketune.publishing.results import Result
from snaketune.report.data.results import ResultSet
from snaketune.sampling.tables import RESPONSES, SCORES
from snaketune.tables import read_table

Interval = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The scored responses of a model, from which the next round's rows were selected.

    Attributes:
        checked: Whether the score is that of a checked answer, and not of a judge, a reward model or a function.
        at_least: The score from which a response became a row, if the selection says so.
        rows: The number of selected rows.
    """

    sample: Result
    score: Result
    checked: bool
    at_least: float | None
    rows: int

    @cached_property
    def of_prompt(self) -> list[np.ndarray]:
        """float64[n] for each prompt: the scores of its responses, those without a score left out."""
        found: dict[tuple[str, int], list[float]] = {}
        for row in read_table(self.score.artifact.file(SCORES)).select(["id", "turn", "score"]).to_pylist():
            if row["score"] is not None:
                found.setdefault((row["id"], row["turn"]), []).append(row["score"])
        return [np.array(scores) for scores in found.values()]

    @cached_property
    def right_from(self) -> float | None:
        """The score from which a response is right; None for scores that only compare responses."""
        values = np.unique(np.concatenate(self.of_prompt)) if self.of_prompt else np.zeros(0)
        if self.at_least is None and len(values) == 2:
            return float(values[1])
        return self.at_least

    @cached_property
    def shares(self) -> list[np.ndarray]:
        """bool[n] for each prompt: which of its responses are right; empty if that isn't known."""
        right_from = self.right_from
        return [] if right_from is None else [scores >= right_from for scores in self.of_prompt]

    @property
    def first_try(self) -> float | None:
        """Share of prompts that one response solves: the mean over all responses, which is less uncertain than the first's."""
        return float(np.mean([right.mean() for right in self.shares])) if self.shares else None

    @property
    def at_least_once(self) -> float | None:
        """Share of prompts that one of all responses solves (pass@n)."""
        return float(np.mean([right.any() for right in self.shares])) if self.shares else None

    @property
    def once_interval(self) -> Interval:
        share = self.at_least_once
        return None if share is None else wilson(share, len(self.shares))

    @property
    def settled(self) -> tuple[int, int]:
        """The number of prompts whose responses are all right, and of those whose responses are all wrong."""
        return sum(bool(right.all()) for right in self.shares), sum(not right.any() for right in self.shares)

    @cached_property
    def mean(self) -> float:
        return float(np.mean([scores.mean() for scores in self.of_prompt]))

    @cached_property
    def mean_interval(self) -> Interval:
        bounds = mean_interval([float(scores.mean()) for scores in self.of_prompt])
        return (bounds[0], bounds[1]) if bounds else None

    @cached_property
    def tokens(self) -> float:
        """The mean length of the responses."""
        lengths = read_table(self.sample.artifact.file(RESPONSES))["tokens"].combine_chunks().value_lengths().to_numpy()
        return float(lengths.mean()) if len(lengths) else 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """A model, from the one before the first round (number 0) on, and its responses, if a round follows that trains on them."""

    number: int
    model: str
    sampled: Sampled | None


@dataclass(frozen=True, kw_only=True)
class HeldOutScores:
    """Scores of the models of all rounds on one corpus of an evaluation, by number of the round.

    Attributes:
        others: Exact match of the evaluation's other trained models.
    """

    evaluation: str
    corpus: str
    exact: dict[int, tuple[float, Interval]]
    tokens: dict[int, float]
    kl: dict[int, tuple[float, Interval]]
    others: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """A chain of rounds.

    Attributes:
        key: The config key of the last run.
    """

    key: str
    rounds: list[Round]
    held_out: list[HeldOutScores]

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]


def rounds_of(results: ResultSet) -> list[Rounds]:
    """The chains of rounds, each up to a model that no further round trains."""
    before: dict[str, tuple[str, Sampled]] = {}
    runs = {run.label: run for run in results.of("sft", "dpo")}
    for label, run in runs.items():
        start = results.first(run, "model")
        initial = start.label if start else f"base:{run.name}"
        for sampled, model in _trained_on(results, run):
            if model == start:
                before[label] = initial, sampled
    last = [label for label in before if label not in {initial for initial, _ in before.values()}]
    chains = []
    for label in last:
        models, samples = [label], []
        while models[0] in before:
            initial, sampled = before[models[0]]
            models, samples = [initial, *models], [sampled, *samples]
        rounds = [
            Round(number=number, model=model, sampled=sampled)
            for number, (model, sampled) in enumerate(zip(models, [*samples, None], strict=True))
        ]
        chains.append(Rounds(key=runs[label].key, rounds=rounds, held_out=list(_held_out(results, models))))
    return chains


def _trained_on(results: ResultSet, run: Result) -> Iterator[tuple[Sampled, Result | None]]:
    """Yield the scored responses among the rows that a run trains on, with the result that responded (None: a base model)."""
    pack = results.first(run, "pack")
    tokens = results.first(results.first(pack, "plan"), "tokens")
    corpus = results.first(tokens, "corpus")
    for selected in results.made_from(corpus, "selected") if corpus else ():
        sample, score = results.first(selected, "samples"), results.first(selected, "scores")
        if sample and score:
            sampled = Sampled(
                sample=sample,
                score=score,
                checked=score.stage == "score" and bool(score.spec["answer"]),
                at_least=selected.spec["at_least"],
                rows=selected.counts["rows"],
            )
            yield sampled, results.first(sample, "model")


def _held_out(results: ResultSet, models: list[str]) -> Iterator[HeldOutScores]:
    for evaluation, evaluated in results.evaluations.items():
        found = {measure.path: measure for measure in measures(evaluated)}
        for corpus in sorted({name for scored in evaluated for name in scored.scores.get("conversations") or {}}):
            keys = ("exact_match.share", "exact_match.mean_response_tokens", "kl.per_token")
            exact, tokens, kl = (found.get(f"conversations.{corpus}.{key}") for key in keys)
            scores = HeldOutScores(
                evaluation=evaluation,
                corpus=corpus,
                exact=_by_round(exact, models),
                tokens={number: value for number, (value, _) in _by_round(tokens, models).items()},
                kl=_by_round(kl, models),
                others={
                    model: share
                    for model, share in (exact.values.items() if exact else ())
                    if share is not None and model not in models and not model.startswith("base:")
                },
            )
            if scores.exact or scores.tokens:
                yield scores


def _by_round(measure: Measure | None, models: list[str]) -> dict[int, tuple[float, Interval]]:
    """A value with its interval, by number of the round, where it was measured."""
    return {
        number: (value, measure.interval(model))
        for number, model in enumerate(models)
        if measure and (value := measure.values.get(model)) is not None
    }
