"""The scores of reward models on held-out pairs, as the report shows them."""

from dataclasses import dataclass
from typing import Any

from snaketune.publishing.results import read_json
from snaketune.report.data.results import ResultSet, model_named, model_order
from snaketune.report.text import decimal, percent, whole


@dataclass(frozen=True, kw_only=True)
class RewardScores:
    """A reward model's scores on the pairs of one corpus (`evaluation.reward_scores`)."""

    evaluation: str
    model: str
    corpus: str
    scores: dict[str, Any]

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The cells of the table: of all pairs, then of each source if there are several."""
        sources = self.scores.get("by_source", {})
        named = [(self.corpus, self.scores), *((f"{self.corpus}, source {n}", one) for n, one in sources.items())]
        return [(name, _cells(scores)) for name, scores in named]


def _cells(scores: dict[str, Any]) -> list[str]:
    accuracy = f"{percent(scores['reward_accuracy'])} {_interval(scores['reward_accuracy_interval'], percent)}"
    margin = f"{decimal(scores['reward_margin'])} {_interval(scores['reward_margin_interval'], decimal)}"
    rewards = [decimal(scores[name]) for name in ("chosen_reward", "rejected_reward")]
    error = scores.get("calibration_error")
    return [whole(scores["pairs"]), accuracy.strip(), margin.strip(), *rewards, percent(error)]


def _interval(bounds: list[float] | None, shown: Any) -> str:
    return f"[{shown(bounds[0])}, {shown(bounds[1])}]" if bounds else ""


def reward_scores(results: ResultSet) -> list[RewardScores]:
    """All scores, by evaluation, corpus and model."""
    found = [
        RewardScores(
            evaluation=result.name.partition("/")[0], model=model_named(result.name), corpus=corpus, scores=scores
        )
        for result in results.of_rewards
        for corpus, scores in read_json(result.artifact.file("scores.json"))["preferences"].items()
    ]
    return sorted(found, key=lambda one: (one.evaluation, one.corpus, model_order(one.model)))
