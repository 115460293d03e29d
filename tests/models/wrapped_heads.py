"""Program: two processes compute one batch each under DDP or FSDP, and compare with one process without chunks."""

import copy
import multiprocessing
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.families.examine import CPU, Rows
from benchmarks.families.tiny import VOCABULARY, tiny_config, tiny_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from snaketune.engine.model import fused_cross_entropy
from snaketune.engine.model.batches import collate
from snaketune.engine.model.forward import logits_at, packed_inputs
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.model.selftest import self_test

BATCHES = (Rows((([11, 23, 5], [0, 0, 0], 48),)), Rows((([17, 8], [0, 5], 32),)))
HEADS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 3.0},
}


def ready(family: str) -> torch.nn.Module:
    model = tiny_model(tiny_config(family, **HEADS[family]))
    self_test(model, BATCHES, CPU, training=True)
    return model


def expected_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return gradients averaged over the two batches, as both wrappers average them."""
    for rows in BATCHES:
        batch = collate(rows, "sdpa")
        logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0][batch["source_rows"]]
        (F.cross_entropy(logits_NV, batch["targets"], reduction="sum") / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def work(rank: int, store: Path, wrapper: str, family: str, model: torch.nn.Module) -> None:
    # A file, since another process may take a port that was free a moment ago.
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    expected = expected_gradients(copy.deepcopy(model))
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for losses in (summed_losses, token_losses):
        case = f"{wrapper}, {family}, {losses.__name__}"
        wrapped.zero_grad()
        losses(wrapped, collate(BATCHES[rank], "sdpa")).sum().backward()
        actual = {name: parameter.grad for name, parameter in model.named_parameters()}
        if wrapper == "fsdp":
            actual = {name: gradient.full_tensor() for name, gradient in actual.items()}
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=f"{case}, {name}")
        if rank == 0:
            print(f"{case}: equal", flush=True)
    # The group isn't destroyed: gloo's thread may need the GIL to free the last reduction. The reducer would then hold the last
    # reference to the group, and wait for that thread with the GIL.


def main() -> None:
    # Chunks of seven rows.
    fused_cross_entropy.CHUNK_LOGITS, fused_cross_entropy.SAVED_LOGITS, fused_cross_entropy.MIN_CHUNK_ROWS = (
        dict.fromkeys(("cpu", "other"), 7 * VOCABULARY),
        7 * VOCABULARY,
        1,
    )
    forked = multiprocessing.get_context("fork")
    for family in HEADS:
        # Tested once; both processes inherit it.
        model = ready(family)
        for wrapper in ("ddp", "fsdp"):
            with TemporaryDirectory() as folder:
                store = Path(folder) / "store"
                ranks = [forked.Process(target=work, args=(rank, store, wrapper, family, model)) for rank in range(2)]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join()
            if any(rank.exitcode for rank in ranks):
                sys.exit(f"{wrapper}, {family}: failed")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
