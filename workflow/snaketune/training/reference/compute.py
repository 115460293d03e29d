"""Compute the log-probabilities of one part of the pairs under the reference model, in one forward pass over packed rows of
both splits: the work of the `ref_pass` stage. The `ref_logps` stage gathers the parts.

An adapter that policies train further stays unmerged for the pairs of the train split, as in the policy. Held-out pairs are for
evaluations, which load saved results, so for them the adapter is merged and rounded as its run saved it; otherwise an unchanged
policy would differ from its reference by that rounding. With 4-bit weights, to which evaluations don't compare, it
stays unmerged for both splits.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.model_files import model_files
from snaketune.engine.model.devices import Compute, resolve_compute, use_threads
from snaketune.engine.model.logprobs import losses_of_rows
from snaketune.engine.model.machine import inspect_machine
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.selftest import SelfTest, self_test
from snaketune.engine.packing.pair_units import find_units
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import SPLITS
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.load_model import own_tokenizer
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import cached_entries
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.tables import write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import library_findings
from snaketune.training.reference.cache_key import computation
from snaketune.training.reference.kept_units import UnitLogps
from snaketune.training.reference.logps_table import FILE, check_finite, schema, sort_rows


@dataclass(frozen=True)
class ReferenceModel:
    """A reference model.

    Attributes:
        results: the reference's result and its base layers, from the top down; empty for an external model, `spec.base`.
        tokenizer: tokenizer of the pairs; only for an external model.
    """

    spec: RefLogpsSpec
    results: tuple[Artifact, ...]
    tokenizer: Sequence[Artifact] = ()

    def stack(self, *, merged: bool = False) -> AdapterStack:
        """The adapter stack without an adapter that stays unmerged. Args: merged: with it, merged as its run saved it."""
        spec, results = self.spec, self.results
        layers, base = results[1:] if spec.apart and not merged else results, spec.base
        if merged and not is_adapter_only(results[0]):
            # The result holds complete weights, so it needs no base layers.
            layers, base = results[:1], None
        folder = (*self.tokenizer, *results)[0].folder
        return AdapterStack(results=layers, base=base, tokenizer=folder, trust_remote_code=spec.trust_remote_code)

    def load(
        self, compute: Compute, packs: list[PackedRows], *, merged: bool = False
    ) -> tuple[torch.nn.Module, SelfTest]:
        """Load the model and run its self-test. Args: merged: as evaluations load it, not as the policies' trainings do."""
        stack, spec = self.stack(merged=merged), self.spec
        longest = max(rows.longest[0] for rows in packs)
        compute = choose_kernel(compute, stack.config(), longest, prefixes=True, dropout=False)
        loaded = stack.load(compute.weights_dtype(frozen=spec.frozen_weights), spec.quantization)
        if not spec.quantization:
            loaded = loaded.to(compute.device)
        use_threads(loaded.config, compute)
        tested = self_test(loaded, packs, compute, training=False)
        if spec.apart and not merged:
            from snaketune.engine.model.adapters import load_adapter

            loaded = load_adapter(loaded, self.results[0].folder / ADAPTER)
        return loaded, tested

    def key_of_units(self, tested: SelfTest, work: WorkFolder, *, merged: bool) -> dict[str, Any]:
        """What affects the log-probabilities of a unit of pairs besides its tokens. Args: merged: as for `load`."""
        spec, device = self.spec, tested.compute.device
        files = map(Path, model_files(spec.base and spec.base.path))
        own_spec = computation(spec, tested.compute.about()["dtype"]) | {
            "token_logps": spec.token_logps,
            "merged": merged,
        }
        machine = [torch.cuda.get_device_name(device)] if device.type == "cuda" else [torch.get_num_threads()]
        return own_spec | {
            "computation": tested.about(),
            "device": [device.type, *machine],
            "weights": [result.content for result in self.results],
            "files": [entry for _, entry in cached_entries("base", files, work.root)],
            "code": code_digest(__name__),
            "versions": [installed_version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")],
        }


def compute_logps(reference: ReferenceModel, work: WorkFolder, pack: Artifact) -> Outcome:
    """Write `logps.arrow` of the pairs, or of the part of them that the spec names, to `work.payload`.

    Raises:
        SnaketuneError: a log-probability isn't finite, or an external model has another vocabulary.
    """
    spec = reference.spec
    # One of several equal ranges of rows, from 1.
    part, parts = (spec.part, spec.parts) if isinstance(spec, RefPassSpec) else (1, 1)
    for result in (*reference.results, *reference.tokenizer):
        result.files()
    compute = resolve_compute(spec.precision)
    report_findings(library_findings(spec, compute, inspect_machine(compute)))
    pack = pack.for_part(part)
    rows_by_split = {split: open_rows(pack, split) for split in SPLITS}
    packs = list(rows_by_split.values())
    if reference.tokenizer:
        check_same_tokens(spec.base, ChatTokenizer.load(reference.tokenizer[0].folder), packs)
    started = time.monotonic()
    model, tested = reference.load(compute, packs)
    parts_of_table, counts, passed = [schema(spec.token_logps).empty_table()], {}, []
    for split, rows in rows_by_split.items():
        numbers = range(len(rows) * (part - 1) // parts, len(rows) * part // parts)
        units = find_units(rows, numbers, documents(pack, split))
        counts[split] = len({pair for unit in units for pair in unit.pairs})
        merged = split == "held_out" and spec.apart and not spec.quantization
        store = RowStore(work.root, reference.key_of_units(tested, work, merged=merged))
        passed.append(UnitLogps(work=work, store=store, token_logps=spec.token_logps, units=units))
        if passed[-1].missing and merged:
            # Free the first model before the second is loaded.
            model = None
            model, _ = reference.load(compute, packs, merged=True)
        what = f"reference, {split}"
        passes = partial(losses_of_rows, model, compute=tested.compute, what=what)
        passed[-1].compute_missing(rows, passes, tested.compute.dtype, what)
        parts_of_table.append(passed[-1].table(split, parts_of_table[0].schema))
    table = sort_rows(pa.concat_tables(parts_of_table))
    check_finite(
        table, f"{[artifact.manifest_path for artifact in reference.results] or spec.base.path} on {pack.manifest_path}"
    )
    write_table(work.payload / FILE, table)
    seconds = time.monotonic() - started
    tokens, computed = (sum(getattr(logps, name) for logps in passed) for name in ("tokens", "computed"))
    weights = compute.weights_dtype(frozen=spec.frozen_weights)
    rows_kept = sorted({logps.store.key for logps in passed})
    return Outcome(
        counts={"pairs": counts},
        about=tested.about() | {"weights_dtype": str(weights).removeprefix("torch."), "rows": rows_kept},
        run={
            "tokens_per_second": round(tokens / seconds, 1),
            "pairs_per_second": round(computed / seconds, 2),
            "pairs_computed": computed,
            "tokens_computed": tokens,
            "tokens": sum(unit.tokens for logps in passed for unit in logps.units),
            # Nats per token, of some pairs that were reused and computed again; 0.0: the same bits.
            "reused_difference": max(
                (logps.difference for logps in passed if logps.difference is not None), default=None
            ),
            "device": str(compute.device),
            "self_test_share": tested.share,
        },
    )


def check_same_tokens(reference: Pretrained, chat: ChatTokenizer, packs: Iterable[PackedRows]) -> None:
    """Check that every token id in the pairs stands for the same text in the tokenizer of an external reference.

    Args:
        chat: tokenizer of the pairs.
        packs: the packed rows of all splits; only tokens that occur in them are checked.
    Raises:
        SnaketuneError: some tokens differ, or the reference has no tokenizer.json.
    """
    tokenizer = own_tokenizer(reference)
    if tokenizer is None:
        raise SnaketuneError(
            f"dpo.reference: {reference.path!r} has no tokenizer.json, so its vocabulary can't be compared with that of the "
            "pairs; add the file, or choose a model that has one"
        )
    used = set().union(*(np.unique(batch["input_ids"]).tolist() for rows in packs for batch in rows.batches))
    if chat.pad_id not in chat.stop_ids:
        # It is only padding: no document contains it.
        used.discard(chat.pad_id)
    if other := sorted(id for id in used if tokenizer.id_to_token(id) != chat.id_to_token(id)):
        first = other[0]
        raise SnaketuneError(
            f"dpo.reference: {len(other)} of {len(used)} tokens in the pairs are different in {reference.path!r}, for instance "
            f"{first}, which is {chat.id_to_token(first)!r} here and {tokenizer.id_to_token(first)!r} there; a reference needs "
            "the same vocabulary as the SFT run"
        )
