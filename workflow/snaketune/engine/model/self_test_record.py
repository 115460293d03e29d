"""The record of a passed self-test, a file with the difference that it found."""

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True)
class SelfTestRecord:
    """A file that exists once the self-test has passed."""

    path: Path

    def share(self) -> float | None:
        """Return the largest difference from separate logits, relative to their scale; None if no test has passed."""
        try:
            return float(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, share: float) -> None:
        """Record a passed test; several processes may do so at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{uuid4().hex}.partial")
        partial.write_text(repr(share), encoding="utf-8")
        partial.replace(self.path)
