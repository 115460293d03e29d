"""The keys of rounds, in `sft:` and `dpo:`, which `config.rounds` expands."""

from typing import Annotated, Any, Literal

from pydantic import Field

from snaketune.config.base import Model, PositiveInt

Rounds = Annotated[int, Field(ge=1, le=99)] | Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=99)]


class RoundRows(Model):
    """Which scored responses of a round become conversations; see `corpora.NAME.sources`."""

    rule: Literal["best", "all"]
    """The best response to each prompt becomes a conversation, or all responses do."""
    at_least: float | None = None
    """The score from which a response becomes a conversation. Default: any."""
    min_rows: PositiveInt | None = None
    """Number of conversations of a round below which the run stops; the round before is then the last one."""


class RoundPairs(Model):
    """Which scored responses of a round become pairs; see `corpora.NAME.sources`."""

    rule: Literal["best-worst"]
    """Pairs the best response to a prompt with the worst, then the second best with the second worst."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Minimum difference of the two scores. Equal ones never make a pair."""
    per_prompt: PositiveInt = 1
    """Maximum number of pairs per prompt."""
    min_rows: PositiveInt | None = None
    """Number of pairs of a round below which the run stops; the round before is then the last one."""


def check_round_keys(run: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Raise ValueError if a run with rounds lacks a key that these need, or a run without them has one."""
    found = [key for key in (*needed, *optional) if getattr(run, key)]
    if not run.rounds:
        if found:
            raise ValueError(f"{found[0]} belongs to rounds; set rounds: 2, or remove it")
        return
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"rounds need {', '.join(needed)}; {missing[0]} is missing")
    if run.race:
        raise ValueError("a race compares runs of a grid, and rounds follow each other; remove race, or rounds")
    if run.sample.prompts.split == "held_out":
        raise ValueError("sample.prompts.split: rounds train on responses, and held-out prompts stay apart; remove it")
    for key in ("skip", "scored"):
        if getattr(run.sample.prompts, key):
            raise ValueError(f"sample.prompts.{key}: rounds set it for each round; remove it")
    if run.score.by.sum:
        raise ValueError(
            "score.by.sum: it names entries of `score:`, of other samples; write a function, and name its file under python"
        )
