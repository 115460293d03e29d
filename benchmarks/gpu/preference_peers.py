"""Peers that compute every prompt twice: TRL's DPOTrainer, or a plain loop where TRL isn't installed.

Both run a micro-batch as TRL does: all chosen sequences and then all rejected ones, padded to the longest, and only what is
supervised projected to the vocabulary, a chunk at a time.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.gpu.measure import LEARNING_RATE, Marks, as_many_as_fit
from benchmarks.gpu.pairs import MadePair, make_pairs
from benchmarks.gpu.peers import made_tokenizer
from benchmarks.gpu.preferences import BETA, with_pairs_per_s
from benchmarks.gpu.shapes import Shape, add_adapters, make_model
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_flash_attn_2_available

from snaketune.models.devices import Compute
from snaketune.packing.shards import IGNORED

# Supervised positions that are projected in one chunk.
CHUNK = 1024


def preference_peer(
    shape: Shape, proportion: str, compute: Compute, batch_size: int, warm_up: int, steps: int, *, with_trl: bool
) -> dict[str, Any]:
    """Measure pairs/s and memory with as many pairs per batch as fit, halving `batch_size`."""
    run = _trl if with_trl else _plain
    found = as_many_as_fit(batch_size, lambda pairs: run(shape, proportion, compute, pairs, warm_up, steps))
    peer = "TRL's DPOTrainer" if with_trl else "a plain two-sequence loop (no TRL here)"
    return with_pairs_per_s(found) | {"peer": peer, "compiled": False}


def _made(shape: Shape, proportion: str, compute: Compute, pairs: int):
    """Return the model and at least this many pairs."""
    model = make_model(shape, compute)
    model.set_attn_implementation(
        "flash_attention_2" if compute.device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    )
    rows = 1
    while len(found := make_pairs(rows, shape.length, shape.model["vocab_size"], proportion).pairs) < pairs:
        rows *= 2
    return model, found[:pairs]


def _plain(
    shape: Shape, proportion: str, compute: Compute, batch_size: int, warm_up: int, steps: int
) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(compute.device)
    model, pairs = _made(shape, proportion, compute, batch_size * (warm_up + steps))
    attention = model.config._attn_implementation
    model = add_adapters(model, shape.rank).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=on_cuda)
    marks = Marks(warm_up, steps, compute.device)
    for begin in range(0, len(pairs), batch_size):
        some = pairs[begin : begin + batch_size]
        marks.count(pairs=len(some), **_counted(some))
        batch = {name: tensor.to(compute.device) for name, tensor in _padded(some).items()}
        with compute.autocast():
            sums_2P = _logps(model, **batch)
            loss = -F.logsigmoid(BETA * (sums_2P[: len(some)] - sums_2P[len(some) :])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if marks.step_ended():
            break
    return marks.found() | _memory(compute) | {"attention": attention}


def _counted(pairs: list[MadePair]) -> dict[str, int]:
    """Count real tokens, prompts twice, and tokens of completions."""
    supervised = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return {"tokens": sum(len(one) for pair in pairs for one in pair.sequences), "supervised": supervised}


def _padded(pairs: list[MadePair]) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels, int64[2P, L]: chosen sequences, then rejected ones."""
    sides = [(pair, side) for side in (0, 1) for pair in pairs]
    longest = max(len(pair.sequences[side]) for pair, side in sides)
    ids, labels = np.zeros((len(sides), longest), np.int64), np.full((len(sides), longest), IGNORED, np.int64)
    mask = np.zeros_like(ids)
    for number, (pair, side) in enumerate(sides):
        whole, prompt = pair.sequences[side], len(pair.prompt)
        ids[number, : len(whole)], mask[number, : len(whole)] = whole, 1
        labels[number, prompt : len(whole)] = whole[prompt:]
    return {
        name: torch.from_numpy(array) for name, array in (("ids_BL", ids), ("mask_BL", mask), ("labels_BL", labels))
    }


def _logps(
    model: torch.nn.Module, ids_BL: torch.Tensor, mask_BL: torch.Tensor, labels_BL: torch.Tensor
) -> torch.Tensor:
    """Return the summed log-probabilities of the completions, float32[B]."""
    inner = model.get_base_model()
    hidden_BLH = inner.model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).last_hidden_state
    row_N, column_N = (labels_BL[:, 1:] != IGNORED).nonzero(as_tuple=True)
    targets_N, hidden_NH = labels_BL[row_N, column_N + 1], hidden_BLH[row_N, column_N]

    def chunk(hidden_CH: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(inner.lm_head(hidden_CH).float(), targets_C, reduction="none")

    chunks = zip(hidden_NH.split(CHUNK), targets_N.split(CHUNK), strict=True)
    logps_N = torch.cat([checkpoint(chunk, *one, use_reentrant=False) for one in chunks])
    return logps_N.new_zeros(len(ids_BL)).index_add(0, row_N, logps_N)


def _memory(compute: Compute) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    return {"peak_memory_gb": torch.cuda.max_memory_allocated(compute.device) / 1e9 if on_cuda else None}


def _trl(shape: Shape, proportion: str, compute: Compute, batch_size: int, warm_up: int, steps: int) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    on_cuda = compute.device.type == "cuda"
    marks = Marks(warm_up, steps, compute.device)
    batches: Iterator[list[MadePair]] = iter(())

    class Timed(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            """Return the data set unchanged: it is tokenized."""
            return dataset

        def training_step(self, model, inputs, *others):
            marks.count(pairs=len(inputs["input_ids"]) // 2, **_counted(next(batches)))
            return super().training_step(model, inputs, *others)

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= marks.step_ended()

    model, pairs = _made(shape, proportion, compute, batch_size * (warm_up + steps))
    batches = iter([pairs[begin : begin + batch_size] for begin in range(0, len(pairs), batch_size)])
    adapters = LoraConfig(r=shape.rank, lora_alpha=2 * shape.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            args=DPOConfig(
                output_dir=folder, max_length=None, precompute_ref_log_probs=True, beta=BETA,
                per_device_train_batch_size=batch_size, num_train_epochs=1, learning_rate=LEARNING_RATE,
                train_sampling_strategy="sequential",
                # Ours keeps activations too.
                gradient_checkpointing=False, bf16=compute.dtype == torch.bfloat16, use_cpu=not on_cuda,
                report_to="none", save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([_row(pair) for pair in pairs]),
            processing_class=made_tokenizer(),
            peft_config=adapters,
            callbacks=[Ends()],
        )  # fmt: skip
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(compute.device)
        trainer.train()
    return marks.found() | _memory(compute) | {"attention": model.config._attn_implementation}


def _row(pair: MadePair) -> dict[str, list[int]]:
    return {
        "prompt_ids": pair.prompt.tolist(),
        "chosen_ids": pair.chosen.tolist(),
        "rejected_ids": pair.rejected.tolist(),
    }
