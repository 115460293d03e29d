"""The `ref_logps` stage: log-probabilities of every pair's completions under the reference model, as their own artifact.

One forward pass over the packed pairs, both splits. DPO runs that differ in beta, loss or learning rate share it, and
none of them has a reference model in memory.

    logps.arrow: id, split, chosen_logp, rejected_logp (summed, float64), chosen_tokens, rejected_tokens
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.models.devices import resolve_compute
from snaketune.models.logprobs import pair_logprobs_of
from snaketune.models.machines import look
from snaketune.models.packable import check_config
from snaketune.models.selftest import self_test
from snaketune.models.stacked import Stack
from snaketune.packing.reader import PackedRows, documents
from snaketune.packing.shards import SPLITS
from snaketune.stages.needs import tell
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec
from snaketune.stages.work import WorkFolder
from snaketune.tables import write_table
from snaketune.training.fitness import of_libraries
from snaketune.training.reference import FILE, check_finite, schema


def build(
    spec: RefLogpsSpec,
    work: WorkFolder,
    *,
    model: Artifact,
    pack: Artifact,
    beneath: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Fill `work.payload` with `logps.arrow`.

    Args:
        beneath, base: what lies beneath the model, if that is an adapter alone.
    Raises:
        SnaketuneError: a log-probability that isn't finite.
    """
    for result in (model, *beneath):
        result.files()
    reference = Stack(
        results=(model, *beneath),
        base=spec.base,
        tokenizer=model.folder,
        trust_remote_code=spec.trust_remote_code,
    )
    compute = resolve_compute(spec.precision)
    tell(of_libraries(spec, compute, look(compute)))
    rows_by_split = {split: PackedRows(pack, split) for split in SPLITS}
    check_config(
        reference.config(),
        max(rows.longest[0] for rows in rows_by_split.values()),
        prefixes=True,
        kernel=compute.kernel,
    )
    loaded = reference.load(compute.weights_dtype(frozen=spec.frozen_weights), spec.quantization)
    if not spec.quantization:
        loaded = loaded.to(compute.device)
    tested = self_test(loaded, list(rows_by_split.values()), compute, training=False)
    started, tokens, counts = time.monotonic(), 0, {}
    columns: dict[str, list[Any]] = {name: [] for name in schema().names}
    for split, rows in rows_by_split.items():
        if not len(rows):
            counts[split] = 0
            continue
        ids = [document["id"] for document in documents(pack, split)]
        sums, lengths = pair_logprobs_of(loaded, rows, compute, f"reference, {split}")
        columns["id"] += ids
        columns["split"] += [split] * len(ids)
        columns["chosen_logp"] += sums[:, 0].tolist()
        columns["rejected_logp"] += sums[:, 1].tolist()
        columns["chosen_tokens"] += lengths[:, 0].tolist()
        columns["rejected_tokens"] += lengths[:, 1].tolist()
        tokens += rows.tokens
        counts[split] = len(ids)
    check_finite(columns, f"{model.manifest_path} on {pack.manifest_path}")
    write_table(work.payload / FILE, pa.table(columns, schema=schema()))
    return Outcome(
        counts={"pairs": counts, "tokens": tokens},
        about=tested.about(),
        run={
            "tokens_per_second": round(tokens / (time.monotonic() - started), 1),
            "device": str(compute.device),
            "self_test_share": tested.share,
        },
    )
