"""Self-test of packed forwards, once per model and kernel, before the first of them: packed logits must equal separate ones.

Mixers with a state run by their own kernels first, where they may, and then by document (`mixers`). If packed logits
differ in both ways, documents run separately (kernel `separate`), after the same test.

Synthetic rows of random tokens cover every situation (documents of different lengths in one row, pairs, trees of completions of
one prompt, padding, several rows in a batch); real rows add the longest sequence and the most segments. Two checks:

    equality      each token's logits against a forward of its document alone, by the model's own attention
    no leak       changed tokens in one document, in the padding, or in another row of the batch don't change the logits of
                  other documents; before a training also in training mode, with the same random numbers

Where two scores of a router are within rounding of a tie, both passes choose the same experts (`engine.model.router_choices`).

Differences are relative to the scale: the largest deviation of logits from their mean over the tokens, since an offset that all
tokens share carries no information. In 16 bits, single tokens may differ by as much as the scale although the kernel is right
(whether an early token becomes an attention sink can depend on rounding), so nine tokens of ten have to agree (docs/LOG.md).
Where they don't, the model's own rounding is measured: a deep model, or one of 4-bit weights, rounds by more than that.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from snaketune.engine.model.attention import Unpackable, usable_kernels, use_kernel, use_own_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.chunked_head import chunk_head
from snaketune.engine.model.devices import NOT_DETERMINISTIC, Compute
from snaketune.engine.model.forward import allow_packed, logits_at, packed_inputs, packed_logits
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.logit_differences import (
    REQUIRED_SHARE,
    TOLERANCE,
    difference_quantile,
    largest_differences,
    scale_of,
)
from snaketune.engine.model.mixers import BY_DOCUMENT, offer_own_kernels, set_segments, way_of_mixers
from snaketune.engine.model.packing_support import INSTEAD
from snaketune.engine.model.router_choices import RouterChoices
from snaketune.engine.model.selftest_rows import rows_to_test, synthetic_rows
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.segments import mask
from snaketune.errors import SnaketuneError, first_line

# The same computation with the same shapes and other tokens elsewhere: 0 except with experts, whose batches of tokens change.
LEAK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# In 16 bits: packed logits may differ by this times the model's own rounding, and by no more than this of the scale. What
# reads another document, or is computed at another position, differs by about the scale itself. Not 1: kernels sum in another
# order than the model's own attention: a kernel that computed shared prompts in two parts was 2.8 times its rounding away.
OWN_ROUNDINGS, LARGEST_ROUNDING = 3, 0.2
# What a failed test of separate documents can mean.
BESIDE_OTHERS = (
    "Each document was a sequence of its own, padded on the right, and was compared with that document alone. If later tokens "
    "are visible in this model (encoders), it can't be trained here; otherwise its kernels depend on the batch: set "
    "training.precision: float32, or install another version of transformers"
)
# Tokens whose logits are in memory together, and how many such chunks of a row are compared: each takes a pass over the row.
CHUNK, CHUNKS = 2048, 4


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """A passed self-test: what was tested, the largest difference relative to the scale, of the tokens that count, and how
    mixers with a state keep documents apart (`mixers.way_of_mixers`)."""

    compute: Compute
    share: float
    mixers: str

    @property
    def path(self) -> str:
        """How documents are computed: `packed`; `hybrid`, packed but for mixers by document; or `separate`."""
        return SEPARATE if self.compute.kernel == SEPARATE else "hybrid" if self.mixers == BY_DOCUMENT else "packed"

    def about(self) -> dict[str, Any]:
        """Return the result for the manifest, without the measured difference, which varies in the last bits."""
        required = REQUIRED_SHARE[self.compute.dtype]
        of_tokens = f" in {required:.0%} of the tokens" if required < 1 else ""
        tolerance = TOLERANCE[self.compute.dtype]
        limit = f"{tolerance:.0e}" if self.share <= tolerance else f"{OWN_ROUNDINGS} times the model's own rounding"
        within = f"packed = separate within {limit}{of_tokens}"
        mixers = {"mixers": self.mixers} if self.mixers else {}
        return self.compute.about() | mixers | {"self_test": within}


def self_test(model: PreTrainedModel, packs: Sequence[PackedRows], compute: Compute, *, training: bool) -> SelfTest:
    """Check packed forwards of `model`, with the kernel or else with slower ones, the last of them `separate`; and allow them.
    Prints why a kernel isn't used.

    Tests the rows of `packs`, every situation if there are none; before a training also in training mode.

    Raises:
        Unpackable: separate documents are wrong too: later tokens are visible in the model, or its results depend on the batch.
        SnaketuneError: its logits aren't finite.
    """
    usable = usable_kernels(compute.device, compute.dtype)
    slower = usable[usable.index(compute.kernel) + 1 :] if compute.kernel in usable else []
    packed = [compute.kernel, *slower] if compute.kernel != SEPARATE else []
    for kernel, following in pairwise((*packed, SEPARATE)):
        try:
            return check_kernel(model, packs, replace(compute, kernel=kernel), training=training)
        except Unpackable as error:
            print(f"{error}. {INSTEAD if following == SEPARATE else f'Trying kernel {following}'}", flush=True)
    return check_kernel(model, packs, replace(compute, kernel=SEPARATE), training=training)


def allow_also(model: PreTrainedModel, rows: PackedRows, compute: Compute) -> None:
    """Check and allow further rows, without gradients, by the model as it is set up for others. Prints why not."""
    try:
        _check_kernel(model, [rows], compute, rows.has_prefixes, training=False)
    except Unpackable as error:
        print(error, flush=True)
        # A failed test may end with the model's own attention.
        use_kernel(model, compute.kernel)


def check_kernel(
    model: PreTrainedModel,
    packs: Sequence[PackedRows],
    compute: Compute,
    *,
    training: bool,
) -> SelfTest:
    """Return a passed self-test with the kernel of `compute`, which stays switched on; Unpackable if packed forwards are wrong,
    or fail. Prints why mixers don't run by their own kernels."""
    prefixes = not packs or any(rows.has_prefixes for rows in packs)
    if offer_own_kernels(model, compute.kernel != SEPARATE and not prefixes, compute.device):
        try:
            return _check_kernel(model, packs, compute, prefixes, training)
        except Unpackable as error:
            print(f"{error}. Trying its mixers by document", flush=True)
        offer_own_kernels(model, False, compute.device)
    return _check_kernel(model, packs, compute, prefixes, training)


def _check_kernel(
    model: PreTrainedModel, packs: Sequence[PackedRows], compute: Compute, prefixes: bool, training: bool
) -> SelfTest:
    was_training, kernel, dtype = model.training, compute.kernel, compute.dtype
    shares = []

    def check(share: float, tolerance: float, what: str) -> None:
        shares.append(share)
        # Negated, so that NaN fails too.
        if not share <= tolerance:
            raise Unpackable(
                f"{what} by {share:.1e} of the logits (kernel {kernel}; up to {tolerance:.0e} is rounding)"
            )

    try:
        model.eval()
        for rows, what in rows_to_test(model.config, packs, prefixes):
            share, where = _difference_from_separate(model, rows, compute)
            tolerance = TOLERANCE[dtype]
            if share > tolerance and dtype != torch.float32:
                tolerance = max(tolerance, _largest_rounding(model, rows, compute))
            check(share, tolerance, f"packed logits of {what} differ from separate ones{where}")
        for rows in synthetic_rows(model.config, prefixes):
            for mode in (False, True) if training else (False,):
                model.train(mode)
                what = "tokens of one document change the logits of another" + " in training mode" * mode
                check(_leak(model, rows, compute), LEAK_TOLERANCE[dtype], what)
        if training and vars(model).get("own_mixer_kernels"):
            # A kernel may begin a state anew in its forward pass only.
            for rows in synthetic_rows(model.config, prefixes):
                what = "the gradient of one document reaches another"
                check(_gradient_leak(model, rows, compute), LEAK_TOLERANCE[dtype], what)
    except Unpackable as error:
        name = model.config.model_type
        if kernel == SEPARATE:
            raise Unpackable(f"{name} can't be computed beside other documents: {error}. {BESIDE_OTHERS}") from error
        raise Unpackable(f"{name} doesn't support packed rows: {error}") from error
    finally:
        model.train(was_training)
    return _allow(model, compute, prefixes, max(shares))


def _allow(model: PreTrainedModel, compute: Compute, prefixes: bool, share: float) -> SelfTest:
    """Set up packed forwards of a model that passes, and return the test."""
    use_kernel(model, compute.kernel)
    allow_packed(model, compute.kernel, prefixes)
    _chunk_head(model, compute)
    tested = SelfTest(compute=compute, share=share, mixers=way_of_mixers(model))
    mixers = f", mixers {tested.mixers}" if tested.mixers else ""
    how = f"kernel {compute.kernel}, {compute.dtype}{mixers}"
    print(f"self-test: packed = separate within {share:.1e} of the logits ({how})", flush=True)
    return tested


def _chunk_head(model: PreTrainedModel, compute: Compute) -> None:
    batch = collate(synthetic_rows(model.config, prefixes=False)[0], compute.kernel).to(compute.device)
    was_training = model.training
    model.eval()
    with compute.autocast(), ExitStack() as gathered:
        if isinstance(model, FSDPModule):
            # The weights outside the layers, as in the model's forward.
            model.unshard()
            gathered.callback(model.reshard)
        inputs = packed_inputs(batch)
        set_segments(model, batch["segments"])
        if compute.kernel == SEPARATE:
            inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        chunked = chunk_head(model, inputs, torch.arange(8, device=compute.device))
    model.train(was_training)
    if not chunked:
        print(
            "the logits of all supervised tokens are in memory together: this model's head can't run in chunks",
            flush=True,
        )


@torch.no_grad()
def _difference_from_separate(
    model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute
) -> tuple[float, str]:
    """Return the largest difference relative to the scale, of packed from separate logits, without the tokens that need not
    agree; and where it is largest. SnaketuneError: separate logits aren't finite."""
    use_kernel(model, compute.kernel)
    batch = collate(rows, compute.kernel).to(compute.device)
    layout = batch["segments"].layout
    sequences = layout.sequences()
    positions_N = torch.from_numpy(np.concatenate([positions_L[prefix:] for positions_L, prefix in sequences]))
    choices = RouterChoices(layout.tokens, TOLERANCE[compute.dtype])
    differences, scales = [], []
    begins = range(0, len(positions_N), CHUNK)
    if len(begins) > CHUNKS:
        print(f"self-test: comparing {CHUNKS * CHUNK:,} of the {len(positions_N):,} tokens of a row", flush=True)
    for begin in np.unique(np.linspace(0, len(begins) - 1, CHUNKS).round().astype(int)) * CHUNK:
        use_own_attention(model)
        separate, at, choices.repeating = [], 0, False
        for positions_L, prefix in sequences:
            own = range(prefix, len(positions_L))[max(begin - at, 0) : max(begin + CHUNK - at, 0)]
            at += len(positions_L) - prefix
            if own:
                tokens_1L = torch.from_numpy(positions_L)[None].to(compute.device)
                inputs = {"input_ids": batch["input_ids"][0][tokens_1L], "use_cache": False}
                columns = torch.arange(own.start, own.stop, device=compute.device)
                choices.begin(tokens_1L)
                with compute.autocast(), choices:
                    separate.append(logits_at(model, inputs, columns)[0])
                _check_finite(model, separate[-1], compute)
        use_kernel(model, compute.kernel)
        choices.repeating = True
        with choices:
            packed_NV = _packed_logits(model, batch, positions_N[begin : begin + CHUNK], compute, choices.begin)
        separate_NV = torch.cat(separate)
        differences.append(largest_differences(packed_NV, separate_NV))
        scales.append(scale_of(separate_NV))
    shares_N = torch.cat(differences) / torch.stack(scales).max()
    worst = int(positions_N[shares_N.nan_to_num(torch.inf).argmax().cpu()])
    document, start = layout.segment_of[worst], layout.starts[layout.segment_of[worst]]
    where = f", most at token {worst - start + 1} of document {document + 1} of {len(layout.lengths)}"
    return difference_quantile(shares_N, compute.dtype), where


def _check_finite(model: PreTrainedModel, logits: torch.Tensor, compute: Compute) -> None:
    # Tokens that a model never generates have -infinity.
    if not (logits < torch.inf).all():
        precision = "" if compute.dtype == torch.float32 else "set training.precision: float32, or "
        raise SnaketuneError(
            f"logits of this {model.config.model_type} aren't finite in {compute.about()['dtype']}, computed for one document "
            f"by its own attention; {precision}use an undamaged checkpoint of the model"
        )


@torch.no_grad()
def _largest_rounding(model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute) -> float:
    """Return by how much packed logits may differ, relative to the scale: in proportion to the model's own rounding, the
    difference of a document's logits alone and followed by as many other tokens, both by its own attention."""
    use_own_attention(model)
    batch = collate(rows, compute.kernel)
    ids_T = batch["input_ids"][0]
    alone, followed, tokens = [], [], 0
    for positions_L, _ in batch["segments"].layout.sequences():
        ids_1L = ids_T[torch.from_numpy(positions_L)][None].to(compute.device)
        columns = torch.arange(ids_1L.shape[1], device=compute.device)
        for ids, logits in ((ids_1L, alone), (torch.cat([ids_1L, ids_1L.flip(1)], 1), followed)):
            with compute.autocast():
                logits.append(logits_at(model, {"input_ids": ids, "use_cache": False}, columns)[0])
        tokens += ids_1L.shape[1]
        if tokens >= CHUNK:
            break
    alone_NV, followed_NV = torch.cat(alone), torch.cat(followed)
    shares_N = largest_differences(followed_NV, alone_NV) / scale_of(alone_NV)
    rounding = difference_quantile(shares_N, compute.dtype)
    largest = min(OWN_ROUNDINGS * rounding, LARGEST_ROUNDING)
    if largest > TOLERANCE[compute.dtype]:
        print(
            f"self-test: a document's logits alone and in a longer sequence differ by {rounding:.1e}, which is this model's "
            f"own rounding; packed ones may differ by {largest:.1e}",
            flush=True,
        )
    return largest


@torch.no_grad()
def _leak(model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute) -> float:
    """Return the largest change relative to the scale, of logits when tokens that aren't visible to them are changed."""
    use_kernel(model, compute.kernel)
    batch = collate(rows, compute.kernel).to(compute.device)
    layout = batch["segments"].layout
    all_T = torch.arange(layout.tokens)
    # Restores the random state at its end, so that all forward passes draw the same numbers.
    drawing_alike = partial(torch.random.fork_rng, [compute.device] if compute.device.type == "cuda" else [])
    choices = RouterChoices(layout.tokens, LEAK_TOLERANCE[compute.dtype])
    with drawing_alike(), choices:
        before_TV = _packed_logits(model, batch, all_T, compute, choices.begin)
    choices.repeating = True
    worst = []
    for parity in (0, 1):
        # Changes the last quarter of every second segment, padding included; shared prompts don't change.
        changed_T = np.zeros(layout.tokens, bool)
        for start, length in list(zip(layout.starts.tolist(), layout.lengths.tolist()))[parity::2]:
            changed_T[start + length - max(length // 4, 1) : start + length] = True
        ids_1T = batch["input_ids"].clone()
        ids_1T[:, changed_T] = ids_1T.roll(layout.tokens // 2, dims=1)[:, changed_T]
        with drawing_alike(), choices:
            after_TV = _packed_logits(model, batch | {"input_ids": ids_1T}, all_T, compute, choices.begin)
        unaffected_T = torch.from_numpy(~mask(layout)[:, changed_T].any(1))
        worst.append(largest_differences(after_TV[unaffected_T], before_TV[unaffected_T]).max())
    return (torch.stack(worst).max() / scale_of(before_TV)).item()


def _gradient_leak(model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute) -> float:
    """Return the largest gradient of logits by embeddings of other documents, relative to the largest by their own."""
    use_kernel(model, compute.kernel)
    batch = collate(rows, compute.kernel).to(compute.device)
    layout = batch["segments"].layout
    chosen_T = torch.from_numpy(layout.segment_of % 2 == 1)
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        logits_NV = _packed_logits(model, batch, chosen_T.nonzero().flatten(), compute)
        (gradient_1TH,) = torch.autograd.grad(logits_NV.float().square().sum(), embedded[-1])
    finally:
        hook.remove()
    size_T = gradient_1TH[0].float().abs().amax(1).cpu()
    return (size_T[~chosen_T].max() / size_T[chosen_T].max()).item()


def _packed_logits(
    model: PreTrainedModel,
    batch: dict[str, Any],
    positions_N: torch.Tensor,
    compute: Compute,
    before_pass: Callable[[torch.Tensor], None] = lambda tokens: None,
) -> torch.Tensor:
    try:
        with compute.autocast():
            return packed_logits(model, batch, positions_N.to(compute.device), before_pass)
    except (Unpackable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Compiled kernels and extensions raise errors of any type.
        if NOT_DETERMINISTIC in str(error):
            raise
        raise Unpackable(f"a packed forward fails ({type(error).__name__}: {first_line(error)})") from error
