"""The door to packed forwards: does this model, with this kernel, see in a packed row exactly what it sees in each document?

Asked once per model and kernel, before the first packed forward; `token_losses` refuses a model that wasn't asked. Made rows
of random tokens hold every situation (documents of different lengths one after another, pairs, trees of completions of one
prompt, free tokens, several rows in a batch); real rows hold the longest sequence and the most segments. Two questions:

    the same      every token's logits against a forward of its own document alone, by the model's own attention
    no leak       other tokens in one document, in the free places, or in another row of the batch: nothing changes in the
                  others; asked again in training mode, with the same random numbers, before a training

The logits' largest deviation from their mean over the tokens is the scale: what they have in common tells nothing.

In 16 bits, single tokens of a pretrained model may differ by as much as the scale though everything is right: whether an early
token becomes an attention sink can hang on a rounding. SmolLM2-135M's own attention, in bfloat16 and in float32, differs by 1.0
of the scale in one token of 86 made ones and by 0.03 in nine of ten; a kernel that sees too much or too little, by 0.4 in half
of them (docs/LOG.md). So in 16 bits nine tokens of ten have to be the same; what leaks between documents is held to rounding in
all of them, since there the same is computed twice.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.models.attention import Unpackable, use_own_attention, use_segment_attention
from snaketune.models.batches import collate
from snaketune.models.chunked_head import chunk_head, unsharded_root
from snaketune.models.devices import NOT_DETERMINISTIC, Compute
from snaketune.models.forward import allow_packed, logits_at, packed_inputs
from snaketune.models.packing_support import ALTERNATIVES, batch_dependent_rope, windows_of
from snaketune.packing.reader import PackedRows
from snaketune.packing.segments import mask
from snaketune.packing.shards import IGNORED

# Largest accepted difference, as a share of the scale; and the share of the tokens that have to be within it.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
REQUIRED_SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}
# The same computation of the same shapes with other tokens elsewhere: 0 but for experts, whose share of the tokens changes.
LEAK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Logits of so many tokens are held at a time.
CHUNK = 2048
# Segment lengths, prefix lengths, prefix segments, free tokens of the made rows.
DOCUMENTS = (([7, 19, 12], [0, 0, 0], [0, 1, 2], 9), ([16, 5, 11, 4], [0, 0, 0, 0], [0, 1, 2, 3], 3))
# Beside a document a pair; three levels, of which one goes on where its parent ends, and a pair.
PAIRS = (
    ([10, 14, 9], [0, 0, 6], [0, 1, 1], 5),
    ([12, 5, 8, 3, 6, 13, 6], [0, 7, 12, 8, 20, 0, 10], [0, 0, 1, 1, 2, 5, 5], 4),
)


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """A self-test that was passed: computing with what, and how well (the largest difference of the tokens that count)."""

    compute: Compute
    share: float

    def about(self) -> dict[str, Any]:
        """For the manifest: the same for the same work, whatever the last bits are."""
        within = f"packed = separate within {TOLERANCE[self.compute.dtype]:.0e}"
        if REQUIRED_SHARE[self.compute.dtype] < 1:
            within += f" in {REQUIRED_SHARE[self.compute.dtype]:.0%} of the tokens"
        return self.compute.about() | {"self_test": within}


def self_test(model: PreTrainedModel, packs: Sequence[PackedRows], compute: Compute, *, training: bool) -> SelfTest:
    """Show that packed forwards of `model` by the kernel are right, and allow them. Leaves the segments' attention switched on.

    Args:
        packs: what will be run; empty for anything.
        training: whether the model is going to be trained.
    Raises:
        Unpackable: they aren't, or fail.
    """
    name, was_training = model.config.model_type, model.training
    kernel, dtype = compute.kernel, compute.dtype
    prefixes = not packs or any(rows.has_prefixes for rows in packs)
    shares = []
    try:
        for rows, what in _rows_to_test(model.config, packs, prefixes):
            model.eval()
            shares.append(share := _difference_from_separate(model, rows, compute))
            _judge(share, TOLERANCE[dtype], f"packed logits of {what} differ from separate ones", kernel)
        for rows in synthetic_rows(model.config, prefixes):
            for mode in (False, True) if training else (False,):
                model.train(mode)
                share = _leak(model, rows, compute)
                shares.append(share)
                how = " in training mode" if mode else ""
                _judge(
                    share, LEAK_TOLERANCE[dtype], f"what one document says changes the logits of another{how}", kernel
                )
    except Unpackable as error:
        raise Unpackable(f"{name} can't see packed rows as single documents: {error}. {ALTERNATIVES}") from error
    finally:
        model.train(was_training)
    use_segment_attention(model)
    allow_packed(model, kernel, prefixes)
    _chunk_head(model, compute)
    worst = max(shares)
    print(f"self-test: packed = separate within {worst:.1e} of the logits (kernel {kernel}, {dtype})", flush=True)
    return SelfTest(compute=compute, share=worst)


def _chunk_head(model: PreTrainedModel, compute: Compute) -> None:
    batch = collate(synthetic_rows(model.config, prefixes=False)[0], compute.kernel).to(compute.device)
    was_training = model.training
    model.eval()
    with compute.autocast(), unsharded_root(model):
        chunked = chunk_head(model, packed_inputs(batch), torch.arange(8, device=compute.device))
    model.train(was_training)
    if not chunked:
        print(
            "the logits of all supervised tokens are held at once: this model's head can't be run by itself", flush=True
        )


def synthetic_rows(config: PretrainedConfig, prefixes: bool) -> list[list[dict[str, Any]]]:
    """Batches of two made rows, as `PackedRows` gives them: documents, and pairs if there are `prefixes` in the run."""
    text = config.get_text_config()
    limits = (*windows_of(text), batch_dependent_rope(text), getattr(text, "max_position_embeddings", None))
    # A prefix and its completion take half each.
    half = max(min((int(limit) for limit in limits if isinstance(limit, int) and limit > 0), default=2**20) // 2, 2)
    allowed = ordinary_ids(config)
    generator = np.random.default_rng(0)
    batches = []
    for shapes in (DOCUMENTS, PAIRS) if prefixes else (DOCUMENTS,):
        rows = []
        for lengths, prefix_lengths, prefix_segments, free in shapes:
            short = np.minimum(lengths, half).astype(np.int32)
            ids = generator.choice(allowed, int(short.sum()) + free).astype(np.int32)
            rows.append(
                {
                    "input_ids": ids,
                    "labels": np.full(len(ids), IGNORED, np.int32),
                    "segment_lengths": short,
                    "prefix_lengths": np.minimum(prefix_lengths, half).astype(np.int32),
                    "prefix_segments": np.array(prefix_segments, np.int32),
                }
            )
        batches.append(rows)
    return batches


def ordinary_ids(config: PretrainedConfig) -> np.ndarray:
    """All tokens but those that mean something to the model's code."""
    special = _special_ids(config)
    return np.array([token for token in range(config.get_text_config().vocab_size) if token not in special])


def _special_ids(config: PretrainedConfig) -> set[int]:
    """Tokens that mean something to the model's code (padding, images)."""
    found: set[int] = set()
    waiting = [config.to_dict()]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif str(key).endswith(("_token_id", "_token_index", "_token_ids")):
                values = value if isinstance(value, list | tuple) else [value]
                found |= {token for token in values if isinstance(token, int)}
    return found


def _rows_to_test(
    config: PretrainedConfig, packs: Sequence[PackedRows], prefixes: bool
) -> Iterator[tuple[list[dict[str, Any]], str]]:
    documents, *pairs = synthetic_rows(config, prefixes)
    yield documents, "made documents"
    for rows in pairs:
        yield rows, "made pairs with a shared prompt"
    packs = [rows for rows in packs if len(rows)]
    if packs:
        longest = max(packs, key=lambda rows: rows.longest[0])
        yield [longest[longest.longest[1]]], "the row with the longest sequence"
        yield [longest[longest.fullest]], "the row with the most sequences"


def _judge(share: float, tolerance: float, what: str, kernel: str) -> None:
    # Not a number fails too.
    if not share <= tolerance:
        raise Unpackable(f"{what} by {share:.1e} of the logits (kernel {kernel}; up to {tolerance:.0e} is rounding)")


@torch.no_grad()
def _difference_from_separate(model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute) -> float:
    """The largest difference of the tokens of all documents, but for the share that need not agree, as a share of the scale."""
    use_segment_attention(model)
    batch = collate(rows, compute.kernel).to(compute.device)
    sequences = batch["segments"].layout.sequences()
    places_N = torch.from_numpy(np.concatenate([places_L[prefix:] for places_L, prefix in sequences]))
    differences, scales = [], []
    for begin in range(0, len(places_N), CHUNK):
        packed_NV = _packed_logits(model, batch, places_N[begin : begin + CHUNK], compute)
        use_own_attention(model)
        alone, at = [], 0
        for places_L, prefix in sequences:
            own = range(prefix, len(places_L))[max(begin - at, 0) : max(begin + CHUNK - at, 0)]
            at += len(places_L) - prefix
            if own:
                inputs = {"input_ids": batch["input_ids"][:, torch.from_numpy(places_L)], "use_cache": False}
                with compute.autocast():
                    alone.append(logits_at(model, inputs, torch.arange(own.start, own.stop, device=compute.device))[0])
        use_segment_attention(model)
        alone_NV = torch.cat(alone)
        differences.append(largest_differences(packed_NV, alone_NV))
        scales.append(scale_of(alone_NV))
    return difference_quantile(torch.cat(differences) / torch.stack(scales).max(), compute.dtype)


@torch.no_grad()
def _leak(model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute) -> float:
    """The largest change that other tokens make in logits that don't depend on them, as a share of the scale."""
    use_segment_attention(model)
    batch = collate(rows, compute.kernel).to(compute.device)
    placed = batch["segments"].layout
    everywhere_T = torch.arange(placed.tokens)
    seed = torch.initial_seed()
    worst = []
    with torch.random.fork_rng(devices=[compute.device] if compute.device.type == "cuda" else []):
        torch.manual_seed(seed)
        before_TV = _packed_logits(model, batch, everywhere_T, compute)
        for parity in (0, 1):
            # The last quarter of every other segment, free tokens included; prompts that others share stay as they are.
            changed_T = np.zeros(placed.tokens, bool)
            for start, length in list(zip(placed.starts.tolist(), placed.lengths.tolist()))[parity::2]:
                changed_T[start + length - max(length // 4, 1) : start + length] = True
            ids_1T = batch["input_ids"].clone()
            ids_1T[:, changed_T] = ids_1T.roll(placed.tokens // 2, dims=1)[:, changed_T]
            torch.manual_seed(seed)
            after_TV = _packed_logits(model, batch | {"input_ids": ids_1T}, everywhere_T, compute)
            untouched_T = torch.from_numpy(~mask(placed)[:, changed_T].any(1))
            worst.append(largest_differences(after_TV[untouched_T], before_TV[untouched_T]).max())
    return (torch.stack(worst).max() / scale_of(before_TV)).item()


def _packed_logits(model: PreTrainedModel, batch: dict[str, Any], places_N: torch.Tensor, compute: Compute):
    try:
        with compute.autocast():
            return logits_at(model, packed_inputs(batch), places_N.to(compute.device))[0]
    except (Unpackable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if NOT_DETERMINISTIC in str(error):
            raise
        # Kernels made of other languages raise what they like.
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise Unpackable(f"a packed forward fails ({type(error).__name__}: {first_line})") from error


def largest_differences(one_NV: torch.Tensor, other_NV: torch.Tensor) -> torch.Tensor:
    """Of the logits of each token, float32[N]."""
    # Equal infinities, as of tokens that a model never writes, differ by nothing.
    return torch.where(one_NV == other_NV, 0.0, one_NV.float() - other_NV.float()).abs().amax(1)


def difference_quantile(shares_N: torch.Tensor, dtype: torch.dtype) -> float:
    """Of the differences of tokens the largest, in 16 bits that of nine in ten; not a number if one of them isn't.

    >>> shares = torch.tensor([0.01] * 18 + [0.02, 0.9])
    >>> round(difference_quantile(shares, torch.bfloat16), 3), round(difference_quantile(shares, torch.float32), 3)
    (0.01, 0.9)
    """
    # torch.quantile takes 16 million numbers at most.
    ordered_N = shares_N.float().sort().values
    if ordered_N.isnan().any():
        return float("nan")
    return ordered_N[max(0, math.ceil(REQUIRED_SHARE[dtype] * len(ordered_N)) - 1)].item()


def scale_of(logits_NV: torch.Tensor) -> torch.Tensor:
    """What differences are a share of: see above."""
    deviation_NV = logits_NV.float() - logits_NV.float().mean(0)
    return deviation_NV.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-9)
