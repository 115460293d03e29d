"""What requests to a server cost: counted, priced, and bounded."""

from dataclasses import dataclass
from typing import Any

from snaketune.config.generation import Server
from snaketune.errors import SnaketuneError

TOKENS_PER_PRICE = 1e6


@dataclass(kw_only=True)
class Usage:
    """Requests of one attempt of a job, repeated ones included, and the tokens that the server reports.

    Args:
        server: with prices and limits, if it has any.
    """

    server: Server | None = None
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _largest: float = 0.0

    @property
    def cost(self) -> float | None:
        price = self.server and self.server.price
        if price is None:
            return None
        return (self.prompt_tokens * price.prompt + self.completion_tokens * price.completion) / TOKENS_PER_PRICE

    def check(self) -> None:
        """Raise SnaketuneError if a limit doesn't allow another request."""
        if self.server is None:
            return
        kept = "; what was answered is kept. To go on, raise it and run again"
        if self.server.limit_requests is not None and self.requests >= self.server.limit_requests:
            raise SnaketuneError(f"limit_requests: {self.requests} requests were sent to {self.server.url}{kept}")
        if self.server.limit_cost is not None and self.cost is not None and self.cost >= self.server.limit_cost:
            raise SnaketuneError(
                f"limit_cost: the answers of {self.server.url} cost {self.cost:.4g}, of {self.server.limit_cost:g}{kept}"
            )

    def allows(self, running: int) -> bool:
        """Whether a request may be sent beside `running` others: with a limit of the cost, only what the largest cost of a
        request so far leaves room for, and until one is known a single request."""
        if self.server is None or self.server.limit_cost is None or not running:
            return True
        return self._largest > 0 and (self.cost or 0) + (running + 1) * self._largest <= self.server.limit_cost

    def count(self, reported: Any) -> None:
        """Add what a server reports of one request: the field `usage`."""
        if isinstance(reported, dict):
            before = self.cost or 0.0
            for name in ("prompt_tokens", "completion_tokens"):
                value = reported.get(name)
                if isinstance(value, int) and value > 0:
                    setattr(self, name, getattr(self, name) + value)
            self._largest = max(self._largest, (self.cost or 0.0) - before)

    def about(self) -> dict[str, Any]:
        """For run.json."""
        found: dict[str, Any] = {"requests": self.requests}
        found |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return found | ({} if self.cost is None else {"cost": round(self.cost, 6)})
