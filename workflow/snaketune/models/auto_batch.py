"""How many rows a forward pass without gradients takes at once: found while it computes.

On a GPU each size is timed for some passes and then doubled, as long as that makes it faster; where memory runs out, half as
many. On a CPU larger batches gain nothing (they outgrow its caches), and rows are always taken as many at once, so that a pass
that is interrupted sums exactly as one that isn't.
"""

import torch

# Tokens of a forward pass to begin with: on a GPU enough to be busy.
FORWARD_TOKENS = {"cuda": 32768}
FORWARD_TOKENS_ELSEWHERE = 8192
# What a doubling must gain to be kept.
GAIN = 0.02
# The first pass of a size isn't counted: it allocates.
PASSES = 3


class AtOnce:
    """Rows at once, now: `rows`."""

    def __init__(self, row_length: int, device: torch.device, grows: bool | None = None):
        """Args: grows: default: on a GPU."""
        tokens = FORWARD_TOKENS.get(device.type, FORWARD_TOKENS_ELSEWHERE)
        self.rows = max(1, tokens // row_length)
        self.grows = device.type == "cuda" if grows is None else grows
        self.rate = 0.0
        self._passes: list[tuple[int, float]] = []

    def passed(self, tokens: int, seconds: float) -> None:
        """Note a pass of as many rows as wanted.

        >>> search = AtOnce(1024, torch.device("cpu"), grows=True)
        >>> for rows, seconds in ((8, 4.0), (8, 2.0), (8, 2.0), *[(16, 3.0)] * 3, *[(32, 6.0)] * 3):
        ...     assert search.rows == rows
        ...     search.passed(rows * 1024, seconds)
        >>> search.rows, search.grows
        (16, False)
        """
        self._passes.append((tokens, seconds))
        if not self.grows or len(self._passes) < PASSES:
            return
        counted = self._passes[1:]
        rate = sum(tokens for tokens, _ in counted) / max(sum(seconds for _, seconds in counted), 1e-9)
        faster = rate > (1 + GAIN) * self.rate
        self.rows, self.rate, self._passes = (self.rows * 2, rate, []) if faster else (self.rows // 2, self.rate, [])
        self.grows = faster

    def ran_out(self) -> None:
        """Half as many from here on."""
        self.rows //= 2
        self.grows = False
