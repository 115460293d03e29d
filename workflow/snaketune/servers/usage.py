"""What requests to a server cost: counted over all attempts of a job, priced, and bounded."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.config.generation import Server
from snaketune.errors import SnaketuneError
from snaketune.files import write_json

TOKENS_PER_PRICE = 1e6
# No request has more; a server that reports more is wrong.
MOST_TOKENS = 10**9
COUNTED = ("requests", "prompt_tokens", "completion_tokens")
SECONDS_BETWEEN_TRIES = 0.02
KEPT = "what was answered is kept. To go on, raise it and run again"


@dataclass(kw_only=True)
class Usage:
    """Requests of a job, repeated ones and those of earlier attempts included, and the tokens that the server reports.

    Args:
        server: with prices and limits, if it has any.
        path: where the numbers are kept between attempts.
    """

    server: Server | None = None
    path: Path | None = None
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _reserved: float = 0.0
    _running: int = 0
    # Whether the server reports tokens; None until its first answer, which a limit of the cost waits for.
    _reports: bool | None = None

    @classmethod
    def of(cls, server: Server, path: Path) -> "Usage":
        """The usage of a job so far."""
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(server=server, path=path, **{name: kept[name] for name in COUNTED if name in kept})

    @property
    def cost(self) -> float | None:
        price = self.server and self.server.price
        if price is None:
            return None
        return (self.prompt_tokens * price.prompt + self.completion_tokens * price.completion) / TOKENS_PER_PRICE

    async def reserve(self, body: dict[str, Any]) -> float:
        """Count a request, as soon as the limits allow it; the cost that is reserved for it, the most that it can be.

        Raises:
            SnaketuneError: a limit doesn't allow it.
        """
        server = self.server
        if server is None:
            self.requests += 1
            self._running += 1
            return 0.0
        most = 0.0
        if server.limit_cost is not None and server.price is not None:
            # A token has at least one byte.
            prompt = len(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
            most = (
                prompt * server.price.prompt + body.get("max_tokens", 0) * server.price.completion
            ) / TOKENS_PER_PRICE
            while self._running and self._reports is None:
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)
            if self._reports is False:
                raise SnaketuneError(f"limit_cost: {server.url} reports no tokens, so it can't be held; remove it")
            while (self.cost or 0.0) + self._reserved + most > server.limit_cost:
                if not self._running:
                    raise SnaketuneError(
                        f"limit_cost: {self.cost:.4g} of {server.limit_cost:g} is spent at {server.url}, and the next "
                        f"request may cost {most:.4g}; {KEPT}"
                    )
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)
        # Last, as others are counted while this one waits.
        if server.limit_requests is not None and self.requests >= server.limit_requests:
            raise SnaketuneError(f"limit_requests: {self.requests} requests were sent to {server.url}; {KEPT}")
        self.requests += 1
        self._running += 1
        self._reserved += most
        return most

    def release(self, reserved: float) -> None:
        """Give back what was reserved for a request that has ended."""
        self._running -= 1
        # Not by subtraction alone, which leaves a rest.
        self._reserved = self._reserved - reserved if self._running else 0.0

    def count(self, reported: Any) -> None:
        """Add what a server reports of one request: the field `usage`."""
        tokens = {name: reported.get(name) for name in COUNTED[1:]} if isinstance(reported, dict) else {}
        for name, value in tokens.items():
            if isinstance(value, int) and 0 < value < MOST_TOKENS:
                setattr(self, name, getattr(self, name) + value)
        self._reports = isinstance(tokens.get("prompt_tokens"), int)

    def save(self) -> None:
        if self.path:
            write_json(self.path, {name: getattr(self, name) for name in COUNTED})

    def about(self) -> dict[str, Any]:
        """For run.json."""
        found: dict[str, Any] = {name: getattr(self, name) for name in COUNTED}
        return found | ({} if self.cost is None else {"cost": round(self.cost, 6)})
