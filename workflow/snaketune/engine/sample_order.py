"""Sample order: a function of seed and epoch alone, or that of the rows; independent of the number of GPUs and of resumes."""

from collections.abc import Iterator

import numpy as np
import torch

from snaketune.engine.packing.epoch_order import epoch_order


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


class SampleOrderMixin:
    """Mixin for transformers' Trainer: rows come in the order of EpochPermutation, also after a resume."""

    def items_per_epoch(self) -> int:
        """Without a blank item at the end of the training set."""
        return len(self.train_dataset)

    def item_weights(self) -> np.ndarray | None:
        """Weights that are balanced over the steps, int64[items]; None to leave steps unbalanced."""
        return None

    def _get_train_sampler(self, train_dataset=None):
        args, processes = self.args, self.args.world_size
        per_micro_step = args.per_device_train_batch_size * processes
        self.order = EpochPermutation(
            self.items_per_epoch(),
            args.seed,
            per_micro_step if processes > 1 else 1,
            shuffled=self.rows.order == "shuffled",
            weights=self.item_weights(),
            batch=per_micro_step * args.gradient_accumulation_steps,
        )
        return self.order

    def on_epoch_begin(self, args, state, control, **_):
        """Set the epoch of the order: in a resumed epoch the Trainer informs only the wrapper that skips batches."""
        self.order.set_epoch(state.epoch)
