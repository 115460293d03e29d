"""The record of a passed self-test, a file with the difference that it found."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile


@dataclass(frozen=True)
class PassedTest:
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
        with NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(repr(share))
        Path(file.name).replace(self.path)
