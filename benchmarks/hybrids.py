"""Hybrids on packed rows, with only their mixers by document, beside every document as a sequence of its own; one thread.

    python -m benchmarks.hybrids --data FOLDER

Forward and backward passes of models of some 6M parameters over the same rows of gsm8k, supervised as in SFT, in turn; medians.
`separate` is what these families would train by if their mixers couldn't be run by document, and what peers do without packing.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.data_path.rows import GSM8K
from benchmarks.jobs import ROW_LENGTH, conversations
from benchmarks.processes import pinned
from benchmarks.results import in_turn, made_on, markdown, medians, options_of, require, write_json
from snaketune.models.batches import collate
from snaketune.models.devices import Compute
from snaketune.models.kernels import SEPARATE
from snaketune.models.logprobs import summed_losses
from snaketune.models.selftest import check_kernel
from snaketune.packing.reader import PackedRows

GOAL = 1.5
SHAPE = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": ROW_LENGTH, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "mamba_d_state": 32, "mamba_n_groups": 1}
# Two attention layers and four with a state.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR
    | {"head_dim": 64, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "bamba": MAMBA | {"attn_layer_indices": [2, 5]},
}
BATCHES, BATCH_ROWS = 4, 2
COMPUTE = {
    kernel: Compute(device=torch.device("cpu"), dtype=torch.float32, kernel=kernel) for kernel in ("sdpa", SEPARATE)
}


def main() -> None:
    options = options_of(__doc__, "results/bench/hybrids.json", "gsm8k", FAMILIES).parse_args()
    require(options.data, [GSM8K])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, pinned():
        project = conversations(Path(name), [(options.data / GSM8K).resolve()])
        rows = PackedRows(project.make(project.pack()), "train")
        found = {family: _family(family, rows, options.rounds) for family in options.only or FAMILIES}
    write_json(options.out, {"families": found, "goal": GOAL} | made_on("benchmarks.hybrids"))
    columns = ("family", "parameters", "hybrid, tokens/s", "separate, tokens/s", "ratio", "losses differ by")
    print(markdown(columns, [_cells(family, one) for family, one in found.items()]))


def _cells(family: str, one: dict[str, Any]) -> tuple[str, ...]:
    rates = one["tokens_per_s"]
    return (
        family,
        f"{one['parameters'] / 1e6:.1f}M",
        f"{rates['sdpa']:,.0f}",
        f"{rates[SEPARATE]:,.0f}",
        f"{rates['sdpa'] / rates[SEPARATE]:.2f}",
        f"{one['difference']:.0e}",
    )


def _family(family: str, rows: PackedRows, rounds: int) -> dict[str, Any]:
    models, losses = {}, {}
    for kernel, compute in COMPUTE.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
        models[kernel] = AutoModelForCausalLM.from_config(config).train()
        check_kernel(models[kernel], [rows], compute, training=True)
        # Also warms up.
        losses[kernel] = _step(models[kernel], rows, kernel)["loss"]
    found = in_turn(
        rounds,
        {kernel: partial(_step, model, rows, kernel) for kernel, model in models.items()},
        lambda one: f"{one['tokens_per_s']:,.0f} tokens/s",
    )
    return {
        "tokens_per_s": medians(found, "tokens_per_s"),
        "parameters": sum(parameter.numel() for parameter in models["sdpa"].parameters()),
        "difference": abs(losses["sdpa"] - losses[SEPARATE]) / losses["sdpa"],
        "rounds": found,
    }


def _step(model: torch.nn.Module, rows: PackedRows, kernel: str) -> dict[str, float]:
    """Run BATCHES batches forward and backward."""
    tokens, total, started = 0, 0.0, time.perf_counter()
    for first in range(0, BATCHES * BATCH_ROWS, BATCH_ROWS):
        batch = collate([rows[row] for row in range(first, first + BATCH_ROWS)], kernel)
        loss = summed_losses(model, batch)
        loss.backward()
        model.zero_grad()
        tokens += batch["segments"].layout.document_tokens
        total += loss.item()
    return {"tokens_per_s": tokens / (time.perf_counter() - started), "loss": total}


if __name__ == "__main__":
    main()
