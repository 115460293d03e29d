"""Signals to a launched training: it saves a checkpoint before it ends, or ends at once."""

import os
import signal
import subprocess
import sys

import pytest

from snaketune.interrupts import STATUS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_worker_that_ignored_sigterm_while_importing_gets_it_again(tmp_path, number):
    """A worker inherits that SIGTERM is ignored, until it can stop with a checkpoint. Ctrl-C and a closed terminal send it
    too."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import signal, sys, time, pathlib\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "time.sleep(60)\n"
    )
    started = tmp_path / "started"
    outer = (
        "import os, signal, sys, threading, time, pathlib\n"
        # The tests may run under nohup, or in the background of a shell.
        "for number in (signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_DFL)\n"
        "from snaketune.training.launch.processes import run_processes\n"
        "def terminate():\n"
        "    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), int(sys.argv[3]))\n"
        "threading.Thread(target=terminate, daemon=True).start()\n"
        "sys.exit(run_processes([sys.executable, sys.argv[1], sys.argv[2]], dict(os.environ)))\n"
    )
    done = subprocess.run([sys.executable, "-c", outer, str(inner), str(started), str(int(number))], timeout=50)
    assert done.returncode == 7


def test_a_second_ctrl_c_ends_workers_at_once_and_nohup_lets_a_training_go_on(tmp_path):
    task = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(60)\n"
    )
    launcher = (
        "import os, pathlib, signal, sys, threading, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from snaketune.interrupts import install\n"
        "install()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from snaketune.training.launch.processes import run_processes\n"
        "def interrupt():\n"
        "    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
        "    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGINT):\n"
        "        time.sleep(0.5)\n"
        "        print(number.name, flush=True)\n"
        "        os.kill(os.getpid(), number)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "run_processes([sys.executable, '-c', *sys.argv[1:]], dict(os.environ))\n"
    )
    words = [sys.executable, "-c", launcher, task, str(tmp_path / "started")]
    done = subprocess.run(words, timeout=50, capture_output=True, text=True)
    assert done.returncode == STATUS
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["SIGHUP", "SIGINT", "Ctrl-C", "SIGINT"]


def test_workers_on_other_nodes_get_sigterm_through_scancel(tmp_path):
    """SIGTERM to srun kills its step immediately; scancel sends the signal to the workers of the step."""
    tools, step = tmp_path / "tools", tmp_path / "step"
    tools.mkdir()
    # Stands in for scancel: sends the signal to the step's only process.
    (tools / "scancel").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\nkill -USR1 $(cat {tmp_path}/task)\n')
    (tools / "scancel").chmod(0o755)
    task = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(tmp_path / 'task')!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(step)!r}).write_text('17.0\\n')\n"
        "time.sleep(60)\n"
    )
    launcher = (
        "import os, pathlib, signal, sys, threading, time\n"
        "from snaketune.training.launch.processes import run_processes\n"
        f"step = pathlib.Path({str(step)!r})\n"
        "def terminate():\n"
        "    while not step.exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=terminate, daemon=True).start()\n"
        "sys.exit(run_processes([sys.executable, '-c', sys.argv[1]], dict(os.environ), step))\n"
    )
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", launcher, task], env=environment, timeout=50)
    assert done.returncode == 7
    assert (tmp_path / "called").read_text() == "--signal=TERM 17.0\n"
