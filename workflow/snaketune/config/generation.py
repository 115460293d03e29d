"""Generation of responses: decoding parameters, and the engines that generate."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import LocalPath, Model, PositiveFloat, PositiveInt, ShortText
from snaketune.config.corpus_sources import TemplateVariables


class Decoding(Model):
    """Decoding parameters of a response."""

    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens of a response."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 decodes greedily. Above 0, tokens are sampled from logits divided by the temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples from the smallest set of most likely tokens with at least this total probability (nucleus sampling)."""
    top_k: PositiveInt | None = None
    """Samples from this many most likely tokens. Default: from all."""
    repetition_penalty: PositiveFloat = 1.0
    """Values above 1 make tokens less likely that occur in the prompt or in the response so far (Keskar et al., 2019)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed for sampling; a prompt gets the same response for the same seed."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response; they and what follows are cut off."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for key in ("top_p", "top_k", "seed"):
            if not self.temperature and getattr(self, key) != Decoding.model_fields[key].default:
                raise ValueError(
                    f"{key} is {getattr(self, key)}, but it has no effect with temperature 0, which doesn't sample; raise "
                    f"temperature, or remove {key}"
                )
        return self


class Generation(Decoding):
    """Generation of responses to prompts."""

    batch_size: PositiveInt = 32
    """Responses per batch of the engine `transformers`."""
    template_variables: TemplateVariables = {}
    """Variables of the chat template, such as `{enable_thinking: false}`; they replace those of the rows. Default: as in
    training."""

    @property
    def decoding(self) -> Decoding:
        """The decoding parameters alone."""
        return Decoding(**self.model_dump(include=set(Decoding.model_fields)))


# With a host's name or address, and maybe a port and a path; no user, as its password doesn't belong in a config.
ADDRESS = r"^https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?(?:/[^\s?#@]*)?$"


class Price(Model):
    """Prices of a server, in any currency, per million tokens."""

    prompt: Annotated[float, Field(ge=0)]
    """Price of a million tokens of prompts."""
    completion: Annotated[float, Field(ge=0)]
    """Price of a million generated tokens."""


class Server(Model):
    """A server with the completions interface of OpenAI, such as vLLM, SGLang, llama.cpp or `transformers serve`. Prompts are
    sent to it."""

    url: Annotated[str, Field(pattern=ADDRESS, max_length=300)]
    """Address, such as `http://localhost:8000`."""
    model: ShortText
    """Name by which the server calls the model; one that it doesn't serve is refused."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds the server's key, sent as `Authorization: Bearer`. Default: no key."""
    price: Price | None = None
    """Prices; the cost of a job is then in its `run.json`. Requests and tokens are counted without them, too."""
    limit_requests: PositiveInt | None = None
    """Maximum number of requests of a job, repeated ones and all of its attempts included. Then it ends, and what was answered
    is kept. Default: no limit."""
    limit_cost: PositiveFloat | None = None
    """Maximum cost of a job, by `price`. A request is sent if the most that it can cost (by the bytes of its prompt and its
    `max_tokens`) is left; then the job ends, and what was answered is kept. Default: no limit."""

    @model_validator(mode="after")
    def _has_prices(self) -> Self:
        if self.limit_cost and not self.price:
            raise ValueError("limit_cost needs price: {prompt: ..., completion: ...}, per million tokens")
        return self

    @field_validator("url")
    @classmethod
    def _has_a_port(cls, url: str) -> str:
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            raise ValueError(f"found {url!r}: {error}") from None
        return url


Engine = Literal["auto", "transformers", "vllm"] | Server


class EngineChoice(Model):
    """The engine that generates, and where it is installed. An edit reruns no finished result."""

    engine: Engine = "auto"
    """`transformers` generates in the job itself. `vllm` batches continuously on GPUs: the job starts vLLM's server and ends
    it. `{url: ..., model: ...}` is a running server. `auto` is `vllm` where the job has a GPU and finds vLLM, else
    `transformers`."""
    vllm: LocalPath | None = None
    """Folder of the Python environment that has vLLM (envs/vllm.yaml), such as `/opt/vllm`. Default: the environment of the
    job."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.vllm and self.engine not in ("auto", "vllm"):
            raise ValueError("vllm names an environment, but engine is another; set engine: vllm, or remove vllm")
        return self
