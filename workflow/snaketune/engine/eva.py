"""Initial adapters from the layers' inputs: EVA (Paischer et al., 2024), by peft."""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from peft import PeftModel, initialize_lora_eva_weights

from snaketune.engine.model.batches import Batch, collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_logits
from snaketune.engine.packing.epoch_order import epoch_order
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED
from snaketune.errors import SnaketuneError

# Documents that are read, one by one so that layers see no padding and no batch size shapes the result; and how often each is
# read at most before the directions have converged.
MOST_DOCUMENTS, MOST_PASSES = 512, 4
SECONDS_BETWEEN_LINES = 30.0


def initialize_by_eva(model: PeftModel, rows: PackedRows, compute: Compute, seed: int) -> None:
    """Set each adapter's first matrix to the main directions of its layer's inputs, on documents in the first epoch's order.

    Of documents that share prefixes, such as pairs, the shared part is read.

    Raises:
        SnaketuneError: all documents are shorter than the rank, or the directions don't converge.
    """
    config, started = model.peft_config["default"], time.monotonic()
    passes, printed, targets = 0, started, config.target_modules
    documents = [
        document
        for row in epoch_order(len(rows), seed, 0)[:MOST_DOCUMENTS].tolist()
        for document in _documents(rows[row])
        if len(document["input_ids"]) >= config.r
    ][:MOST_DOCUMENTS]
    if not documents:
        raise SnaketuneError(f"lora.init_lora_weights: eva needs documents of lora.rank {config.r} tokens or more")

    def forward(model: torch.nn.Module, batch: dict[str, Any]) -> None:
        nonlocal passes, printed
        passes += 1
        if passes > MOST_PASSES * len(documents):
            raise SnaketuneError(
                f"lora.init_lora_weights: eva's {config.r} directions don't converge on these rows; lower lora.rank, or "
                "choose another"
            )
        device = compute.device
        packed_logits(model, Batch(batch).to(device), torch.zeros(1, dtype=torch.int64, device=device))
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            print(f"EVA: {passes} documents read", flush=True)
            printed = time.monotonic()

    with torch.no_grad(), compute.autocast(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize_lora_eva_weights(
            model,
            [collate([document], compute.kernel, rows.longest[0]) for document in documents],
            forward_fn=forward,
            prepare_model_inputs_fn=lambda batch, config: None,
            prepare_layer_inputs_fn=lambda inputs, _, name: inputs[0].flatten(0, -2),
            # All processes read the same documents.
            gather_distributed_inputs=False,
            show_progress_bar=False,
        )
    # peft replaces them by a list of all names; the config is to be that of a resumed training.
    config.target_modules = targets
    print(f"adapters initialized by EVA from {passes} documents, in {time.monotonic() - started:.0f} s", flush=True)


def _documents(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the documents of a row without those that continue others, each as a row of its own.

    >>> row = {"input_ids": np.arange(9), "segment_lengths": np.array([4, 3]), "prefix_lengths": np.array([0, 2])}
    >>> [document["input_ids"].tolist() for document in _documents(row)]
    [[0, 1, 2, 3]]
    """
    end = 0
    for length, prefix in zip(row["segment_lengths"], row["prefix_lengths"], strict=True):
        begin, end = end, end + int(length)
        if not prefix:
            segments = {"segment_lengths": np.array([length], np.int32), "prefix_lengths": np.zeros(1, np.int32)}
            labels = np.full(end - begin, IGNORED, np.int32)
            yield {"input_ids": row["input_ids"][begin:end], "labels": labels} | segments
