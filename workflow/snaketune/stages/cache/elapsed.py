"""The time that a result took: the sum over all attempts to build it, also of those that were killed.

    state/attempts.json    seconds of each attempt, those of the running one written every SECONDS_BETWEEN, which is what a kill
                           loses at most

What an attempt did after its last checkpoint is done again by the next one; both count, since both were paid for.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from snaketune.artifacts.manifest import write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder

FILE = "attempts.json"
SECONDS_BETWEEN = 10.0


@contextmanager
def timed(work: WorkFolder) -> Iterator[Callable[[], list[float]]]:
    """Times an attempt while it runs. Yields a function that returns the seconds of each attempt, this one's until now."""
    before, began, ended = _read(work), monotonic(), threading.Event()

    def spent() -> list[float]:
        return [*before, round(monotonic() - began, 3)]

    def keep() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            _write(work, spent())

    thread = threading.Thread(target=keep, name="attempts", daemon=True)
    thread.start()
    try:
        yield spent
    except BaseException:
        _end(thread, ended)
        _write(work, spent())
        raise
    _end(thread, ended)


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join()


def _read(work: WorkFolder) -> list[float]:
    """Nothing of a first attempt, or where the file holds no numbers."""
    try:
        found = [float(seconds) for seconds in json.loads((work.state / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
    return found if all(map(math.isfinite, found)) else []


def _write(work: WorkFolder, spent: list[float]) -> None:
    """No stage fails because of it; where the folder was discarded or taken over, nothing is written."""
    with suppress(SnaketuneError, OSError):
        work.check_held()
        write_json(work.state / FILE, spent)
