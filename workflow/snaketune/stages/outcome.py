"""The return value of a stage's `build`: row counts and entries for the manifest and run.json."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Facts about a result, besides its payload.

    Attributes:
        counts: rows read, retained and dropped, by reason. Written to the manifest.
        about: further deterministic facts for the manifest (formats, kernels, scores).
        records: payload files that describe the work and aren't read downstream, such as `quarantine.jsonl`.
        run: facts that differ from run to run (throughput, device). Written to run.json.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    run: dict[str, Any] = field(default_factory=dict)
