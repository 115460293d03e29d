"""What a stage hands back when its payload is written."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a stage has to say besides its payload.

    Attributes:
        counts: what came in, was kept, and was dropped, by reason. Goes into the manifest.
        about: further deterministic facts for the manifest (formats, kernels, scores).
        records: payload files that describe the work and aren't read downstream, such as `quarantine.jsonl`.
        run: facts that differ from run to run (throughput, device); go into run.json.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    records: tuple[str, ...] = ()
    run: dict[str, Any] = field(default_factory=dict)
