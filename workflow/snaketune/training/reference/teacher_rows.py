"""A teacher's most likely tokens for the rows of a pack: the work of the stages `teacher_pass` and `teacher`.

train.arrow, held_out.arrow    `engine.distillation.SCHEMA`, a row for each row of the pack
"""

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.engine.distillation import SCHEMA, most_likely
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.logprobs import losses_of_rows
from snaketune.engine.model.machine import inspect_machine
from snaketune.engine.packing.shards import SPLITS
from snaketune.engine.packing.units import Unit, find_units
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TeacherPassSpec, TeacherSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import library_findings
from snaketune.training.reference.frozen_model import FrozenModel, check_same_tokens
from snaketune.training.reference.gather import parts_of
from snaketune.training.reference.kept_units import KeptUnits

ROWS_PER_BATCH = 64


class TopTokens:
    """The losses and the most likely tokens of units of conversations.

    A value has, for the unit's n supervised tokens, loss float32[n], ids int32[n, k], logps float16[n, k + 1].
    """

    noun = "tokens"

    def __init__(
        self, model: torch.nn.Module, compute: Compute, what: str, k: int, temperature: float, vocabulary: int
    ):
        self.model, self.compute, self.what, self.k = model, compute, what, k
        self.of_logits = most_likely(k, temperature, vocabulary)

    def count(self, unit: Unit) -> int:
        return unit.supervised

    def passes(self, rows: Any, numbers: Sequence[int]) -> Any:
        return losses_of_rows(self.model, rows, numbers, self.compute, self.what, self.of_logits)

    def encode(self, units: list[Unit], batch: dict[str, Any], results: Any) -> dict[bytes, bytes]:
        losses_N, values_U = results
        by_token = [losses_N.float(), *(values.index_select(0, batch["source_rows"]) for values in values_U)]
        arrays, values, begin = [array.cpu().numpy() for array in by_token], {}, 0
        for unit in units:
            span = slice(begin, begin + unit.supervised)
            values[unit.digest] = b"".join(array[span].tobytes() for array in arrays)
            begin = span.stop
        return values

    def logps(self, value: bytes, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
        losses, _, logps = self.decode(value, unit)
        # One value that isn't finite makes the sum so, too.
        return np.array([-losses.sum(dtype=np.float64) + 0 * logps.sum(dtype=np.float64)]), np.array([unit.supervised])

    def decode(self, value: bytes, unit: Unit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, k = unit.supervised, self.k
        ids = np.frombuffer(value, "<i4", n * k, 4 * n)
        return np.frombuffer(value, "<f4", n), ids, np.frombuffer(value, "<f2", offset=4 * n + 4 * n * k)


def build(
    spec: TeacherSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution | None = None,
) -> Outcome:
    """Write the tables of the rows of a pack, or of the part of them that the spec names, to `work.payload`.

    Args:
        tokenizer: of the rows.
        model, base_layers: the teacher's result, and the base layers of one that is an adapter alone; none if `spec.base` is
            the teacher.
        operation: with the pattern of the parts' manifests, if there are parts.
    Raises:
        SnaketuneError: a value isn't finite, or the teacher has other tokens.
    """
    results = (*model, *base_layers)
    teacher = FrozenModel(spec, results, () if results else (tokenizer,))
    if operation and operation.parts:
        return _gathered(teacher, work, pack, operation)
    part, parts = (spec.part, spec.parts) if isinstance(spec, TeacherPassSpec) else (1, 1)
    for result in (*teacher.results, tokenizer):
        result.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    model_of_tokens = Pretrained(path=str(teacher.results[0].folder)) if teacher.results else spec.base
    check_same_tokens("teacher", model_of_tokens, chat, set(range(chat.vocab_size)), "the runs that it teaches")
    compute = resolve_compute(spec.precision)
    report_findings(library_findings(spec, compute, inspect_machine(compute)))
    pack, started = pack.for_part(part), time.monotonic()
    rows_by_split = {split: open_rows(pack, split) for split in SPLITS}
    model, tested = teacher.load(compute, list(rows_by_split.values()))
    k = min(spec.k, chat.vocab_size)
    entries = {"k": k, "temperature": spec.temperature, "vocabulary": chat.vocab_size, "code": code_digest(__name__)}
    store = RowStore(work.root, teacher.key_of_units(tested, work, **entries))
    kept: dict[str, KeptUnits] = {}
    for split, rows in rows_by_split.items():
        numbers = range(len(rows) * (part - 1) // parts, len(rows) * part // parts)
        what = f"teacher, {split}"
        top = TopTokens(model, tested.compute, what, k, spec.temperature, chat.vocab_size)
        kept[split] = KeptUnits(work=work, store=store, of=top, units=find_units(rows, numbers))
        kept[split].compute_missing(rows, what)
        _write(work, split, _tables(kept[split], top, numbers, pack))
    seconds = time.monotonic() - started
    losses = {split: _loss(units) for split, units in kept.items()}
    computed = sum(units.computed for units in kept.values())
    return Outcome(
        counts={"tokens": {split: sum(unit.supervised for unit in units.units) for split, units in kept.items()}},
        about=tested.about() | {"k": k, "temperature": spec.temperature, "losses": losses, "rows": [store.key]},
        run={
            "tokens_per_second": round(sum(units.tokens for units in kept.values()) / seconds, 1),
            "tokens_computed": computed,
            "tokens": sum(unit.tokens for units in kept.values() for unit in units.units),
            "device": str(compute.device),
            "self_test_share": tested.share,
        },
    )


def _loss(kept: KeptUnits) -> float | None:
    """The mean loss of the supervised tokens in nats."""
    sums = [kept.of.logps(kept.values[unit.digest], unit) for unit in kept.units]
    tokens = sum(int(counts[0]) for _, counts in sums)
    return -float(sum(logp[0] for logp, _ in sums)) / tokens if tokens else None


def _tables(kept: KeptUnits, top: TopTokens, numbers: range, pack: Artifact) -> Iterable[pa.Table]:
    units_of_row = {row: list(units) for row, units in groupby(kept.units, key=lambda unit: unit.row)}
    for begin in range(numbers.start, numbers.stop, ROWS_PER_BATCH):
        columns: tuple[list[np.ndarray], ...] = [], []
        for row in range(begin, min(begin + ROWS_PER_BATCH, numbers.stop)):
            decoded = [top.decode(kept.values[unit.digest], unit)[1:] for unit in units_of_row.get(row, ())]
            for column, dtype, parts in zip(columns, (np.int32, np.float16), zip(*decoded) if decoded else ((), ())):
                column.append(np.concatenate([np.empty(0, dtype), *parts]))
        if not all(np.isfinite(values).all() for values in columns[1]):
            raise SnaketuneError(
                f"teacher: log-probabilities of rows from {begin} on of {pack.manifest_path} aren't finite; set precision: "
                "float32"
            )
        lists = [
            pa.ListArray.from_arrays(
                np.cumsum([0, *map(len, column)]).astype(np.int32), np.concatenate(column), type=field.type
            )
            for column, field in zip(columns, SCHEMA, strict=True)
        ]
        yield pa.table(lists, schema=SCHEMA)


def _write(work: WorkFolder, split: str, tables: Iterable[pa.Table]) -> None:
    with pa.OSFile(str(work.payload / f"{split}.arrow"), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=ROWS_PER_BATCH)


def _gathered(teacher: FrozenModel, work: WorkFolder, pack: Artifact, operation: Execution) -> Outcome:
    parts = parts_of(teacher, pack, operation)
    numbered = sorted(parts, key=lambda part: part.manifest["spec"]["part"])
    for split in SPLITS:
        tables = [read_table(part.file(f"{split}.arrow")) for part in numbered]
        expected = len(open_rows(pack, split))
        if (found := sum(map(len, tables))) != expected:
            raise SnaketuneError(f"{operation.parts}: {found} of {expected} rows are in the parts; rebuild them")
        # In the batches that one job writes.
        whole = pa.concat_tables([SCHEMA.empty_table(), *tables])
        batches = range(0, len(whole), ROWS_PER_BATCH)
        _write(work, split, (whole.slice(begin, ROWS_PER_BATCH).combine_chunks() for begin in batches))
    about = {key: numbered[0].manifest[key] for key in ("dtype", "kernel", "self_test", "k", "temperature")}
    counts = {split: sum(part.manifest["counts"]["tokens"][split] for part in parts) for split in SPLITS}
    losses = {
        split: sum(
            (part.manifest["losses"][split] or 0.0) * part.manifest["counts"]["tokens"][split] for part in numbered
        )
        / counts[split]
        if counts[split]
        else None
        for split in SPLITS
    }
    rows = sorted({key for part in parts for key in part.manifest["rows"]})
    return Outcome(counts={"tokens": counts}, about=about | {"losses": losses, "rows": rows}, run={"parts": len(parts)})
