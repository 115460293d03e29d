"""Prefetch: a thread collates batches, pins them and copies them to the GPU before the step that uses them.

Receiving a batch from a worker process costs several times the 0.2 to 0.4 ms of collating it (docs/LOG.md), and a thread
inherits no locks and outlives no training. On the CPU it would compete with the training, so there batches aren't prefetched.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Prefetched batches occupy GPU memory.
MAX_PREFETCHED = 32


class Prefetcher(Iterator[Any]):
    """An iterator over `source` that a thread keeps up to `depth` items ahead, in the same order.

    An exception of `source` is raised here, after the items before it.
    """

    def __init__(self, source: Iterator[Any], depth: int, device: torch.device):
        self.source, self.ended = source, None
        # The current GPU is a setting of each thread.
        gpu = (torch.cuda.set_device, (torch.cuda.current_device(),)) if device.type == "cuda" else (None, ())
        self.thread = ThreadPoolExecutor(1, "batches", *gpu)
        # One of them is being collated.
        self.coming = deque(self.thread.submit(next, source) for _ in range(1 + min(depth, MAX_PREFETCHED)))

    def __next__(self) -> Any:
        if self.ended is None:
            self.coming.append(self.thread.submit(next, self.source))
            try:
                return self.coming.popleft().result()
            except BaseException as error:
                self.ended = error
                self.close()
        raise self.ended

    def close(self) -> None:
        """Stop the thread and wait for it; it finishes the batch that it collates."""
        self.thread.shutdown(cancel_futures=True)


class PrefetchMixin:
    """Mixin for transformers' Trainer: on a GPU its batches are prefetched and copied asynchronously."""

    prefetcher: Prefetcher | None = None

    def prefetched(self, epoch_iterator: Iterator[Any], device: torch.device) -> Iterator[Any]:
        """The batches of an epoch. At least a whole step is prefetched: the Trainer takes all its batches before the first."""
        if not overlaps(device):
            return epoch_iterator
        if self.prefetcher is None or self.prefetcher.source is not epoch_iterator:
            self.stop_prefetch()
            self.prefetcher = Prefetcher(epoch_iterator, max(2, self.args.gradient_accumulation_steps), device)
        return self.prefetcher

    def stop_prefetch(self) -> None:
        """Stop the thread, at the end of an epoch or of the training; also after an error."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None


def overlaps(device: torch.device) -> bool:
    """Whether a device computes asynchronously to the host."""
    return device.type == "cuda"
