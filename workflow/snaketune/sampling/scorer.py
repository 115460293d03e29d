"""A function of the user's that scores responses, in a process of its own: `python -m snaketune.sampling.scorer FILE`.

Requests and answers are lines of JSON. What the function prints goes to standard error. A call that takes too long ends the
process, and the next request starts another.
"""

import json
import math
import os
import queue
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from snaketune.errors import SnaketuneError, first_line
from snaketune.stages.cache.libraries import quiet_libraries

SECONDS_TO_START = 120.0
# Columns of the table that identify a response.
KEYS = {"id", "turn", "index"}
READY, ENDED = {"ready": True}, {"error": "the scorer's process ended"}


class Scorer:
    """The process, as a context manager."""

    def __init__(self, file: Path, seconds: float):
        """Args: file: defines `score`; seconds: the longest time of a call."""
        self.file, self.seconds = file, seconds
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def score(self, request: dict[str, Any]) -> dict[str, float] | str:
        """The numbers for one response; why there are none, if the function fails, returns None or takes too long.

        Raises:
            SnaketuneError: the file can't be run, or defines no `score`.
        """
        process = self.process or self._start()
        assert process.stdin
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            self._end()
            return ENDED["error"]
        answer = self._answer(self.seconds)
        if answer is None or answer == ENDED:
            self._end()
        if answer is None:
            return f"it took more than {self.seconds:g} s"
        return answer["numbers"] if "numbers" in answer else answer["error"]

    def _start(self) -> "subprocess.Popen[str]":
        self.answers = queue.Queue()
        process = self.process = subprocess.Popen(
            [sys.executable, "-m", "snaketune.sampling.scorer", str(self.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=_read, args=(process, self.answers), daemon=True).start()
        answer = self._answer(SECONDS_TO_START)
        if answer != READY:
            self._end()
            why = answer["error"] if answer else "its process didn't start in time"
            raise SnaketuneError(f"{self.file}: {why}; expected a function score(prompt, response, row)")
        return process

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if there is none in time."""
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else ENDED

    def _end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


def _read(process: "subprocess.Popen[str]", answers: "queue.Queue[str]") -> None:
    for line in process.stdout or ():
        answers.put(line)
    answers.put("")


def main(file: str) -> None:
    quiet_libraries()
    answers = os.fdopen(os.dup(1), "w")
    # Also what libraries below Python print.
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    sys.path.insert(0, str(Path(file).parent))
    try:
        function = runpy.run_path(file).get("score")
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {first_line(error)}"})
        return
    if not callable(function):
        answer({"error": "it defines no function `score`"})
        return
    answer(READY)
    for line in sys.stdin:
        answer(_called(function, json.loads(line)))


def _called(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(request["prompt"], request["response"], request["row"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}
    if value is None:
        return {"error": "it returned None"}
    numbers = value if isinstance(value, dict) else {"score": value}
    try:
        numbers = {str(name): float(number) for name, number in numbers.items()}
    except (TypeError, ValueError):
        return {"error": f"it returned {str(value)[:80]!r}; expected a number, or a mapping of names to numbers"}
    if taken := KEYS.intersection(numbers):
        return {"error": f"it returned a number called {min(taken)!r}, as the table calls another column"}
    if "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        return {"error": f"it returned {str(value)[:80]!r}; expected finite numbers, one of them `score`"}
    return {"numbers": numbers}


if __name__ == "__main__":
    main(sys.argv[1])
