"""The `sample:` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from snaketune.config.base import CorpusName, Fraction, Model, ModelReference, PositiveInt, ScoreName
from snaketune.config.evaluations import ListedOnce
from snaketune.config.generation import EngineChoice, Generation


class Prompts(Model):
    """Prompts from corpora: conversations up to an assistant's turn, or prompts of preferences."""

    corpora: Annotated[tuple[CorpusName, ...], Field(min_length=1), ListedOnce]
    """Corpora of conversations, preferences or unpaired rows."""
    split: Literal["train", "held_out"] = "train"
    """Rows that prompts are taken from."""
    limit: PositiveInt | None = None
    """Maximum number of rows per corpus, the first by id; ids are digests, so that is a random choice. Default: all."""
    turns: Literal["last", "all"] = "last"
    """`last` makes one prompt of a conversation, up to its last assistant turn; `all` makes one for each assistant turn."""
    longest: PositiveInt | None = None
    """Leaves out prompts with more tokens; they are counted. Default: a prompt that doesn't fit into the model ends the run."""
    skip: Annotated[int, Field(ge=0)] = 0
    """Number of rows per corpus that come last instead of first, so that `limit` takes them only where the others don't
    suffice: those that an earlier sample took."""
    scored: Annotated[tuple[ScoreName, ...], ListedOnce] = ()
    """Entries of `score:` of earlier samples of these rows, the last one last; see `solved` and `unsolved`."""
    solved: Fraction = 1.0
    """Share that is sampled again of the rows that are always right: all responses had the highest score that any response
    had. There is nothing left to learn from them; 0 leaves them out. The last entry of `scored` that has a row decides."""
    unsolved: Fraction = 1.0
    """Share that is sampled again of the rows that are always wrong: all responses had the lowest score. Where responses are
    compared, they teach nothing before the model solves them at times."""

    @property
    def leaves_out(self) -> str | None:
        """The key by which rows are left out for their scores; None if there is none."""
        return "solved" if self.solved < 1 else "unsolved" if self.unsolved < 1 else None


class SampleOperation(EngineChoice):
    """Execution of sampling. An edit reruns no finished result."""

    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each part. `transformers` uses one; `vllm` divides the model among them. 0 computes on the CPU."""
    parts: PositiveInt = 1
    """Jobs that the prompts are divided among; they run in parallel where there are GPUs or nodes for it."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.gpus > 1 and self.engine not in ("auto", "vllm"):
            engine = self.engine if self.engine == "transformers" else "a server"
            uses = "uses one; raise parts instead" if engine == "transformers" else "computes elsewhere; remove gpus"
            raise ValueError(f"gpus is {self.gpus}, but engine {engine} {uses}")
        return self


class Responses(Model):
    """Responses to prompts, several per prompt."""

    prompts: Prompts
    responses: PositiveInt = 1
    """Responses per prompt. A higher number computes only those that are missing."""
    generation: Generation = Generation()
    operation: SampleOperation = SampleOperation()

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.responses > 1 and not self.generation.temperature:
            raise ValueError(
                f"responses is {self.responses}, but with temperature 0 all of them would be the same; raise "
                "generation.temperature"
            )
        return self


class Sample(Responses):
    """Responses of a model to prompts, several per prompt, as a table."""

    model: ModelReference
    """Model: `base:NAME` (the initial weights of the SFT run NAME), `sft:NAME`, `dpo:NAME` or `merge:NAME`."""

    @model_validator(mode="after")
    def _knows_scores(self) -> Self:
        scored, leaves_out = self.prompts.scored, self.prompts.leaves_out
        if leaves_out and not scored:
            raise ValueError(
                f"prompts.{leaves_out} leaves out prompts by their scores; name entries of `score:` under scored"
            )
        if scored and not leaves_out:
            raise ValueError(f"prompts.scored has no effect without solved or unsolved; set one, or remove {scored[0]}")
        return self
