"""What a frozen model computes of units of packed rows (`engine.packing.units`), where no earlier pass has left it in a
`RowStore`.

Units that an earlier pass computed are reused, also from a pass that was killed. Rows without any such unit are computed as
they are, in the batches of a pass that reuses nothing; the missing units of other rows are put into rows of their own. A unit's
bits don't depend on what it is computed with, where the kernel is `sdpa` on a CPU with one thread and the model is dense (no
experts, no layers with a state). Elsewhere the last bits may depend on it, as they do between two passes over the same rows.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.units import Unit, UnitRows
from snaketune.progress import progress
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder

SECONDS_BETWEEN_FILES = 20.0


class UnitValues(Protocol):
    """What is computed of units, and how it is stored.

    Attributes:
        noun: what `count` counts, in the plural.
    """

    noun: str

    def count(self, unit: Unit) -> int: ...

    def passes(self, rows: Any, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], dict[str, Any], Any]]:
        """Run some rows through the model; yield the numbers of a batch, the batch, and its results."""
        ...

    def encode(self, units: list[Unit], batch: dict[str, Any], results: Any) -> dict[bytes, bytes]:
        """The values of a batch's units by digest."""
        ...

    def logps(self, value: bytes, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
        """Summed log-probabilities in nats, and over how many tokens."""
        ...


@dataclass(kw_only=True)
class KeptUnits:
    """The values of the units of one split.

    Attributes:
        values: by digest of the unit.
        computed, tokens: what was missing and was computed, as `of.count` counts it, and all tokens that were.
    """

    work: WorkFolder
    store: RowStore
    of: UnitValues
    units: list[Unit]
    values: dict[bytes, bytes] = field(init=False)
    computed: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.values = self.store.find(unit.digest for unit in self.units)
        self.store.mark(self.work)

    @property
    def missing(self) -> list[Unit]:
        return [unit for unit in self.units if unit.digest not in self.values]

    def compute_missing(self, rows: PackedRows, what: str) -> None:
        """Compute the missing units of `rows`. Args: what: names the pass in messages."""
        missing = self.missing
        if len(missing) < len(self.units):
            tokens, total = (sum(unit.tokens for unit in units) for units in (missing, self.units))
            reused = self._count(self.units) - self._count(missing)
            print(
                f"{what}: {reused} {self.of.noun} that an earlier attempt or pass computed are reused; "
                f"{tokens} of {total} tokens to compute",
                flush=True,
            )
        if not missing:
            return
        wanted, whole, others = {unit.digest for unit in missing}, {}, []
        for row, units in groupby(self.units, key=lambda unit: unit.row):
            row_units = list(units)
            if all(unit.digest in wanted for unit in row_units):
                whole[row] = row_units
            else:
                others += [unit for unit in row_units if unit.digest in wanted]
        apart = UnitRows(rows, others)
        waiting, last = {}, time.monotonic()

        def results():
            for source, groups in ((rows, whole), (apart, dict(enumerate(apart.groups)))):
                for numbers, batch, results_of_batch in self.of.passes(source, list(groups)):
                    units = [unit for number in numbers for unit in groups[number]]
                    yield units, self.of.encode(units, batch, results_of_batch)

        total = self._count(missing)
        for units, values in progress(results(), what, self.of.noun, total, lambda result: self._count(result[0])):
            self.computed += self._count(units)
            self.tokens += sum(unit.tokens for unit in units)
            self.values |= values
            # Values that aren't finite fail the stage, and are computed again.
            finite = (unit.digest for unit in units if np.isfinite(self.of.logps(values[unit.digest], unit)[0]).all())
            waiting |= {digest: values[digest] for digest in finite}
            if time.monotonic() - last >= SECONDS_BETWEEN_FILES:
                self.work.check_held()
                self.store.add(waiting)
                waiting, last = {}, time.monotonic()
        self.store.add(waiting)
        self.store.merge()

    def _count(self, units: Iterable[Unit]) -> int:
        return sum(map(self.of.count, units))
