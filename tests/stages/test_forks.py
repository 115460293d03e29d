"""The server whose forks run jobs: for whom it forks, and when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from snaketune.stages.host import forks

JOB = """
import sys
from snaketune.stages.host.forks import run_as_fork
if __name__ == "__main__":
    run_as_fork(["job", *sys.argv[1:]], waits=True)
import os, time
print("torch" in sys.modules, sorted(name for name in sys.modules if name.startswith("snaketune")), os.getpid(), flush=True)
time.sleep(int(sys.argv[1]))
"""
DRIVER = """
import os, sys, time
from pathlib import Path
from snaketune.stages.host.forks import VARIABLE, fork_jobs
fork_jobs("export OMP_WAIT_POLICY=PASSIVE;", ["sft"], Path("logs/forks.log"))
print(os.environ[VARIABLE], flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A process that forks jobs, its folder and the environment of its jobs."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    given = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    given.pop(forks.VARIABLE, None)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=folder, env=given, stdout=subprocess.PIPE, text=True
    ) as process:
        variable = process.stdout.readline().strip()
        threads = dict.fromkeys(forks.THREADS, "2")
        yield process, folder, given | threads | {forks.VARIABLE: variable, "OMP_WAIT_POLICY": "PASSIVE"}
        process.kill()


def start(folder: Path, variables: dict[str, str], seconds: int = 0, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "job", str(seconds)]
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, **options)


def test_a_job_is_a_fork_that_imports_the_code_of_now(driver):
    _, folder, variables = driver
    assert start(folder, variables).communicate()[0].startswith("True ['snaketune', 'snaketune.stages',")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "OMP_WAIT_POLICY", "MALLOC_ARENA_MAX", "PYTHONHASHSEED"])
def test_another_value_of_what_imports_read_is_a_plain_start(driver, variable):
    _, folder, variables = driver
    assert start(folder, variables | {variable: "1"}).communicate()[0].startswith("False")
    assert f"not a fork, for {variable}: job 0" in (folder / "logs/forks.log").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_gets_no_fork(driver):
    _, _, variables = driver
    script = (
        "import os, sys, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.connect('\\0' + sys.argv[1]); print(s.recv(1))"
    )
    address = variables[forks.VARIABLE].split()[0]
    assert subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True).stdout == "b''\n"


def test_an_address_of_another_user_gets_nothing(driver, monkeypatch):
    _, _, variables = driver
    monkeypatch.setenv(forks.VARIABLE, variables[forks.VARIABLE])
    monkeypatch.setattr(forks.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(forks.socket, "send_fds", lambda *_: pytest.fail("streams were sent"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert forks.run_as_fork(["job", "0"], waits=True) is None


def test_the_server_ends_with_its_driver_and_jobs_go_on(driver):
    process, folder, variables = driver
    job = start(folder, variables, 2)
    assert job.stdout.readline().startswith("True")
    (server,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert job.wait() == 0
    assert start(folder, variables).communicate()[0].startswith("False")
