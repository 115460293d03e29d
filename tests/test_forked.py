"""A fork of tests/forked is, to what it runs, a Python process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import python

MODULE = """
import json, os, resource, signal, sys, time
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "word": os.environ["WORD"], "path": sys.path[:2],
    "loaded": "torch" in sys.modules, "own": sorted(name for name in sys.modules if name.startswith("snaketune")),
    "ignored": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "process": os.getpid(),
    "limits": [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)],
    "umask": os.umask(0), "priority": os.nice(0), "cores": len(os.sched_getaffinity(0)), "leads": os.getpgrp() == os.getpid(),
}), flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep(60)
sys.exit(sys.stdin.read() or 3)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/shown.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def start(folder: Path, *arguments: str, before: str = "", **variables: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(folder / "modules"), "WORD": "naïve"} | variables
    command = ["bash", "-c", f'{before} exec "$0" "$@"', python(), "-m", "shown", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_arguments_folder_environment_streams_and_status_are_those_of_the_caller(folder):
    own = "taskset -pc 0 $$ >/dev/null; renice -n 3 -p $$ >/dev/null;"
    process = start(folder, "a b", "*", before=f"trap '' TERM; ulimit -f 9; ulimit -n 99; umask 27; {own}")
    out, err = process.communicate("ended")
    shown = json.loads(out)
    assert (process.returncode, err) == (1, "ended\n")
    assert shown["arguments"] == ["a b", "*"] and shown["word"] == "naïve"
    assert shown["folder"] == str(folder) and shown["path"] == [str(folder), str(folder / "modules")]
    assert shown["loaded"] and not shown["own"] and shown["ignored"] and shown["leads"]
    assert (
        shown["limits"] == [9 * 1024, 99] and shown["umask"] == 0o27 and shown["priority"] == 3 and shown["cores"] == 1
    )
    process = start(folder)
    assert not json.loads(process.communicate("")[0])["ignored"] and process.returncode == 3


def test_what_is_read_at_import_needs_a_new_process(folder):
    for variable, loaded in (("TORCHDYNAMO_DISABLE", False), ("HF_TOKEN", True)):
        out, _ = start(folder, **{variable: "1"}).communicate("")
        assert json.loads(out)["loaded"] == loaded
    assert subprocess.run([python(), "-c", "import sys; sys.exit('torch' in sys.modules)"], check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_fork(folder, number):
    process = start(folder, "wait")
    pid = json.loads(process.stdout.readline())["process"]
    assert pid != process.pid
    process.send_signal(number)
    assert process.wait(20) == -number
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} outlives its client")


def test_an_interrupt_is_shown_as_python_shows_it(folder):
    process = start(folder, "wait")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1].endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


def test_a_module_that_is_missing_is_python_own_error(folder):
    said = [
        subprocess.run([command, "-m", "not_there"], cwd=folder, capture_output=True, text=True).stderr.split(": ", 1)[
            1
        ]
        for command in (python(), sys.executable)
    ]
    assert said[0] == said[1]
