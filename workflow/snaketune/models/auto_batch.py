"""Automatic batch size of forward passes without gradients.

On a GPU, each batch size is timed for a few passes and doubled as long as throughput grows; when memory runs out, it is halved.
On a CPU, larger batches gain nothing (they outgrow its caches), so the size is constant, which makes an interrupted pass sum
exactly as an uninterrupted one.
"""

import torch

# Tokens of the first batches, by device: enough to keep a GPU busy.
FORWARD_TOKENS = {"cuda": 32768}
FORWARD_TOKENS_ELSEWHERE = 8192
# Minimum relative gain in throughput for a doubled batch size to be retained.
GAIN = 0.02
# Timed passes of each size; the first of them allocates memory and isn't counted.
PASSES = 3


class AutoBatch:
    """Batch size in rows (`rows`), adjusted to throughput and memory."""

    def __init__(self, row_length: int, device: torch.device, grows: bool | None = None):
        """Args: grows: whether to try larger batches; default: on a GPU only."""
        tokens = FORWARD_TOKENS.get(device.type, FORWARD_TOKENS_ELSEWHERE)
        self.rows = max(1, tokens // row_length)
        self.grows = device.type == "cuda" if grows is None else grows
        self.rate = 0.0
        self._passes: list[tuple[int, float]] = []

    def record(self, tokens: int, seconds: float) -> None:
        """Record a forward pass over a full batch, and adjust `rows`.

        >>> search = AutoBatch(1024, torch.device("cpu"), grows=True)
        >>> for rows, seconds in ((8, 4.0), (8, 2.0), (8, 2.0), *[(16, 3.0)] * 3, *[(32, 6.0)] * 3):
        ...     assert search.rows == rows
        ...     search.record(rows * 1024, seconds)
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

    def halve(self) -> None:
        """Halve the batch size after an out-of-memory error, and stop growing."""
        self.rows //= 2
        self.grows = False
