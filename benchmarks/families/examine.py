"""One family through the package's own functions: how it is computed, and whether that is right."""

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.alone import losses_alone
from benchmarks.families.tiny import VOCABULARY, tiny_config, tiny_model
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora
from snaketune.engine.checkpoints import load_weights, save_weights
from snaketune.engine.model.attention import Unpackable, use_own_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.packing_support import INSTEAD, choose_kernel
from snaketune.engine.model.selftest import SelfTest, self_test
from snaketune.engine.packing.shards import IGNORED
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import grow_vocabulary, load_pretrained
from snaketune.models.lora import add_lora

# Segment lengths, prefix lengths, tokens of the row.
DOCUMENTS = (([11, 23, 5], [0, 0, 0], 48), ([6, 30, 9], [0, 0, 0], 45))
PAIRS = (([17, 8], [0, 5], 32), ([9, 4, 6, 12, 7], [0, 9, 3, 0, 8], 48))
# Share of the largest loss or gradient that is rounding in float32.
ROUNDING = 1e-4
CPU = Compute(device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa")


@dataclass
class Outcome:
    """The outcome for a family."""

    family: str
    # Documents, pairs with a shared prompt, and these with adapters: "packed", "hybrid" or "separate", "refused" or "WRONG".
    sft: str = ""
    dpo: str = ""
    lora: str = ""
    # The names of the layers that get adapters by `all-linear`.
    targets: list[str] = field(default_factory=list)
    # "right", or what went wrong in a step, a checkpoint, a model folder or with more tokens.
    trained: str = ""
    # Why documents run separately, and of refusals and failures.
    reason: str = ""
    # As shares of the largest loss or gradient.
    differences: dict[str, float] = field(default_factory=dict)


class Rows(list):
    """Rows with the interface of `PackedRows`."""

    def __init__(self, shapes: tuple):
        super().__init__(_row(seed, *shape) for seed, shape in enumerate(shapes))
        self.has_prefixes = any(any(prefixes) for _, prefixes, _ in shapes)
        self.longest = max((s + p, r) for r, row in enumerate(shapes) for s, p in zip(row[0], row[1]))
        self.fullest = len(shapes) - 1
        self.row_length = max(len(row["input_ids"]) for row in self)


def _row(seed: int, lengths: list[int], prefixes: list[int], row_length: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(8, VOCABULARY, row_length).astype(np.int32)
    supervised = (generator.random(row_length) < 0.7) & (np.arange(row_length) < sum(lengths))
    return {
        "input_ids": ids,
        "labels": np.where(supervised, ids, IGNORED).astype(np.int32),
        "segment_lengths": np.array(lengths, np.int32),
        "prefix_lengths": np.array(prefixes, np.int32),
    }


def examine(family: str) -> Outcome:
    """Make a tiny model of the family and test everything on it. Raises what making the model raises."""
    config = tiny_config(family)
    found = Outcome(family)
    tiny_model(config)(input_ids=torch.full((1, 4), 9), use_cache=False)
    for kind, rows in (("dpo", Rows(PAIRS)), ("sft", Rows(DOCUMENTS))):
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                compute = choose_kernel(CPU, config, rows.longest[0], prefixes=rows.has_prefixes, dropout=False)
                model = tiny_model(config)
                tested = self_test(model, [rows], compute, training=True)
        except Unpackable as error:
            setattr(found, kind, "refused")
            found.reason = str(error)
            continue
        finally:
            # The reason is that of pairs where only these run separately.
            found.reason = found.reason or next(
                (line for line in printed.getvalue().splitlines() if INSTEAD in line), ""
            )
        kernel = tested.compute.kernel
        found.differences[kind] = _difference(model, tiny_model(config), rows, kernel)
        setattr(found, kind, tested.path if found.differences[kind] <= ROUNDING else "WRONG")
        if kind == "dpo":
            try:
                _with_adapters(found, model, tiny_model(config), rows, tested)
            except (SnaketuneError, ValueError, RuntimeError, AttributeError) as error:
                found.lora = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        _train_and_keep(config)
        found.trained = "right"
    except (SnaketuneError, AssertionError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        found.trained = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return found


def _alone(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Compute the losses of supervised tokens, one sequence at a time, without code of the package."""
    losses = []
    for row in rows:
        at = base = 0
        for length, prefix in zip(row["segment_lengths"].tolist(), row["prefix_lengths"].tolist()):
            base = base if prefix else at
            positions = [*range(base, base + prefix), *range(at, at + length)]
            ids = torch.from_numpy(row["input_ids"][positions].astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            for column in range(max(prefix, 1), len(positions)):
                if row["labels"][positions[column]] != IGNORED:
                    losses.append(F.cross_entropy(logits[column - 1], ids[column]))
            at += length
    return torch.stack(losses)


def _with_adapters(
    found: Outcome, packed: PreTrainedModel, separate: PreTrainedModel, rows: Rows, tested: SelfTest
) -> None:
    """Compare both models with the same random adapters on all linear layers."""
    adapted = [add_lora(model, Lora(rank=2, alpha=4, target_modules="all-linear")) for model in (packed, separate)]
    torch.manual_seed(1)
    weights = {name: torch.randn_like(p) * 0.1 for name, p in adapted[0].named_parameters() if p.requires_grad}
    for model in adapted:
        model.load_state_dict(weights, strict=False)
    found.targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in weights} - {"base_layer"})
    found.differences["lora"] = _difference(*adapted, rows, tested.compute.kernel)
    found.lora = tested.path if found.differences["lora"] <= ROUNDING else "WRONG"


def _difference(packed: torch.nn.Module, separate: torch.nn.Module, rows: Rows, kernel: str) -> float:
    """Return the largest difference of losses and gradients, relative to the largest value."""
    for model in (packed, separate):
        model.zero_grad()
    found, expected = token_losses(packed, collate(rows, kernel)), _alone(separate, rows)
    found.sum().backward()
    expected.sum().backward()
    scale = max(p.grad.abs().max().item() for p in separate.parameters() if p.grad is not None)
    shares = [((found - expected).abs().max() / expected.abs().max()).item()]
    for one, other in zip(packed.parameters(), separate.parameters(), strict=True):
        # Experts that no token came to have none.
        found_grad, expected_grad = (torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other))
        shares.append((found_grad - expected_grad).abs().max().item() / scale)
    # Not a number comes out as one.
    return float(np.max(shares))


def _train_and_keep(config: PretrainedConfig) -> None:
    """Test a training step, loading a checkpoint into another model, saving, and a larger vocabulary."""
    rows = Rows(DOCUMENTS)
    model = tiny_model(config)
    use_own_attention(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = collate(rows, "sdpa")
    first = losses_alone(model, batch).mean()
    first.backward()
    optimizer.step()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        trained = losses_alone(model, batch)
        if not trained.mean() < first:
            raise AssertionError(f"a step raised the loss from {first:.4f} to {trained.mean():.4f}")
        save_weights(Path(folder), model)
        other = tiny_model(config)
        load_weights(Path(folder), other)
        if not torch.equal(losses_alone(other, batch), trained):
            raise AssertionError("another model after the checkpoint was read back")
        model.save_pretrained(folder)
        try:
            saved = load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32).eval()
        except SnaketuneError as error:
            # The folder has another name at every run.
            raise AssertionError(str(error).replace(folder, "FOLDER")) from None
        difference = (losses_alone(saved, batch) - trained).abs().max().item()
        if not difference < ROUNDING:
            raise AssertionError(f"another model after the folder was read back: losses differ by {difference:.1e}")
        grow_vocabulary(model, VOCABULARY + 8)
        ids_1T = batch["input_ids"][:, :11]
        grown = model(input_ids=ids_1T, use_cache=False).logits[..., :VOCABULARY]
        if not torch.allclose(grown, saved(input_ids=ids_1T, use_cache=False).logits[..., :VOCABULARY], atol=1e-3):
            raise AssertionError("other logits after the vocabulary grew")
