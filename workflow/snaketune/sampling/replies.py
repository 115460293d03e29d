"""What is read of a server's answers, typed: everything else in them is ignored, and an answer that doesn't fit is damaged."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt


class Logprobs(BaseModel):
    token_logprobs: list[FiniteFloat | None] | None = None


class Choice(BaseModel):
    """A response: its text, and from vLLM its token ids and their log-probabilities in nats."""

    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: list[NonNegativeInt] | None = None
    logprobs: Logprobs | None = None


class Usage(BaseModel):
    prompt_tokens: NonNegativeInt | None = None


class Reply(BaseModel):
    """An answer to a request for one response."""

    model: str | None = None
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    usage: Usage | None = None

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage and self.usage.prompt_tokens


class Message(BaseModel):
    content: str | None = None


class ChatChoice(BaseModel):
    message: Message
    finish_reason: str | None = None


class ChatReply(BaseModel):
    """An answer to a request for one turn of a chat."""

    choices: Annotated[list[ChatChoice], Field(min_length=1, max_length=1)]
