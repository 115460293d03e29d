"""Log-probabilities of units of pairs (`pair_units`), computed where no earlier pass has left them in a `RowStore`.

Units that an earlier pass computed are reused, also from a pass that was killed. Rows without any such unit are computed as
they are, in the batches of a pass that reuses nothing; the missing units of other rows are put into rows of their own. A unit's
bits don't depend on what it is computed with, where the kernel is `sdpa` on a CPU with one thread and the model is dense (no
experts, no layers with a state). Elsewhere they may depend on it, as between two passes over the same pairs; so some of the
reused units are computed again, and the largest difference is reported. Beyond rounding, nothing is reused.

A value has, for the unit's C completions, logp float64[C], tokens int32[C] and, if requested, token_logps float32[tokens].
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.engine.model.logprobs import completion_logprobs
from snaketune.engine.packing.pair_units import Unit, UnitRows
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.reference_check import OUTLIER, ROUNDING
from snaketune.progress import progress
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder

SECONDS_BETWEEN_FILES = 20.0
# Reused units that are computed again: one, and one for so many missing ones, at most CHECKED.
MISSING_PER_CHECKED, CHECKED = 8, 8
# From rows and the numbers of some of them: the numbers in a batch, the batch, and its losses.
Passes = Callable[[Any, Sequence[int]], Iterator[tuple[Sequence[int], dict[str, Any], torch.Tensor]]]


@dataclass(kw_only=True)
class UnitLogps:
    """Log-probabilities of the units of one split.

    Attributes:
        values: by digest of the unit.
        computed, tokens: missing pairs that were computed, and all tokens that were.
        difference: the largest difference between a reused and a computed unit in nats per token; None if none was compared.
    """

    work: WorkFolder
    store: RowStore
    token_logps: bool
    units: list[Unit]
    values: dict[bytes, bytes] = field(init=False)
    computed: int = 0
    tokens: int = 0
    difference: float | None = None

    def __post_init__(self) -> None:
        self.values = self.store.find(unit.digest for unit in self.units)
        mark = self.work.state / "rows" / self.store.key
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    @property
    def missing(self) -> list[Unit]:
        return [unit for unit in self.units if unit.digest not in self.values]

    def compute_missing(self, rows: PackedRows, passes: Passes, dtype: torch.dtype, what: str) -> None:
        """Compute the missing units of `rows`. Args: dtype: of the computation; what: names it in messages."""
        missing = self.missing
        reused = [unit for unit in self.units if unit.digest in self.values]
        if reused:
            tokens, total = (sum(unit.tokens for unit in units) for units in (missing, self.units))
            print(
                f"{what}: {sum(len(unit.pairs) for unit in reused)} pairs that an earlier attempt or pass computed are "
                f"reused; {tokens} of {total} tokens to compute",
                flush=True,
            )
        if not missing:
            return
        checked = reused[:: -(-len(reused) // min(CHECKED, 1 + len(missing) // MISSING_PER_CHECKED))] if reused else []
        new = self._compute(rows, passes, missing, checked, what)
        self.difference = max((self._difference(unit, new[unit.digest]) for unit in checked), default=None)
        self.values |= new
        if self.difference is not None and not self.difference <= OUTLIER[dtype] * ROUNDING[dtype]:
            print(
                f"{what}: reused pairs differ by {self.difference:.2g} nats per token: all are computed again",
                flush=True,
            )
            self.store.discard()
            again = [unit for unit in reused if unit.digest not in new]
            self.values |= self._compute(rows, passes, again, [], what)
            self.store.add(new)
        self.store.merge()

    def table(self, split: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of `logps.arrow`, in the order of the units."""
        decoded = [(unit, *_decode(self.values[unit.digest], 2 * len(unit.pairs))) for unit in self.units]
        ids = [pair for unit in self.units for pair in unit.pairs]
        counts = np.concatenate([np.empty(0, np.int32), *(entry[2] for entry in decoded)])
        columns = {
            "id": pa.array(np.repeat(np.array(ids, dtype=object), 2), pa.string()),
            "split": pa.array([split] * len(counts), pa.string()),
            "completion": pa.array(np.tile(np.array([0, 1], np.int8), len(ids))),
            "logp": pa.array(np.concatenate([np.empty(0), *(entry[1] for entry in decoded)])),
            "tokens": pa.array(counts),
        }
        if self.token_logps:
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            values = np.concatenate([np.empty(0, np.float32), *(entry[3] for entry in decoded)])
            columns["token_logps"] = pa.ListArray.from_arrays(offsets, values)
        return pa.table(columns, schema=schema)

    def _compute(
        self, rows: PackedRows, passes: Passes, missing: list[Unit], checked: list[Unit], what: str
    ) -> dict[bytes, bytes]:
        wanted, whole, others = {unit.digest for unit in missing}, {}, []
        for row, units in groupby(self.units, key=lambda unit: unit.row):
            row_units = list(units)
            if all(unit.digest in wanted for unit in row_units):
                whole[row] = row_units
            else:
                others += [unit for unit in row_units if unit.digest in wanted]
        apart = UnitRows(rows, [*others, *checked])
        found, waiting, last = {}, {}, time.monotonic()

        def results():
            for source, groups in ((rows, whole), (apart, dict(enumerate(apart.groups)))):
                for numbers, batch, losses_N in passes(source, list(groups)):
                    units = [unit for number in numbers for unit in groups[number]]
                    yield units, _encode(units, batch, losses_N, self.token_logps)

        total = sum(len(unit.pairs) for unit in missing)
        for units, values in progress(
            results(), what, "pairs", total, lambda result: sum(len(u.pairs) for u in result[0])
        ):
            self.computed += sum(len(unit.pairs) for unit in units if unit.digest in wanted)
            self.tokens += sum(unit.tokens for unit in units)
            found |= values
            # Values that aren't finite fail the stage, and are computed again.
            finite = (
                unit.digest for unit in units if np.isfinite(_decode(values[unit.digest], 2 * len(unit.pairs))[0]).all()
            )
            waiting |= {digest: values[digest] for digest in finite if digest in wanted}
            if time.monotonic() - last >= SECONDS_BETWEEN_FILES:
                self.work.check_held()
                self.store.add(waiting)
                waiting, last = {}, time.monotonic()
        self.store.add(waiting)
        return found

    def _difference(self, unit: Unit, new: bytes) -> float:
        kept, counts, _ = _decode(self.values[unit.digest], 2 * len(unit.pairs))
        return float((np.abs(kept - _decode(new, len(kept))[0]) / np.maximum(counts, 1)).max())


def _encode(units: list[Unit], batch: dict[str, Any], losses_N: torch.Tensor, token_logps: bool) -> dict[bytes, bytes]:
    """Return the values of the units of a batch, in the order of its completions, by digest."""
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    sums, counts = sums_C.double().cpu().numpy(), counts_C.cpu().numpy().astype(np.int32)
    # The tokens of a completion are contiguous and in order.
    tokens = (-losses_N.index_select(0, batch["members"]).float() if token_logps else losses_N[:0]).cpu().numpy()
    before, values, begin = np.concatenate([[0], np.cumsum(counts)]), {}, 0
    for unit in units:
        span = slice(begin, begin + 2 * len(unit.pairs))
        of_tokens = tokens[before[span.start] : before[span.stop]]
        values[unit.digest] = b"".join(part.tobytes() for part in (sums[span], counts[span], of_tokens))
        begin = span.stop
    return values


def _decode(value: bytes, completions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sums, counts = np.frombuffer(value, "<f8", completions), np.frombuffer(value, "<i4", completions, 8 * completions)
    return sums, counts, np.frombuffer(value, "<f4", offset=12 * completions)
