"""The packed engine on this machine: first that it is right, then how fast it is, beside TRL in the same run.

    python benchmarks/engine.py --size 23m --rows 64

Checks every kernel that the device can run against the dense mask, forward and backward. Then times optimizer steps of SFT on
the packed engine and on TRL's SFTTrainer (packing "bfd", padding-free where flash-attn is there), interleaved, same model,
same sequences, and prints one JSON object. Real tokens only: padding isn't counted. FLOPs are 6 per parameter and token.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.models.attention import KERNELS
from snaketune.models.batches import collate, on_device
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.forward import packed_logits
from snaketune.models.logprobs import token_losses
from snaketune.models.selftest import self_test
from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.shards import IGNORED

LENGTH = 1024
MICRO_BATCH = 8
SIZES = {  # hidden, intermediate, layers, heads, vocabulary
    "1m": (128, 256, 4, 4, 1024),
    "23m": (384, 1024, 6, 6, 32000),
    "0.5b": (1024, 2816, 24, 16, 32000),
    "1.5b": (1536, 8960, 28, 12, 32000),
}


def make_model(size: str, where: torch.device) -> torch.nn.Module:
    hidden, intermediate, layers, heads, vocabulary = SIZES[size]
    config = AutoConfig.for_model(
        "llama", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=LENGTH, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(where)


def make_rows(rows: int, vocabulary: int) -> tuple[list[dict], list[np.ndarray]]:
    """Packed rows of lognormal documents (median 120), the second half of each supervised, and the documents."""
    generator = np.random.default_rng(0)
    documents: list[np.ndarray] = []
    while sum(map(len, documents)) < rows * LENGTH * 0.999:
        length = int(np.clip(generator.lognormal(np.log(120), 1.0), 4, LENGTH))
        documents.append(generator.integers(2, vocabulary, length).astype(np.int32))
    plan = plan_best_fit_decreasing(np.array([len(d) for d in documents]), [LENGTH])
    packed = []
    for r in range(plan.rows):
        chosen = [documents[i] for i in plan.row(r)]
        ids, labels = np.zeros(LENGTH, np.int32), np.full(LENGTH, IGNORED, np.int32)
        at = 0
        for document in chosen:
            ids[at : at + len(document)] = document
            labels[at + len(document) // 2 : at + len(document)] = document[len(document) // 2 :]
            at += len(document)
        lengths = np.array([len(d) for d in chosen], np.int32)
        packed.append(
            {"input_ids": ids, "labels": labels, "segment_lengths": lengths, "prefix_lengths": np.zeros_like(lengths)}
        )
    return packed[:rows], documents


def check_kernels(compute: Compute) -> dict[str, float]:
    """Largest difference of losses and gradients from the dense kernel's, as a share of the largest."""
    row = {
        "input_ids": np.random.default_rng(1).integers(2, 1024, 64).astype(np.int32),
        "segment_lengths": np.array([20, 9, 15], np.int32),
        "prefix_lengths": np.array([0, 7, 0], np.int32),
    }
    row["labels"] = np.where(np.arange(64) % 3 == 0, row["input_ids"], IGNORED).astype(np.int32)
    model = make_model("1m", compute.device)

    def run(kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
        self_test(model, [], replace(compute, kernel=kernel), training=True)
        model.zero_grad()
        with compute.autocast():
            losses = token_losses(model, on_device(collate([row, row], kernel), compute.device))
            logits = packed_logits(model, on_device(collate([row, row], kernel), compute.device))
        losses.sum().backward()
        return logits.float(), torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = run("dense")
    found = {}
    # The varlen kernels are CUDA's; there, one that is installed and fails must be seen to fail.
    for kernel in KERNELS if compute.device.type == "cuda" else ("sdpa", "dense"):
        try:
            got = run(kernel)
        except ImportError as error:
            print(f"kernel {kernel}: not installed ({error})")
            continue
        found[kernel] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected))
        assert found[kernel] < (1e-4 if compute.dtype == torch.float32 else 5e-2), (kernel, found[kernel])
    return found


def time_packed(model, rows: list[dict], compute: Compute) -> float:
    """Seconds for one pass of training steps over all rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    self_test(model, [], compute, training=True)
    started = time.perf_counter()
    for at in range(0, len(rows), MICRO_BATCH):
        batch = on_device(collate(rows[at : at + MICRO_BATCH], compute.kernel), compute.device)
        with compute.autocast():
            loss = token_losses(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if compute.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def time_trl(model, documents: list[np.ndarray], dtype: torch.dtype) -> tuple[float, int]:
    """Seconds and real tokens of TRL's trainer over the documents, packed by itself; preparation isn't counted."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder, per_device_train_batch_size=MICRO_BATCH, num_train_epochs=1, max_length=LENGTH,
                packing=True, packing_strategy="bfd", learning_rate=1e-5, bf16=dtype == torch.bfloat16,
                gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
                logging_strategy="no", use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_list(
                [{"input_ids": d.tolist(), "labels": [IGNORED] * (len(d) // 2) + d[len(d) // 2 :].tolist()} for d in documents]
            ),
            # TRL asks for a tokenizer, though nothing is left to tokenize.
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>")),
                pad_token="<pad>",
                eos_token="</s>",
            ),
        )  # fmt: skip
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started, sum(map(len, documents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    compute = resolve_compute("auto")
    checked = check_kernels(compute)
    model = make_model(options.size, compute.device)
    parameters = sum(p.numel() for p in model.parameters())
    rows, documents = make_rows(options.rows, SIZES[options.size][-1])
    tokens = sum(int(row["segment_lengths"].sum()) for row in rows)
    time_packed(model, rows[:MICRO_BATCH], compute)
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(tokens / time_packed(model, rows, compute))
        seconds, trl_tokens = time_trl(model, documents, compute.dtype)
        theirs.append(trl_tokens / seconds)
    median, peer = statistics.median(ours), statistics.median(theirs)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name()
                if compute.device.type == "cuda"
                else platform.processor() or "cpu",
                "threads": torch.get_num_threads(),
                "dtype": str(compute.dtype),
                "kernel": compute.kernel,
                "kernels_checked": checked,
                "parameters": parameters,
                "tokens_per_second": round(median, 1),
                "trl_tokens_per_second": round(peer, 1),
                "ratio": round(median / peer, 3),
                "model_tflops_per_second_6n": round(6 * parameters * median / 1e12, 4),
                "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
