"""A client of servers with the completions interface of OpenAI (vLLM, SGLang, llama.cpp, `transformers serve`).

    prompt      token ids where the server takes them, else the text, if it encodes to the same ids
    tokens      the ids that the server returns (vLLM), else the response's text is encoded
    logp        of the returned tokens (vLLM), else None

Before anything is generated, the server's model and vocabulary are compared with what the config says. What fails in a way that
may pass is tried again with back-off. A response is one answer to one request; it is never requested again once it is there.
The clients of openai and lm-eval know neither Unix sockets nor token ids in answers, and retry each request for itself.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from snaketune.config.generation import Decoding, Server
from snaketune.errors import SnaketuneError, first_line, printable
from snaketune.progress import progress
from snaketune.sampling.replies import Reply
from snaketune.sampling.responses import Request, Response, cut, first_stop, tokens_in
from snaketune.tokenization.chat import ChatTokenizer

T = TypeVar("T")
# Seconds for which arrived responses are collected, which a kill may lose.
SECONDS_PER_GROUP = 1.0
# An answer isn't streamed, so this includes its time in the server's queue.
TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
# How often a request is repeated whose answer is damaged or unfinished; it may have been paid for.
DAMAGED = 3
# Seconds until the first answer of a server.
FIRST_PATIENCE = 60.0
LOCAL = {"localhost", "127.0.0.1", "::1"}
# Statuses after which the same request may succeed.
PASSING = {408, 409, 425, 429, *range(500, 600)}
# Its tokens differ between vocabularies: several scripts, digits, code, spaces.
PROBE = "The quick brown fox: 12345.67 kg, naïve café\n\tdef f(x): return x**2  # Привет, 你好, こんにちは 🦊"
# Fields that vLLM has besides those of OpenAI, with values that change nothing, whatever the model's generation_config says.
VLLM_FIELDS = {"return_token_ids": True, "ignore_eos": True, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}


class Passing(Exception):
    """A failure of a request that may pass: no connection, a busy server. The second argument is the header `Retry-After`."""


class Damaged(Passing):
    """An answer that isn't one finished response."""


class Dialect(NamedTuple):
    """What a server understands: whether it has vLLM's fields and takes token ids, and whether it puts a token before texts."""

    vllm: bool
    ids: bool
    adds_bos: bool = False


@dataclass(kw_only=True)
class Completions:
    """A server.

    Args:
        connect: opens a client whose base URL is the server's.
        model_name: the name by which the server calls the model.
        concurrent: requests at a time.
        dialect: what the server understands; by default it is found out, and its model and vocabulary are compared.
        check_alive: raises SnaketuneError if the server can't come back, such as a process that has ended.
        patience: seconds for which requests are tried again while none succeeds.
    """

    connect: Callable[[], httpx.AsyncClient]
    model_name: str
    chat: ChatTokenizer
    decoding: Decoding
    concurrent: int = 64
    dialect: Dialect | None = None
    check_alive: Callable[[], None] = lambda: None
    patience: float = 600.0
    _said: float = -math.inf
    _failing_since: float | None = None
    # Set by a failure that doesn't pass, which ends all requests that are tried again.
    _stopped: bool = False
    # How the server calls the model in its answers; they may come from several replicas.
    _named: str | None = None
    _answered: bool = False

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        """Yield the responses to requests as they arrive.

        Raises:
            SnaketuneError: the server refuses requests, serves another model or vocabulary, or fails for longer than
                `patience`. What was answered until then, also to requests on their way, has been yielded.
        """
        requests = [request for batch in wanted for request in batch]
        # The event loop runs between two groups only; requests that are on their way go on meanwhile.
        with asyncio.Runner() as runner:
            self.client = runner.run(_opened(self.connect))
            try:
                dialect = self.dialect or runner.run(self.probe())
                arrived = self._arriving(runner, requests, dialect)
                yield from progress(arrived, "generating", "responses", len(requests), len, tokens=tokens_in)
            finally:
                runner.run(self.client.aclose())

    def _arriving(
        self, runner: asyncio.Runner, requests: Sequence[Request], dialect: Dialect
    ) -> Iterator[dict[bytes, Response]]:
        """Yield groups of responses as they arrive. After an error no request is sent; those on their way are waited for, and
        the error is raised when their responses have been yielded."""
        waiting, running = iter(requests), dict[asyncio.Task[Response], Request]()
        failure: BaseException | None = None

        async def group() -> dict[bytes, Response]:
            nonlocal failure
            finished: dict[bytes, Response] = {}
            until = time.monotonic() + SECONDS_PER_GROUP
            while time.monotonic() < until:
                while failure is None and len(running) < self.concurrent and (request := next(waiting, None)):
                    running[asyncio.create_task(self._respond(request, dialect))] = request
                if not running:
                    break
                done, _ = await asyncio.wait(running, timeout=SECONDS_PER_GROUP, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    request = running.pop(task)
                    if error := task.exception():
                        failure, self._stopped = failure or error, True
                    else:
                        finished[request.digest] = task.result()
            return finished

        while True:
            if finished := runner.run(group()):
                yield finished
            if not running:
                break
        if failure is not None:
            raise failure

    async def probe(self) -> Dialect:
        """Find out what the server understands, and compare its model and vocabulary with ours."""
        served = await self._served()
        ids = self.chat.encode_text(PROBE).ids
        refused, dialect, found = "", Dialect(False, False), None
        for attempted in (Dialect(True, True), Dialect(False, True), dialect):
            prompt = ids if attempted.ids else PROBE
            found = await self._post(self._body(prompt, attempted, max_tokens=1, seed=0))
            if isinstance(found, dict):
                # Some servers take fields that they don't know, and ignore them.
                choices = found.get("choices")
                returns_ids = isinstance(choices, list) and any(
                    isinstance(c, dict) and c.get("token_ids") for c in choices
                )
                dialect = Dialect(attempted.vllm and returns_ids, attempted.ids)
                break
            refused = found
        if not isinstance(found, dict):
            names = f"; it serves {', '.join(served)}" if served else ""
            raise SnaketuneError(f"{self.client.base_url} refuses completions of {self.model_name!r}: {refused}{names}")
        if not dialect.vllm and self.decoding.repetition_penalty != 1.0:
            raise SnaketuneError(
                f"{self.client.base_url} has no field that is known for generation.repetition_penalty; remove it, or use vLLM"
            )
        name = found.get("model")
        self._named = name if isinstance(name, str) else None
        named = str(self._named)
        # `NAME@REVISION` is how the server of transformers calls a model.
        if self.model_name not in served and not (
            named.startswith(f"{self.model_name}@") or (not served and named == self.model_name)
        ):
            raise SnaketuneError(
                f"{self.client.base_url} serves {', '.join(served) or named}, and not {self.model_name!r}; name one of them "
                "under operation.engine.model"
            )
        adds_bos, checked = await self._compare_vocabulary(ids, dialect, found)
        how = "token ids" if dialect.ids else "text"
        print(f"{self.client.base_url} takes {how}; its vocabulary, compared with ours: {checked}", flush=True)
        return dialect._replace(adds_bos=adds_bos)

    async def _compare_vocabulary(self, ids: list[int], dialect: Dialect, reply: dict[str, Any]) -> tuple[bool, str]:
        """Whether the server puts a token before texts, and how its vocabulary was compared with ours."""
        body = {"model": self.model_name, "prompt": PROBE, "content": PROBE}
        found = await self._post(body | {"add_special_tokens": False, "add_special": False}, "/tokenize")
        if isinstance(found, dict) and isinstance(found.get("tokens"), list):
            if found["tokens"] != ids:
                raise self._other_vocabulary(f"it encodes {PROBE[:20]!r}… to {found['tokens'][:8]}…, not {ids[:8]}…")
            if dialect.ids:
                return False, "equal"
        if dialect.ids:
            text_reply = await self._post(self._body(PROBE, dialect, max_tokens=1, seed=0))
            reply = text_reply if isinstance(text_reply, dict) else {}
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int):
            return False, "unknown, as it reports no number of tokens"
        if count not in (len(ids), len(ids) + 1):
            raise self._other_vocabulary(f"it encodes a text to {count} tokens, not {len(ids)}")
        return count > len(ids), "equal number of tokens"

    def _other_vocabulary(self, why: str) -> SnaketuneError:
        return SnaketuneError(
            f"{self.client.base_url}: {self.model_name} has another vocabulary than the tokenizer of this model ({why}); serve "
            "the model with its own tokenizer"
        )

    async def _respond(self, request: Request, dialect: Dialect) -> Response:
        prompt = request.prompt.tolist() if dialect.ids else self._text(request.prompt, dialect)
        seed = int.from_bytes(request.seed(self.decoding.seed)[:4], "little") >> 1
        body = self._body(prompt, dialect, max_tokens=self.decoding.max_new_tokens, seed=seed)

        async def ask() -> Response:
            return self._read(_json(await self._sent("/v1/completions", body)), request)

        return await self._tried(ask)

    def _read(self, content: dict[str, Any], request: Request) -> Response:
        """The response in an answer; raises Damaged if it isn't one finished response."""
        try:
            reply = Reply.model_validate(content)
            reply.choices[0].text.encode()
        except (ValidationError, UnicodeEncodeError) as error:
            found = printable(str(content.get("choices")))[:200]
            raise Damaged(f"it answered {found}, which isn't one finished response ({first_line(error)})") from None
        expected = self.model_name if self.dialect else self._named
        if reply.model != expected:
            raise SnaketuneError(f"{self.client.base_url} answered as {reply.model}, not as {expected}")
        count = reply.prompt_tokens
        if count is not None and count != len(request.prompt):
            raise self._other_vocabulary(f"a prompt of {len(request.prompt)} tokens has {count} there")
        (choice,) = reply.choices
        text, ended, tokens, logp = choice.text, choice.finish_reason, choice.token_ids, None
        if tokens is None:
            text = text[: first_stop(text, self.decoding.stop)]
            return Response(text, self.chat.encode_text(text).ids, ended, None)
        if len(tokens) > self.decoding.max_new_tokens or max(tokens, default=0) >= self.chat.vocab_size:
            raise Damaged(
                f"it answered {len(tokens)} tokens, up to {max(tokens, default=0)}, which can't be a response"
            )
        # Cut like the responses of other engines.
        text, length, _ = cut(tokens, self.chat.decode, self.decoding.stop)
        logps = ((choice.logprobs and choice.logprobs.token_logprobs) or [])[:length]
        known = [value for value in logps if value is not None]
        if len(known) == length:
            logp = math.fsum(known)
        return Response(text, tokens[:length], ended, logp)

    def _body(self, prompt: list[int] | str, dialect: Dialect, *, max_tokens: int, seed: int) -> dict[str, Any]:
        decoding, stops = self.decoding, list(self.decoding.stop)
        fields: dict[str, Any] = {"model": self.model_name, "prompt": prompt, "max_tokens": max_tokens}
        fields |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "seed": seed}
        if dialect.vllm:
            fields |= VLLM_FIELDS | {"stop_token_ids": list(self.chat.stop_ids), "logprobs": 0}
        else:
            stops += [self.chat.text([token]) for token in self.chat.stop_ids]
        if decoding.top_k:
            fields["top_k"] = decoding.top_k
        if decoding.repetition_penalty != 1.0:
            fields["repetition_penalty"] = decoding.repetition_penalty
        return fields | ({"stop": stops} if stops else {})

    def _text(self, prompt: np.ndarray, dialect: Dialect) -> str:
        """The text of a prompt for a server that takes no ids."""
        ids = prompt.tolist()
        text = self.chat.text(ids)
        if self.chat.encode_text(text).ids != ids:
            raise SnaketuneError(
                f"{self.client.base_url} takes no token ids, and a prompt's text has other tokens when it is encoded again "
                f"({printable(text)[:80]!r}); use a server that takes ids, such as vLLM"
            )
        if not dialect.adds_bos:
            return text
        bos = self.chat.template.variables.get("bos_token")
        if not bos or not text.startswith(bos):
            raise SnaketuneError(
                f"{self.client.base_url} takes no token ids and puts a token before each text, which the chat template doesn't "
                "write; use a server that takes ids, such as vLLM"
            )
        return text.removeprefix(bos)

    async def _served(self) -> list[str]:
        """The names of the models that the server lists; empty if it can't."""

        async def ask() -> httpx.Response:
            try:
                return await self.client.get("/v1/models")
            except httpx.TransportError as error:
                raise _passing(error) from None

        try:
            listed = (await self._tried(ask)).json()["data"]
            return [str(entry["id"]) for entry in listed]
        except (ValueError, LookupError, TypeError):
            return []

    async def _post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any] | str:
        """The answer to a request; if the server refuses it, why."""

        async def send() -> dict[str, Any] | str:
            reply = await self._sent(path, body)
            return printable(reply.text)[:300] if 400 <= reply.status_code < 500 else _json(reply)

        return await self._tried(send)

    async def _sent(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            reply = await self.client.post(path, json=body)
        except httpx.TransportError as error:
            raise _passing(error) from None
        if reply.status_code in PASSING:
            raise Passing(
                f"status {reply.status_code}: {printable(reply.text)[:200]}", reply.headers.get("retry-after")
            )
        if reply.status_code in (401, 403):
            raise SnaketuneError(
                f"{self.client.base_url} refuses the key: {printable(reply.text)[:200]}; name the environment variable that "
                "holds it under operation.engine.key_variable"
            )
        return reply

    async def _tried(self, action: Callable[[], Awaitable[T]]) -> T:
        """The result of `action`, which is repeated while it fails in a way that may pass."""
        try:
            result = await AsyncRetrying(
                retry=retry_if_exception_type(Passing),
                wait=_wait,
                stop=self._ends,
                before_sleep=self._say,
                reraise=True,
            )(action)
        except Passing as failure:
            raise SnaketuneError(
                f"{self.client.base_url} failed for {self._patience:g} s, or damaged an answer {DAMAGED} times, last with "
                f"{failure.args[0]}; run again to resume: finished responses are kept"
            ) from None
        self._failing_since, self._answered = None, True
        return result

    @property
    def _patience(self) -> float:
        """A server that never answered isn't one that is busy."""
        return self.patience if self._answered else min(self.patience, FIRST_PATIENCE)

    def _ends(self, state: RetryCallState) -> bool:
        """Whether a request isn't tried again."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        damaged = state.outcome and isinstance(state.outcome.exception(), Damaged)
        return (
            self._stopped
            or now - self._failing_since > self._patience
            or bool(damaged and state.attempt_number >= DAMAGED)
        )

    def _say(self, state: RetryCallState) -> None:
        self.check_alive()
        failure = state.outcome.exception().args[0] if state.outcome else ""
        # Of many requests that fail for one reason, one line every few seconds.
        if time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            print(f"{self.client.base_url}: {failure}; trying again", flush=True)


def _wait(state: RetryCallState) -> float:
    """Seconds until the next attempt: what the server asks for, else up to half a minute, random."""
    failure = state.outcome.exception() if state.outcome else None
    asked = failure.args[1] if failure and len(failure.args) > 1 else None
    random = wait_random_exponential(multiplier=0.5, max=30)(state)
    return min(float(asked), 60.0) + random if asked and str(asked).isdecimal() else random


def _json(reply: httpx.Response) -> dict[str, Any]:
    if reply.status_code != 200:
        moved = f" (to {printable(reply.headers['location'])[:200]})" if reply.is_redirect else ""
        raise SnaketuneError(
            f"{reply.request.url} refuses a request, status {reply.status_code}{moved}: {printable(reply.text)[:300]}"
        )
    try:
        value = reply.json()
    except ValueError:
        raise Damaged(f"it answered {printable(reply.text)[:80]!r}, which is no complete JSON") from None
    if not isinstance(value, dict):
        raise Damaged(f"it answered {printable(reply.text)[:80]!r}, which is no JSON object")
    return value


async def _opened(connect: Callable[[], httpx.AsyncClient]) -> httpx.AsyncClient:
    return connect()


def _passing(error: httpx.TransportError) -> Exception:
    """The failure of a connection; one of the address itself doesn't pass."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return SnaketuneError(f"operation.engine.url: {type(error).__name__}")
    return Passing(f"{type(error).__name__}: {error}")


def connection(server: Server) -> Callable[[], httpx.AsyncClient]:
    """What connects to the server of a config; SnaketuneError if the variable of its key isn't set, or holds no key.

    Proxies of the environment are used, but not for this machine.
    """
    try:
        # `/v1` is part of the paths of the interface, and of the address for many programs.
        url = httpx.URL(server.url.rstrip("/").removesuffix("/v1"))
        local = url.host in LOCAL
    except (httpx.InvalidURL, UnicodeError) as error:
        raise SnaketuneError(f"operation.engine.url: {server.url!r} is no address: {first_line(error)}") from None
    headers = {}
    if server.key_variable:
        key = os.environ.get(server.key_variable, "").strip()
        if not key:
            raise SnaketuneError(f"operation.engine.key_variable: the environment has no {server.key_variable}")
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise SnaketuneError(f"operation.engine.key_variable: what {server.key_variable} holds is no key")
        headers["Authorization"] = f"Bearer {key}"
    return lambda: httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=TIMEOUT,
        limits=httpx.Limits(),
        trust_env=not local,
    )
