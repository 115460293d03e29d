"""Judges: models that say how good a response is, or which of two is better."""

from typing import Self

from pydantic import model_validator

from snaketune.config.base import LocalPath, ModelReference, PositiveInt, RegexWithOneGroup
from snaketune.config.generation import Engine, EngineChoice, Server


class Judge(EngineChoice):
    """A model that judges by a rubric, at temperature 0: one of the config, or one of a server."""

    model: ModelReference | None = None
    """Model of the config, such as `sft:big`. Without it, `engine` is a server: `{url: ..., model: ...}`."""
    engine: Engine = "transformers"
    """As in `sample.operation.engine`. A server is asked by its interface for chats, and what is judged is sent to it."""
    rubric: LocalPath
    """Text file that says what a good response is. An edit asks the judge again, and samples nothing."""
    max_new_tokens: PositiveInt = 512
    """Maximum number of tokens of a judge's reply."""
    batch_size: PositiveInt = 32
    """Replies per batch of the engine `transformers`."""

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if (self.model is None) != isinstance(self.engine, Server):
            raise ValueError(
                "expected one judge: model: sft:NAME, a model of the config, or engine: {url: ..., model: ...}, one of a server"
            )
        return self

    @property
    def server(self) -> Server | None:
        """The server, None for a model of the config."""
        return self.engine if isinstance(self.engine, Server) else None


class ResponseJudge(Judge):
    """A model that scores each response."""

    scale: tuple[float, float] = (1, 10)
    """Lowest and highest score; another number is no score."""
    pattern: RegexWithOneGroup = r"(?i)score:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group that extracts the score from a reply; the last match counts. The judge is asked to end
    with `Score: N`."""
    json_reply: bool = False
    """Asks for a JSON object with `reason` and `score` instead, by its schema where a server takes one, and reads that."""

    @model_validator(mode="after")
    def _is_a_scale(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale is {list(self.scale)}; expected [lowest, highest], such as [1, 10]")
        if self.json_reply and "pattern" in self.model_fields_set:
            raise ValueError("pattern reads texts, and json_reply is true; remove one of them")
        return self


class PairJudge(Judge):
    """A model that compares each model's responses with those of another one, in both orders."""

    against: ModelReference
    """Model whose responses the others are compared with; one of `models`."""
    prompts: PositiveInt = 100
    """Held-out prompts per corpus that have a response and are judged, by id, those with checkable answers first."""
