"""TRL's trainers on the same models and data, as TRL's documentation recommends: SFT packed by TRL itself, DPO with every
prompt computed twice; and a plain loop of DPO where TRL isn't installed.

A micro-batch of DPO is, as in TRL, all chosen sequences and then all rejected ones, padded to the longest, and only what is
supervised is projected to the vocabulary, a chunk at a time.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.clock import Clock
from benchmarks.gpu.measure import BETA, LEARNING_RATE, as_many_as_fit, optimizer_step, peak_memory
from benchmarks.gpu.rows import MadePair, make_documents, make_pairs
from benchmarks.gpu.shapes import Shape, add_adapters, lora_config, make_model
from benchmarks.trl_training import counts, train_by_trl
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_flash_attn_2_available

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.machine import reset_peak_memory
from snaketune.engine.packing.shards import IGNORED

# Supervised positions that are projected in one chunk.
CHUNK = 1024


def sft_peer(shape: Shape, compute: Compute, micro_rows: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure real tokens/s and memory with as many rows as fit, starting with our number."""
    from trl import SFTConfig, SFTTrainer

    def run(rows: int) -> dict[str, Any]:
        # Rows of TRL's making may be more.
        documents = make_documents(rows * (warm_up + steps + 1), shape.length, shape.vocabulary)
        halves = [(document.tolist(), len(document) // 2) for document in documents]
        made = [{"input_ids": ids, "labels": [IGNORED] * half + ids[half:]} for ids, half in halves]
        clock = Clock(warm_up, steps, compute.device)
        settings = {"max_length": shape.length, "packing": True, "packing_strategy": "bfd"}
        return _trl(clock, counts, SFTTrainer, SFTConfig, shape, compute, made, batch_size=rows, **settings)

    return as_many_as_fit(micro_rows, run)


def preference_peer(
    shape: Shape, proportion: str, compute: Compute, batch_size: int, warm_up: int, steps: int, *, with_trl: bool
) -> dict[str, Any]:
    """Measure pairs/s and memory with as many pairs per batch as fit, halving `batch_size`."""

    def run(size: int) -> dict[str, Any]:
        rows, count = 1, size * (warm_up + steps)
        while len(pairs := make_pairs(rows, shape.length, shape.vocabulary, proportion)) < count:
            rows *= 2
        batches = [pairs[begin : begin + size] for begin in range(0, count, size)]
        return (_trl_dpo if with_trl else _plain)(shape, compute, batches, Clock(warm_up, steps, compute.device))

    peer = "TRL's DPOTrainer" if with_trl else "a plain two-sequence loop (no TRL here)"
    return as_many_as_fit(batch_size, run) | {"peer": peer, "compiled": False}


def _trl_dpo(shape: Shape, compute: Compute, batches: list[list[MadePair]], clock: Clock) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    left = iter(batches)
    sides = ("prompt", "chosen", "rejected")
    made = [{f"{side}_ids": getattr(pair, side).tolist() for side in sides} for pair in chain.from_iterable(batches)]
    settings = {"max_length": None, "precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"}
    settings |= {"batch_size": len(batches[0]), "beta": BETA}
    return _trl(clock, lambda _: _counts(next(left)), Tokenized, DPOConfig, shape, compute, made, **settings)


def _trl(
    clock: Clock,
    counts: Callable,
    trainer: type,
    config: type,
    shape: Shape,
    compute: Compute,
    made: list[dict],
    *,
    batch_size: int,
    **settings: Any,
) -> dict[str, Any]:
    """Train by TRL on tokenized rows. Args: counts: of a micro-batch, for the clock; settings: further keys of the config."""
    from datasets import Dataset

    reset_peak_memory(compute.device)
    model = _model(shape, compute)
    train_by_trl(
        clock.timing(trainer, counts), config, model=model, rows=Dataset.from_list(made),
        tokenizer=_made_tokenizer(), peft=lora_config(shape.rank) if shape.rank else None,
        per_device_train_batch_size=batch_size, learning_rate=LEARNING_RATE, bf16=compute.dtype == torch.bfloat16,
        use_cpu=compute.device.type != "cuda", **settings,
    )  # fmt: skip
    return clock.found() | peak_memory(compute) | {"attention": model.config._attn_implementation}


def _model(shape: Shape, compute: Compute):
    """Return the model; TRL recommends flash-attn for packing, otherwise torch's attention is used."""
    model = make_model(shape, compute)
    flash = compute.device.type == "cuda" and is_flash_attn_2_available()
    model.set_attn_implementation("flash_attention_2" if flash else "sdpa")
    return model


def _made_tokenizer() -> Any:
    """Return a tokenizer, which TRL's trainers require although the rows are tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def _plain(shape: Shape, compute: Compute, batches: list[list[MadePair]], clock: Clock) -> dict[str, Any]:
    reset_peak_memory(compute.device)
    model = _model(shape, compute)
    attention = model.config._attn_implementation
    model = add_adapters(model, shape.rank).train()
    update = optimizer_step(model, compute)
    for pairs in batches:
        clock.count(**_counts(pairs))
        with compute.autocast():
            sums_2P = _logps(model, **{name: array.to(compute.device) for name, array in _padded(pairs).items()})
            loss = -F.logsigmoid(BETA * (sums_2P[: len(pairs)] - sums_2P[len(pairs) :])).mean()
        loss.backward()
        update()
        clock.step_ended()
    return clock.found() | peak_memory(compute) | {"attention": attention}


def _counts(pairs: list[MadePair]) -> dict[str, int]:
    """Count pairs, real tokens, prompts twice, and tokens of completions."""
    supervised = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    tokens = sum(len(one) for pair in pairs for one in pair.sequences)
    return {"pairs": len(pairs), "tokens": tokens, "supervised": supervised}


def _padded(pairs: list[MadePair]) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels, int64[2P, L]: chosen sequences, then rejected ones."""
    sides = [(pair.sequences[side], len(pair.prompt)) for side in (0, 1) for pair in pairs]
    ids_BL = np.zeros((len(sides), max(len(whole) for whole, _ in sides)), np.int64)
    mask_BL, labels_BL = np.zeros_like(ids_BL), np.full_like(ids_BL, IGNORED)
    for number, (whole, prompt) in enumerate(sides):
        ids_BL[number, : len(whole)], mask_BL[number, : len(whole)] = whole, 1
        labels_BL[number, prompt : len(whole)] = whole[prompt:]
    arrays = {"ids_BL": ids_BL, "mask_BL": mask_BL, "labels_BL": labels_BL}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


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
