"""A client of HTTP servers that answer many requests: with retries, limits, and nothing lost of what arrived.

What fails in a way that may pass is tried again with back-off. Each request has one answer; it is never sent again once its
answer is there. Requests and tokens are counted, and bounded if the config says so (`usage`).
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from snaketune.config.generation import Server
from snaketune.errors import SnaketuneError, first_line, printable
from snaketune.servers.usage import Usage

K = TypeVar("K")
V = TypeVar("V")
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


class Passing(Exception):
    """A failure of a request that may pass: no connection, a busy server. The second argument is the header `Retry-After`."""


class Damaged(Passing):
    """An answer that isn't one finished response."""


class DamagedAnswer(SnaketuneError):
    """An answer that was damaged each time that it was asked for."""


@dataclass(kw_only=True)
class ServerClient(Generic[K, V]):
    """Sends requests to a server.

    Args:
        connect: opens a client whose base URL is the server's.
        usage: counts requests and tokens.
        concurrent: requests at a time.
        check_alive: raises SnaketuneError if the server can't come back, such as a process that has ended.
        patience: seconds for which requests are tried again while none succeeds.
    """

    connect: Callable[[], httpx.AsyncClient]
    usage: Usage = field(default_factory=Usage)
    concurrent: int = 64
    check_alive: Callable[[], None] = lambda: None
    patience: float = 600.0
    _said: float = -math.inf
    _failing_since: float | None = None
    # Set by a failure that doesn't pass, which ends all requests that are tried again.
    _stopped: bool = False
    _answered: bool = False

    def answers(
        self, requests: Sequence[K], respond: Callable[[K], Awaitable[V]], prepare: Callable[[], Awaitable[None]]
    ) -> Iterator[list[tuple[K, V]]]:
        """Yield requests with their answers as they arrive, in groups.

        Args:
            prepare: is waited for before the first request.
        Raises:
            SnaketuneError: the server refuses requests, fails for longer than `patience`, or a limit is reached. What was
                answered until then, also to requests on their way, has been yielded.
        """
        # The event loop runs between two groups only; requests that are on their way go on meanwhile.
        with asyncio.Runner() as runner:
            self.client = runner.run(_opened(self.connect))
            try:
                runner.run(_awaited(prepare))
                yield from self._arriving(runner, requests, respond)
            finally:
                runner.run(self.client.aclose())

    def _arriving(
        self, runner: asyncio.Runner, requests: Sequence[K], respond: Callable[[K], Awaitable[V]]
    ) -> Iterator[list[tuple[K, V]]]:
        """Yield groups of answers as they arrive. After an error no request is sent; those on their way are waited for, and
        the error is raised when their answers have been yielded."""
        waiting, running = iter(requests), dict[asyncio.Task[V], K]()
        failure: BaseException | None = None
        interrupted = False

        async def group() -> list[tuple[K, V]]:
            nonlocal failure, interrupted
            finished: list[tuple[K, V]] = []
            until = time.monotonic() + SECONDS_PER_GROUP
            while time.monotonic() < until:
                while failure is None and len(running) < self.concurrent and (request := next(waiting, None)):
                    running[asyncio.ensure_future(respond(request))] = request
                if not running:
                    break
                try:
                    done, _ = await asyncio.wait(
                        running, timeout=SECONDS_PER_GROUP, return_when=asyncio.FIRST_COMPLETED
                    )
                except asyncio.CancelledError:
                    # Ctrl-C; answers that have arrived are yielded first.
                    interrupted = True
                    break
                for task in done:
                    request = running.pop(task)
                    if error := task.exception():
                        failure, self._stopped = failure or error, True
                    else:
                        finished.append((request, task.result()))
            return finished

        while True:
            finished = runner.run(group())
            self.usage.save()
            if finished:
                yield finished
            if interrupted:
                raise KeyboardInterrupt
            if not running:
                break
        if failure is not None:
            raise failure

    async def post(self, body: dict[str, Any], path: str) -> dict[str, Any] | str:
        """The answer to a request; if the server refuses it, why."""

        async def send() -> dict[str, Any] | str:
            reply = await self.sent(path, body)
            return self.printable_text(reply) if 400 <= reply.status_code < 500 else self.json(reply)

        return await self.tried(send)

    async def get(self, path: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            try:
                return await self.client.get(path)
            except httpx.TransportError as error:
                raise _passing(error) from None

        return await self.tried(ask)

    async def sent(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The reply to a request, whose tokens are counted. Raises Passing for a failure that may pass."""
        reserved = await self.usage.reserve(body)
        try:
            reply = await self.client.post(path, json=body)
            if reply.status_code == 200:
                self.usage.count(_usage_of(reply))
        except httpx.DecodingError as error:
            raise Damaged(f"its answer can't be decoded ({first_line(error)})") from None
        except httpx.TransportError as error:
            raise _passing(error) from None
        finally:
            self.usage.release(reserved)
        if reply.status_code in PASSING:
            raise Passing(f"status {reply.status_code}: {self.printable_text(reply)}", reply.headers.get("retry-after"))
        if reply.status_code in (401, 403):
            raise SnaketuneError(
                f"{self.client.base_url} refuses the key: {self.printable_text(reply)}; name the environment variable that "
                "holds it under key_variable of this server"
            )
        return reply

    def printable_text(self, reply: httpx.Response) -> str:
        """The beginning of a reply's text, with the key masked, which some servers repeat."""
        key = self.client.headers.get("authorization", "").removeprefix("Bearer ")
        return printable(reply.text.replace(key, "***") if key else reply.text)[:300]

    async def tried(self, action: Callable[[], Awaitable[T]]) -> T:
        """The result of `action`, which is repeated while it fails in a way that may pass."""
        try:
            result = await AsyncRetrying(
                retry=retry_if_exception_type(Passing),
                wait=_wait,
                stop=self._ends,
                before_sleep=self._say,
                reraise=True,
            )(action)
        except Damaged as failure:
            raise DamagedAnswer(
                f"{self.client.base_url} damaged an answer {DAMAGED} times, last: {failure.args[0]}; run again to resume: "
                "finished responses are kept"
            ) from None
        except Passing as failure:
            raise SnaketuneError(
                f"{self.client.base_url} failed for {self._patience:g} s, last with {failure.args[0]}; run again to resume: "
                "finished responses are kept"
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

    def json(self, reply: httpx.Response) -> dict[str, Any]:
        """The object in a reply, whose tokens are counted. SnaketuneError: the server refuses the request; Damaged: it isn't
        one."""
        if reply.status_code != 200:
            moved = f" (to {printable(reply.headers['location'])[:200]})" if reply.is_redirect else ""
            raise SnaketuneError(
                f"{reply.request.url} refuses a request, status {reply.status_code}{moved}: {self.printable_text(reply)}"
            )
        try:
            value = reply.json()
        except (ValueError, RecursionError):
            raise Damaged(f"it answered {self.printable_text(reply)[:80]!r}, which is no complete JSON") from None
        if not isinstance(value, dict):
            raise Damaged(f"it answered {self.printable_text(reply)[:80]!r}, which is no JSON object")
        return value


def _usage_of(reply: httpx.Response) -> Any:
    try:
        value = reply.json()
    except (ValueError, RecursionError):
        return None
    return value.get("usage") if isinstance(value, dict) else None


def _wait(state: RetryCallState) -> float:
    """Seconds until the next attempt: what the server asks for, else up to half a minute, random."""
    failure = state.outcome.exception() if state.outcome else None
    asked = failure.args[1] if failure and len(failure.args) > 1 else None
    random = wait_random_exponential(multiplier=0.5, max=30)(state)
    return min(float(asked), 60.0) + random if asked and str(asked).isdecimal() else random


async def _opened(connect: Callable[[], httpx.AsyncClient]) -> httpx.AsyncClient:
    return connect()


async def _awaited(action: Callable[[], Awaitable[V]]) -> V:
    return await action()


def _passing(error: httpx.TransportError) -> Exception:
    """The failure of a connection; one of the address itself doesn't pass."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return SnaketuneError(f"operation.engine.url: {type(error).__name__}")
    return Passing(f"{type(error).__name__}: {error}")


def connection(server: Server, where: str = "operation.engine") -> Callable[[], httpx.AsyncClient]:
    """What connects to the server of a config; SnaketuneError if the variable of its key isn't set, or holds no key.

    Proxies of the environment are used, but not for this machine.
    """
    try:
        # `/v1` is part of the paths of the interface, and of the address for many programs.
        url = httpx.URL(server.url.rstrip("/").removesuffix("/v1"))
        local = url.host in LOCAL
    except (httpx.InvalidURL, UnicodeError) as error:
        raise SnaketuneError(f"{where}.url: {server.url!r} is no address: {first_line(error)}") from None
    headers = {}
    if server.key_variable:
        key = os.environ.get(server.key_variable, "").strip()
        if not key:
            raise SnaketuneError(f"{where}.key_variable: the environment has no {server.key_variable}")
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise SnaketuneError(f"{where}.key_variable: what {server.key_variable} holds is no key")
        headers["Authorization"] = f"Bearer {key}"
    return lambda: httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=TIMEOUT,
        limits=httpx.Limits(),
        trust_env=not local,
    )
