"""The order of rows, a function of seed and epoch alone or that of the rows, independent of the number of GPUs and of resumes;
and prefetch: a thread collates batches, pins them and copies them to the GPU before the step that uses them.

Receiving a batch from a worker process costs several times the 0.2 to 0.4 ms of collating it (docs/LOG.md), and a thread
inherits no locks and outlives no training. On the CPU it would compete with the training, so there batches aren't prefetched.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from snaketune.engine.packing.epoch_order import epoch_order

# Prefetched batches occupy GPU memory.
MAX_PREFETCHED = 32


class EpochPermutation(torch.utils.data.Sampler[int]):
    """A sampler that yields every item once per epoch, in an order that depends on seed and epoch alone, or as they lie.

    The end of an epoch is filled with the index `items`, a blank item, so that all processes take equally many batches and no
    row is repeated because of the number of GPUs.

    >>> list(EpochPermutation(5, seed=0, multiple=4))
    [2, 4, 3, 0, 1, 5, 5, 5]
    """

    def __init__(
        self,
        items: int,
        seed: int,
        multiple: int = 1,
        *,
        shuffled: bool = True,
        weights: np.ndarray | None = None,
        batch: int = 1,
    ):
        """
        Args:
            multiple: the length of an epoch, blank items included, is a multiple of this.
            shuffled: whether the order is random; else every epoch begins with item 0.
            weights, batch: weights of the items, and items per step, to balance the weight of steps: see `epoch_order`.
        """
        self.items, self.seed, self.epoch = items, seed, 0
        self.shuffled, self.weights, self.batch = shuffled, weights, batch
        self.blanks = -items % multiple

    def __len__(self) -> int:
        return self.items + self.blanks

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.items)
        if self.shuffled:
            order = epoch_order(self.items, self.seed, self.epoch, weights=self.weights, batch=self.batch)
        return iter(order.tolist() + [self.items] * self.blanks)


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


def overlaps(device: torch.device) -> bool:
    """Whether a device computes asynchronously to the host."""
    return device.type == "cuda"
