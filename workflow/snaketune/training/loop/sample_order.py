"""The order in which a training sees its items: by seed and epoch alone, on however many GPUs, and where it was resumed."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import TrainerCallback

from snaketune.packing.epoch_order import epoch_order


class EpochPermutation(torch.utils.data.Sampler[int]):
    """Every item once per epoch, in an order that depends on seed and epoch alone.

    Processes that train together take equally many batches. What lacks for that at the end of an epoch is filled up with the
    index `items`, which stands for a blank item: no row comes twice because there are more GPUs.

    >>> sampler = EpochPermutation(5, seed=0, multiple=4)
    >>> list(sampler)
    [2, 4, 3, 0, 1, 5, 5, 5]
    """

    def __init__(self, items: int, seed: int, multiple: int = 1, *, weights: np.ndarray | None = None, batch: int = 1):
        """
        Args:
            multiple: of how many items an epoch is to be, blank ones counted.
            weights, batch: of items and of a step, where steps are to be of equal weight: see `epoch_order`.
        """
        self.items, self.seed, self.epoch = items, seed, 0
        self.weights, self.batch = weights, batch
        self.blanks = -items % multiple

    def __len__(self) -> int:
        return self.items + self.blanks

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of each epoch."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.items, self.seed, self.epoch, weights=self.weights, batch=self.batch)
        return iter(order.tolist() + [self.items] * self.blanks)


class OwnOrder:
    """Mixed into a transformers Trainer: its rows come as EpochPermutation has them, also after a resume."""

    def items_of_an_epoch(self) -> int:
        """Items of the training set, a blank one after them not counted."""
        return len(self.train_dataset)

    def item_weights(self) -> np.ndarray | None:
        """int64[items], of which each step is to have its share; None if that is all the same."""
        return None

    def _get_train_sampler(self, train_dataset=None):
        world = self.args.world_size
        together = self.args.per_device_train_batch_size * world
        self.order = EpochPermutation(
            self.items_of_an_epoch(),
            self.args.seed,
            together if world > 1 else 1,
            weights=self.item_weights(),
            batch=together * self.args.gradient_accumulation_steps,
        )
        return self.order


class SetEpoch(TrainerCallback):
    """Tells the order which epoch begins.

    The Trainer does so too, but where it skips what was done before a resume, only the wrapper that skips hears of it.
    """

    def __init__(self, trainer: OwnOrder):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **_):
        """Called by the Trainer."""
        self.trainer.order.set_epoch(int(state.epoch))
