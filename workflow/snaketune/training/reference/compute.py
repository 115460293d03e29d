"""Compute the log-probabilities of one part of the pairs under the reference model, in one forward pass over packed rows of
both splits: the work of the `ref_pass` stage. The `ref_logps` stage gathers the parts.

An adapter that policies train further stays unmerged for the pairs of the train split, as in the policy. Held-out pairs are for
evaluations, which load saved results, so for them the adapter is merged and rounded as its run saved it; otherwise an unchanged
policy would differ from its reference by that rounding. With 4-bit weights, to which evaluations don't compare, it
stays unmerged for both splits.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.model.machine import inspect_machine
from snaketune.engine.packing.shards import SPLITS
from snaketune.engine.packing.units import find_units
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.tables import write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import library_findings
from snaketune.training.reference.frozen_model import FrozenModel, check_same_tokens, tokens_in
from snaketune.training.reference.kept_units import KeptUnits
from snaketune.training.reference.logps_table import FILE, check_finite, schema, sort_rows
from snaketune.training.reference.pair_logps import PairLogps, logps_table


def build(
    spec: RefPassSpec | RefLogpsSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    tokenizer: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Write `logps.arrow` of the pairs, or of the part of them that the spec names, to `work.payload`; the inputs are those of
    `ref_logps`.

    Raises:
        SnaketuneError: a log-probability isn't finite, or an external model has another vocabulary.
    """
    reference = FrozenModel(spec, (*model, *base_layers), tokenizer)
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
        chat = ChatTokenizer.load(reference.tokenizer[0].folder)
        check_same_tokens("dpo.reference", spec.base, chat, tokens_in(packs), "the SFT run")
    started = time.monotonic()
    model, tested = reference.load(compute, packs)
    parts_of_table, counts, passed = [schema(spec.token_logps).empty_table()], {}, []
    for split, rows in rows_by_split.items():
        numbers = range(len(rows) * (part - 1) // parts, len(rows) * part // parts)
        units = find_units(rows, numbers, documents(pack, split))
        counts[split] = len({pair for unit in units for pair in unit.pairs})
        merged = split == "held_out" and spec.apart and not spec.quantization
        entries = {"token_logps": spec.token_logps, "merged": merged, "code": code_digest(__name__)}
        store = RowStore(work.root, reference.key_of_units(tested, work, **entries))
        what = f"reference, {split}"
        logps = PairLogps(model=model, compute=tested.compute, what=what, token_logps=spec.token_logps)
        passed.append(KeptUnits(work=work, store=store, of=logps, units=units))
        if passed[-1].missing and merged:
            # Free the first model before the second is loaded.
            model = logps.model = None
            logps.model, _ = reference.load(compute, packs, merged=True)
        passed[-1].compute_missing(rows, what)
        parts_of_table.append(logps_table(passed[-1], split, parts_of_table[0].schema))
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
            "device": str(compute.device),
            "self_test_share": tested.share,
        },
    )
