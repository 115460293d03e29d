"""Hostile inputs: each leaves a mark if it is run."""

import pickle
from pathlib import Path

import pytest


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


class Mark:
    """A file that is there once hostile code ran."""

    def __init__(self, folder: Path):
        self.path = folder / "HACKED"

    def bomb(self) -> bytes:
        """A pickle."""
        return pickle.dumps(Bomb(self.path))

    def code(self, more: str = "") -> str:
        """A Python module."""
        return f"from pathlib import Path\nPath({str(self.path)!r}).touch()\n{more}"

    def check(self) -> None:
        assert not self.path.exists(), "hostile code has run"


def works(mark: Mark) -> None:
    """That the bomb is one, or else nothing is shown by its silence."""
    pickle.loads(mark.bomb())  # noqa: S301
    assert mark.path.exists()
    mark.path.unlink()


@pytest.fixture
def mark(tmp_path) -> Mark:
    """Checked at the end of the test."""
    made = Mark(tmp_path)
    works(made)
    yield made
    made.check()
