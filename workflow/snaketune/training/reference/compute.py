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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.load_model import own_tokenizer
from snaketune.models.logprobs import completion_logprobs, losses_of_rows
from snaketune.models.machine import inspect_machine
from snaketune.models.packing_support import choose_kernel
from snaketune.models.selftest import SelfTest, self_test
from snaketune.packing.reader import PackedRows, documents
from snaketune.packing.shards import SPLITS
from snaketune.stages.cache.work_folders import WorkFolder, sync
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.progress import progress
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import library_findings
from snaketune.training.reference.logps_table import FILE, check_finite, schema, sort_rows

SECONDS_BETWEEN_CHUNKS = 20.0


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
        tested = self_test(loaded, packs, compute, training=False)
        if spec.apart and not merged:
            from snaketune.models.adapters import load_adapter

            loaded = load_adapter(loaded, self.results[0].folder / ADAPTER)
        return loaded, tested


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
    rows_by_split = {split: PackedRows(pack, split) for split in SPLITS}
    packs = list(rows_by_split.values())
    if reference.tokenizer:
        check_same_tokens(spec.base, ChatTokenizer.load(reference.tokenizer[0].folder), packs)
    chunks, started = Chunks(work, schema(spec.token_logps)), time.monotonic()
    model, tested = reference.load(compute, packs)
    stored, computed, tokens = chunks.pairs(), 0, 0
    counts: dict[str, int] = {}
    if stored:
        print(f"resuming after {len(stored)} pairs that an earlier attempt computed", flush=True)
    for split, rows in rows_by_split.items():
        # The ids of the pairs in each row.
        ids: list[list[str]] = [[] for _ in range(len(rows))]
        for document in documents(pack, split):
            ids[document["row"]].append(document["id"])
        own = range(len(rows) * (part - 1) // parts, len(rows) * part // parts)
        counts[split] = len({pair for row in own for pair in ids[row]})
        rest = [row for row in own if any((split, pair) not in stored for pair in ids[row])]
        if rest and split == "held_out" and spec.apart and not spec.quantization:
            # Free the first model before the second is loaded.
            model = None
            model, _ = reference.load(compute, packs, merged=True)
        what, total = f"reference, {split}", sum(len(ids[row]) for row in rest)
        passes = losses_of_rows(model, rows, rest, tested.compute, what)
        for numbers, batch, losses_N in progress(
            passes, what, "pairs", total, lambda done, ids=ids: sum(len(ids[row]) for row in done[0])
        ):
            pairs = [pair for row in numbers for pair in ids[row]]
            chunks.add(_columns(pairs, split, batch, losses_N, spec.token_logps))
            computed += len(pairs)
            tokens += batch["segments"].layout.document_tokens
    table = sort_rows(chunks.table())
    check_finite(table, f"{[one.manifest_path for one in reference.results] or spec.base.path} on {pack.manifest_path}")
    write_table(work.payload / FILE, table)
    seconds = time.monotonic() - started
    weights = compute.weights_dtype(frozen=spec.frozen_weights)
    return Outcome(
        counts={"pairs": counts},
        about=tested.about() | {"weights_dtype": str(weights).removeprefix("torch.")},
        run={
            "tokens_per_second": round(tokens / seconds, 1),
            "pairs_per_second": round(computed / seconds, 2),
            "pairs_computed": computed,
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
    own = own_tokenizer(reference)
    if own is None:
        raise SnaketuneError(
            f"dpo.reference: {reference.path!r} has no tokenizer.json, so its vocabulary can't be compared with that of the "
            "pairs; add the file, or choose a model that has one"
        )
    used = set().union(*(np.unique(batch["input_ids"]).tolist() for rows in packs for batch in rows.batches))
    if chat.pad_id not in chat.stop_ids:
        # It is only padding: no document contains it.
        used.discard(chat.pad_id)
    if other := sorted(id for id in used if own.id_to_token(id) != chat.id_to_token(id)):
        first = other[0]
        raise SnaketuneError(
            f"dpo.reference: {len(other)} of {len(used)} tokens in the pairs are different in {reference.path!r}, for instance "
            f"{first}, which is {chat.id_to_token(first)!r} here and {own.id_to_token(first)!r} there; a reference needs the "
            "same vocabulary as the SFT run"
        )


def _columns(
    ids: list[str], split: str, batch: dict[str, Any], losses_N: torch.Tensor, token_logps: bool
) -> dict[str, Any]:
    """Columns of `logps.arrow` for a batch with these pairs, in the order of its completions."""
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    counts = counts_C.cpu().numpy()
    columns = {
        "id": pa.array(np.repeat(np.array(ids, dtype=object), 2), pa.string()),
        "split": pa.array([split] * len(counts), pa.string()),
        "completion": pa.array(np.tile(np.array([0, 1], np.int8), len(ids))),
        "logp": pa.array(sums_C.double().cpu().numpy()),
        "tokens": pa.array(counts.astype(np.int32)),
    }
    if token_logps:
        # The tokens of a completion are contiguous and in order.
        values = -losses_N.index_select(0, batch["members"]).float().cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        columns["token_logps"] = pa.ListArray.from_arrays(offsets, values)
    return columns


class Chunks:
    """Computed rows, stored per pair in files from which a later attempt resumes, even if pairs are in other rows by then.

    state/chunks/000000-<digest>.arrow    rows of `logps.arrow`; complete once the file has this name
    """

    def __init__(self, work: WorkFolder, columns: pa.Schema):
        self.work, self.folder, self.schema = work, work.state / "chunks", columns
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[pa.Table] = []
        self._last = time.monotonic()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.arrow"))

    def pairs(self) -> set[tuple[str, str]]:
        """Split and id of every stored pair. Damaged files are removed, so that their pairs are computed again."""
        pairs: set[tuple[str, str]] = set()
        for path in self._files():
            if path.name == self._name(path.name[:6], path):
                table = read_table(path)
                pairs.update(zip(table["split"].to_pylist(), table["id"].to_pylist()))
            else:
                print(
                    f"{path} is damaged: its content doesn't match the digest in its name; its pairs are computed again",
                    flush=True,
                )
                path.unlink()
        return pairs

    def add(self, columns: dict[str, Any]) -> None:
        """Add rows; every SECONDS_BETWEEN_CHUNKS, write the added ones to a file."""
        self._waiting.append(pa.table(columns, schema=self.schema))
        if time.monotonic() - self._last < SECONDS_BETWEEN_CHUNKS:
            return
        self.work.check_held()
        last = max((int(path.name[:6]) for path in self._files()), default=-1)
        partial = self.folder / f"{last + 1:06d}.partial"
        write_table(partial, pa.concat_tables(self._waiting))
        # Synced before the rename, so that a file with its final name is complete even after a power failure.
        sync(partial)
        partial.rename(self.folder / self._name(partial.stem, partial))
        self._waiting, self._last = [], time.monotonic()

    @staticmethod
    def _name(number: str, file: Path) -> str:
        return f"{number}-{digest_file(file).partition(':')[2]}.arrow"

    def table(self) -> pa.Table:
        """All rows, in the order in which they were added."""
        return pa.concat_tables([self.schema.empty_table(), *map(read_table, self._files()), *self._waiting])
