"""A server ends with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A server with a child process; it ignores SIGTERM if the second argument is `stubborn`.
SERVER = """
import signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{child.pid}")
print("ready", flush=True)
time.sleep(600)
"""
JOB = """
import subprocess, sys, time
supervisor = [sys.executable, "-m", "snaketune.sampling.supervisor", sys.executable, "-c", *sys.argv[1:]]
process = subprocess.Popen(supervisor, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
print(process.stdout.readline().decode(), process.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_and_its_children_end_when_the_job_is_killed(tmp_path, number):
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, SERVER, str(tmp_path / "pid"), "obedient"], stdout=subprocess.PIPE, text=True
    )
    assert "ready" in job.stdout.readline()
    child = int((tmp_path / "pid").read_text())
    assert is_alive(child)
    os.kill(job.pid, number)
    job.wait()
    assert ends(child)


def test_a_server_that_ignores_the_signal_is_killed(tmp_path):
    command = "import sys; from snaketune.sampling import supervisor; supervisor.SECONDS_TO_END = 0.2; "
    command += "supervisor.main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", command, sys.executable, "-c", SERVER, str(tmp_path / "pid"), "stubborn"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    process.stdin.close()
    assert ends(int((tmp_path / "pid").read_text())) and process.wait(10) is not None


def test_the_status_is_that_of_the_server():
    command = [sys.executable, "-m", "snaketune.sampling.supervisor", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 7
