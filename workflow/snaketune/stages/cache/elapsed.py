"""The time that a result took: the sum over all attempts to build it, including those that were killed.

    state/attempts.json    seconds of each attempt; that of the running one is updated every SECONDS_BETWEEN, so a kill loses at
                           most that much

Work after an attempt's last checkpoint is repeated by the next attempt; both count, as both used the machine.
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
    """Measure an attempt while it runs. Yields a function that returns the seconds of each attempt, this one's until now."""
    earlier, started, ended = _read(work), monotonic(), threading.Event()

    def elapsed() -> list[float]:
        return [*earlier, round(monotonic() - started, 3)]

    def update() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            _write(work, elapsed())

    thread = threading.Thread(target=update, name="attempts", daemon=True)
    thread.start()
    try:
        yield elapsed
    except BaseException:
        _end(thread, ended)
        _write(work, elapsed())
        raise
    _end(thread, ended)


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join()


def _read(work: WorkFolder) -> list[float]:
    """Return the seconds of earlier attempts; empty for a first attempt, or if the file is damaged."""
    try:
        attempts = [float(seconds) for seconds in json.loads((work.state / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
    return attempts if all(map(math.isfinite, attempts)) else []


def _write(work: WorkFolder, elapsed: list[float]) -> None:
    """Write the seconds of each attempt. Errors are ignored; a folder that was discarded or taken over isn't written to."""
    with suppress(SnaketuneError, OSError):
        work.check_held()
        write_json(work.state / FILE, elapsed)
