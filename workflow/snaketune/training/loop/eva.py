"""Initial adapters from the layers' inputs: EVA (Paischer et al., 2024), by peft."""

import time
import warnings
from typing import Any

import torch
from peft import PeftModel, initialize_lora_eva_weights

from snaketune.errors import SnaketuneError
from snaketune.models.batches import Batch, collate
from snaketune.models.devices import Compute
from snaketune.models.forward import packed_logits
from snaketune.models.kernels import SEPARATE
from snaketune.packing.epoch_order import epoch_order
from snaketune.packing.reader import PackedRows

# Rows that are read, again and again until the directions converge. Always one by one, so that no batch size shapes the result.
MOST_ROWS = 256
SECONDS_BETWEEN_LINES = 30.0


def initialize_by_eva(model: PeftModel, rows: PackedRows, compute: Compute, seed: int) -> None:
    """Set each adapter's first matrix to the main directions of its layer's inputs, on rows in the order of the first epoch.

    Raises:
        SnaketuneError: the documents run separately, or peft finds no such directions.
    """
    if compute.kernel == SEPARATE:
        raise SnaketuneError(
            "lora.init_lora_weights: eva needs packed documents, which this model computes separately; choose another"
        )
    config, started = model.peft_config["default"], time.monotonic()
    passes, printed, targets = 0, started, config.target_modules
    order = epoch_order(len(rows), seed, 0)[:MOST_ROWS].tolist()
    batches = [collate([rows[row]], compute.kernel, rows.longest[0]) for row in order]

    def forward(model: torch.nn.Module, batch: dict[str, Any]) -> None:
        nonlocal passes, printed
        batch, passes = Batch(batch).to(compute.device), passes + 1
        packed_logits(model, batch, torch.zeros(1, dtype=torch.int64, device=compute.device))
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            print(f"EVA: {passes} rows read", flush=True)
            printed = time.monotonic()

    try:
        # A model on one device only, and rows that are the same in all processes.
        with torch.no_grad(), compute.autocast(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            initialize_lora_eva_weights(
                model,
                batches,
                forward_fn=forward,
                prepare_model_inputs_fn=lambda batch, config: _is_document(batch),
                prepare_layer_inputs_fn=lambda inputs, is_document_T, name: inputs[0].flatten(0, -2)[
                    is_document_T.to(inputs[0].device)
                ],
                gather_distributed_inputs=False,
                show_progress_bar=False,
            )
    except (RuntimeError, ValueError) as error:
        raise SnaketuneError(f"lora.init_lora_weights: eva failed: {error}") from None
    # peft replaces them by a list of all names; the config is to be that of a resumed training.
    config.target_modules = targets
    print(f"adapters initialized by EVA from {passes} rows, in {time.monotonic() - started:.0f} s", flush=True)


def _is_document(batch: dict[str, Any]) -> torch.Tensor:
    """Return which tokens aren't padding, bool[T]."""
    return torch.from_numpy(batch["segments"].layout.document_of >= 0)
