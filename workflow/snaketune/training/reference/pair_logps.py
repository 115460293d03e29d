"""Log-probabilities of units of pairs under the reference model.

A value has, for the unit's C completions, logp float64[C], tokens int32[C] and, if requested, token_logps float32[tokens].
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import completion_logprobs, losses_of_rows
from snaketune.training.reference.kept_units import KeptUnits


@dataclass(kw_only=True)
class PairLogps:
    """The log-probabilities of pairs. Args: model: None if all of them are there; what: names the pass in messages."""

    model: torch.nn.Module | None
    compute: Compute
    what: str
    token_logps: bool
    noun = "pairs"

    def count(self, unit):
        return len(unit.pairs)

    def passes(self, rows, numbers):
        return losses_of_rows(self.model, rows, numbers, self.compute, self.what)

    def encode(self, units, batch, losses_N):
        sums_C, counts_C = completion_logprobs(losses_N, batch)
        sums, counts = sums_C.double().cpu().numpy(), counts_C.cpu().numpy().astype(np.int32)
        # The tokens of a completion are contiguous and in order.
        tokens = (
            (-losses_N.index_select(0, batch["members"]).float() if self.token_logps else losses_N[:0]).cpu().numpy()
        )
        before, values, begin = np.concatenate([[0], np.cumsum(counts)]), {}, 0
        for unit in units:
            span = slice(begin, begin + 2 * len(unit.pairs))
            of_tokens = tokens[before[span.start] : before[span.stop]]
            values[unit.digest] = b"".join(part.tobytes() for part in (sums[span], counts[span], of_tokens))
            begin = span.stop
        return values

    def logps(self, value, unit):
        return decode(value, 2 * len(unit.pairs))[:2]


def logps_table(units: KeptUnits, split: str, schema: pa.Schema) -> pa.Table:
    """The rows of `logps.arrow`, in the order of the units."""
    decoded = [(unit, *decode(units.values[unit.digest], 2 * len(unit.pairs))) for unit in units.units]
    ids = [pair for unit in units.units for pair in unit.pairs]
    counts = np.concatenate([np.empty(0, np.int32), *(entry[2] for entry in decoded)])
    columns = {
        "id": pa.array(np.repeat(np.array(ids, dtype=object), 2), pa.string()),
        "split": pa.array([split] * len(counts), pa.string()),
        "completion": pa.array(np.tile(np.array([0, 1], np.int8), len(ids))),
        "logp": pa.array(np.concatenate([np.empty(0), *(entry[1] for entry in decoded)])),
        "tokens": pa.array(counts),
    }
    if "token_logps" in schema.names:
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        values = np.concatenate([np.empty(0, np.float32), *(entry[3] for entry in decoded)])
        columns["token_logps"] = pa.ListArray.from_arrays(offsets, values)
    return pa.table(columns, schema=schema)


def decode(value: bytes, completions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The summed log-probabilities of a unit's completions, their tokens, and the log-probabilities of these."""
    sums, counts = np.frombuffer(value, "<f8", completions), np.frombuffer(value, "<i4", completions, 8 * completions)
    return sums, counts, np.frombuffer(value, "<f4", offset=12 * completions)
