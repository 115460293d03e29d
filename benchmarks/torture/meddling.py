"""The `sitecustomize` of every Python process of a chain: logs what each writes, and injects the ordered faults.

Events are logged to `events.jsonl`; faults are ordered in `orders.json`, read when a process starts:

    kill_before: [event, pattern, count]    kill the whole chain before the count-th such event of a path that matches
    slow: [event, pattern, seconds]         delay every such event of a path that matches
    fill: [event, pattern, MB]              allocate memory at the first such event, until the process ends
    no_flock: errno, no_links: errno        error with which these calls fail below `results`
    clock: seconds                          shift of the clock once the file `clock-is-wrong` exists

A process with TORTURE_BOOT in its environment pretends to be on another machine.

Python raises audit events before it opens, renames, links or removes files (`sys.addaudithook`); events for writes of
safetensors are added here.
"""

import json
import os
import re
import sys
import time

CHAIN = os.environ.get("TORTURE_CHAIN", "")
ATTEMPT = "TORTURE_ATTEMPT"
REMOVALS = ("os.remove", "os.rmdir", "shutil.rmtree")
# Their import brings safetensors.
WRITERS = ("snaketune.engine.tensor_files", "snaketune.engine.random_states")
monotonic = time.monotonic_ns


def read_orders() -> dict:
    try:
        with open(f"{CHAIN}/orders.json", encoding="utf-8") as file:  # noqa: PTH123
            return json.load(file)
    except OSError:
        return {}


def path_of(argument) -> str:
    """Return a path relative to the chain; empty if it is elsewhere."""
    try:
        path = os.path.abspath(os.fsdecode(argument))  # noqa: PTH100
    except TypeError:
        return ""
    return path[len(CHAIN) + 1 :] if path.startswith(f"{CHAIN}/results") else ""


def target_of(event: str, arguments: tuple) -> str:
    """Return the path that an event writes; empty if it isn't below the chain."""
    if event == "open":
        path, mode, flags = arguments[:3]
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        writes |= isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return path_of(path) if writes else ""
    if event in ("os.rename", "os.link"):
        return path_of(arguments[1])
    if event in REMOVALS:
        # Below a folder that is removed, names are relative to it.
        name = os.fspath(arguments[0])
        return path_of(name) if os.path.dirname(name) else ""  # noqa: PTH120
    return ""


class Meddler:
    def __init__(self, orders: dict):
        self.event, self.pattern, self.left = orders.get("kill_before") or ("", "", 0)
        self.slow_event, self.slow_pattern, self.seconds = orders.get("slow") or ("", "", 0)
        self.fill_event, self.fill_pattern, self.megabytes = orders.get("fill") or ("", "", 0)
        self.filled = b""
        self.events = os.open(f"{CHAIN}/events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.busy = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "import" and arguments[0] in WRITERS:
            announce_safetensors()
        if self.busy or event not in ("open", "os.rename", "os.link", *REMOVALS):
            return
        self.busy = True
        try:
            if target := target_of(event, arguments):
                if who := os.environ.get(ATTEMPT):
                    line = json.dumps({"at": monotonic(), "who": who, "did": event, "path": target})
                    os.write(self.events, f"{line}\n".encode())
                if event == self.event and re.search(self.pattern, target):
                    self.left -= 1
                    if self.left == 0:
                        kill_all(target)
                if event == self.slow_event and re.search(self.slow_pattern, target):
                    time.sleep(self.seconds)
                if event == self.fill_event and re.search(self.fill_pattern, target) and not self.filled:
                    self.filled = b"x" * (self.megabytes << 20)
                    # SLURM looks once a second.
                    time.sleep(3)
        finally:
            self.busy = False


def kill_all(target: str) -> None:
    from pathlib import Path

    import torture_processes

    Path(CHAIN, "killed").write_text(target, encoding="utf-8")
    torture_processes.kill_chain(Path(CHAIN))
    os.kill(os.getpid(), 9)


def announce_safetensors() -> None:
    """Report writes of safetensors' Rust code before they happen."""
    import safetensors.torch

    save = safetensors.torch.save_file
    if save.__module__ == __name__:
        return

    def save_file(tensors, filename, *arguments, **keywords):
        sys.audit("open", os.fspath(filename), "wb", os.O_WRONLY)
        return save(tensors, filename, *arguments, **keywords)

    safetensors.torch.save_file = save_file


def refuse(no_flock: int, no_links: int) -> None:
    """Make calls fail that a file system doesn't support."""
    import fcntl

    flock, link = fcntl.flock, os.link

    def failing_flock(file, operation):
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")  # noqa: PTH115
        if path.startswith(f"{CHAIN}/results"):
            raise OSError(no_flock, os.strerror(no_flock))
        return flock(file, operation)

    def failing_link(source, target, **keywords):
        if path_of(target):
            raise OSError(no_links, os.strerror(no_links), source)
        return link(source, target, **keywords)

    fcntl.flock = failing_flock if no_flock else flock
    os.link = failing_link if no_links else link


def pretend_machine(boot: str) -> None:
    """Make this process look like one of another machine."""
    import pathlib

    read = pathlib.Path.read_text

    def read_text(path, *arguments, **keywords):
        return boot if str(path) == "/proc/sys/kernel/random/boot_id" else read(path, *arguments, **keywords)

    pathlib.Path.read_text = read_text


def set_clock(seconds: float) -> None:
    """Shift the clock of this process once a file says so."""
    real, real_ns = time.time, time.time_ns

    def shift() -> float:
        return seconds if os.access(f"{CHAIN}/clock-is-wrong", os.F_OK) else 0

    time.time = lambda: real() + shift()
    time.time_ns = lambda: real_ns() + int(shift() * 1e9)


if CHAIN:
    # The process of a stage; its children inherit the attempt's name.
    if "snaketune" in sys.orig_argv[1:4] and "-m" in sys.orig_argv[1:3]:
        os.environ.setdefault(ATTEMPT, f"{os.getpid()}-{monotonic()}")
    given = read_orders()
    refuse(given.get("no_flock", 0), given.get("no_links", 0))
    if "TORTURE_BOOT" in os.environ:
        pretend_machine(os.environ["TORTURE_BOOT"])
    if "clock" in given:
        set_clock(given["clock"])
    sys.addaudithook(Meddler(given))
