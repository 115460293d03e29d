"""A function of the user's that scores responses, in a process of its own.

Requests and answers are JSON. A call that takes too long ends the process, and the next request starts another.
"""

import json
import math
import multiprocessing
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

from snaketune.errors import SnaketuneError, first_line
from snaketune.stages.cache.libraries import quiet_libraries

SECONDS_TO_START = 120.0
# Columns of the table that identify a response.
KEYS = {"id", "turn", "index"}
# Not forked: a library's threads and locks don't survive a fork.
SPAWN = multiprocessing.get_context("spawn")


class Scorer:
    """The process, as a context manager."""

    def __init__(self, file: Path, seconds: float):
        """Args: file: defines `score`; seconds: the longest time of a call."""
        self.file, self.seconds = file, seconds
        self.process: SpawnProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def score(self, request: dict[str, Any]) -> dict[str, float] | str:
        """The numbers for one response; why there are none, if the function fails, returns None or takes too long.

        Raises:
            SnaketuneError: the file can't be run, or defines no `score`.
        """
        if self.process is None:
            self._start()
        # If it has ended, there is no answer either.
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(request).encode())
        return self._answer(self.seconds)

    def _start(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, self.file))
        self.process.start()
        theirs.close()
        if why := self._answer(SECONDS_TO_START):
            self._end()
            raise SnaketuneError(f"{self.file}: {why}; expected a function score(prompt, response, row)")

    def _answer(self, seconds: float) -> Any:
        """The next answer of the process; why there is none, after which the process has ended."""
        try:
            if self.pipe.poll(seconds):
                return json.loads(self.pipe.recv_bytes())
            why = f"it took more than {seconds:g} s"
        except (EOFError, OSError):
            why = "the scorer's process ended"
        self._end()
        return why

    def _end(self) -> None:
        if self.process:
            # It has no id if it couldn't be started.
            if self.process.pid:
                self.process.kill()
                self.process.join()
            self.pipe.close()
            self.process = None


def _serve(pipe: Connection, file: Path) -> None:
    """Run in the process: say why there is no function, else "", and then answer requests."""

    def answer(value: Any) -> None:
        pipe.send_bytes(json.dumps(value).encode())

    quiet_libraries()
    sys.path.insert(0, str(file.parent))
    try:
        function = runpy.run_path(str(file)).get("score")
    except Exception as error:
        answer(f"{type(error).__name__}: {first_line(error)}")
        return
    answer("" if callable(function) else "it defines no function `score`")
    with suppress(EOFError):
        while True:
            answer(_called(function, json.loads(pipe.recv_bytes())))


def _called(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, float] | str:
    try:
        value = function(request["prompt"], request["response"], request["row"])
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    if value is None:
        return "it returned None"
    numbers = value if isinstance(value, dict) else {"score": value}
    try:
        numbers = {str(name): float(number) for name, number in numbers.items()}
    except (TypeError, ValueError):
        return f"it returned {str(value)[:80]!r}; expected a number, or a mapping of names to numbers"
    if taken := KEYS.intersection(numbers):
        return f"it returned a number called {min(taken)!r}, as the table calls another column"
    if "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        return f"it returned {str(value)[:80]!r}; expected finite numbers, one of them `score`"
    return numbers
