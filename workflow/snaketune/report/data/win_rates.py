"""Win rates by a judge, as the stage `compare` found them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from snaketune.publishing.results import Result, read_json
from snaketune.publishing.scored_models import model_named
from snaketune.report.data.results import ResultSet
from snaketune.text import percent, whole


@dataclass(frozen=True, kw_only=True)
class JudgedComparison:
    """A model's responses compared with those of another model (`against`) by a judge."""

    result: Result
    against: str

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Those of `evaluation.win_rates.win_rate`."""
        return read_json(self.result.artifact.file("win_rate.json"))

    @property
    def evaluation(self) -> str:
        return self.result.name.partition("/")[0]

    @property
    def model(self) -> str:
        return model_named(self.result.name)

    @property
    def judge(self) -> str:
        judge = self.result.manifest["judge"]
        return judge.get("model") or judge["name"]

    @property
    def row(self) -> list[str]:
        """The cells of its row: win rate, at equal lengths, prompts won, tied and lost, position bias, unclear, tokens."""
        scores = self.scores
        rate, bias = (
            f"{percent(scores[name])}{_interval(scores[f'{name}_interval'])}" for name in ("win_rate", "position_bias")
        )
        outcomes = " / ".join(whole(scores[name]) for name in ("wins", "ties", "losses"))
        tokens = " / ".join(f"{scores[name]:.3g}" for name in ("mean_tokens", "opponent_mean_tokens"))
        equal_lengths = percent(scores["length_controlled"])
        return [
            rate,
            equal_lengths,
            outcomes,
            bias,
            percent(scores["inconsistent"]),
            percent(scores["unclear"]),
            tokens,
        ]


def _interval(bounds: list[float] | None) -> str:
    return f" [{', '.join(map(percent, bounds))}]" if bounds else ""


def judged_comparisons(results: ResultSet) -> list[JudgedComparison]:
    found = []
    for result in results.of("compare"):
        (opponent,) = results.made_from(result, "opponent")
        found.append(JudgedComparison(result=result, against=model_named(opponent.name)))
    return found
