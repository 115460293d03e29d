"""Batches are ready before the step that takes them: collated, pinned and sent to the GPU by a thread of the training.

A thread and no worker process: a batch is little work (0.2 to 0.4 ms), and to receive one from another process costs the
training several times as much as to make it (docs/LOG.md). Nothing is forked, so nothing inherits locks or outlives the
training, and what goes wrong is raised where the batch was asked for. On the CPU batches are made when they are asked for: a
thread would take the core from the training.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from snaketune.models.batches import Batch

# Batches lie on the GPU while they wait.
MOST_AHEAD = 32
SECONDS_BETWEEN_LOOKS = 0.1


class Ahead(Iterator[Any]):
    """What `source` gives, in its order, taken from it by a thread that stays up to `depth` items ahead.

    What `source` raises is raised here, after the items before it.
    """

    def __init__(self, source: Iterator[Any], depth: int, device: torch.device):
        self.source = source
        # Every thread has its own.
        self.gpu = torch.cuda.current_device() if device.type == "cuda" else None
        self.ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(min(depth, MOST_AHEAD))
        self.closed = threading.Event()
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def __next__(self) -> Any:
        if self.ended is None:
            item, self.ended = self.ready.get()
            if self.ended is None:
                return item
        raise self.ended

    def close(self) -> None:
        """End the thread, which may be in the middle of a batch, and wait for it."""
        self.closed.set()
        self.thread.join()

    def _work(self) -> None:
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        end: BaseException | None = None
        while end is None and not self.closed.is_set():
            item = None
            try:
                item = next(self.source)
            except BaseException as error:
                end = error
            self._put(item, end)

    def _put(self, item: Any, end: BaseException | None) -> None:
        while not self.closed.is_set():
            with suppress(queue.Full):
                self.ready.put((item, end), timeout=SECONDS_BETWEEN_LOOKS)
                return


class TakesAhead:
    """Mixed into a transformers Trainer: its batches are taken `Ahead` on a GPU, and copied there without waiting."""

    ahead: Ahead | None = None

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        collate = self.data_collator
        self.data_collator = lambda items: Batch(collate(items))

    def taken_ahead(self, epoch_iterator: Iterator[Any], device: torch.device) -> Iterator[Any]:
        """The batches of an epoch, of which the Trainer takes those of a step before it computes the first."""
        if not overlaps(device):
            return epoch_iterator
        if self.ahead is None or self.ahead.source is not epoch_iterator:
            self.stop_ahead()
            self.ahead = Ahead(epoch_iterator, max(2, self.args.gradient_accumulation_steps), device)
        return self.ahead

    def stop_ahead(self) -> None:
        """At the end of an epoch or of the training, however it ends."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None


def overlaps(device: torch.device) -> bool:
    """Whether a device computes while the host does something else."""
    return device.type == "cuda"
