"""Who works in a folder is seen there to live: by its process, or by a file that is touched."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host import locks
from snaketune.stages.host.locks import holder, is_free, locked, take


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds as fractions of them."""
    monkeypatch.setattr(locks, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(locks, "SECONDS_BETWEEN_BEATS", 0.1)
    monkeypatch.setattr(locks, "SECONDS_BETWEEN_TRIES", 0.05)


@pytest.fixture
def lock(tmp_path) -> Path:
    return tmp_path / "lock"


def held_elsewhere(lock: Path) -> None:
    """The lock of a process of another machine, which nothing touches."""
    with locked(lock, "demo"):
        content = lock.read_text(encoding="utf-8")
    lock.write_text(re.sub(r"host=.*", "host=elsewhere", content), encoding="utf-8")


def test_a_lock_exists_while_it_is_held_and_names_its_holder(lock):
    with locked(lock, "demo"):
        assert holder(lock).startswith(f"process {os.getpid()} on ")
        first = lock.stat().st_mtime_ns
        time.sleep(0.5)
        assert lock.stat().st_mtime_ns > first
        assert not is_free(lock)
    assert is_free(lock) and not lock.exists()


def test_the_lock_of_a_killed_process_of_this_machine_is_taken_at_once(lock, monkeypatch):
    monkeypatch.setattr(locks, "LEASE_SECONDS", 90.0)
    code = "import sys; from pathlib import Path; from snaketune.stages.host.locks import take; "
    code += "lease = take(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert not take(lock)
        process.send_signal(signal.SIGKILL)
    with locked(lock, "demo"):
        assert holder(lock).startswith(f"process {os.getpid()} on ")


def test_that_of_another_host_is_waited_for_until_nothing_has_touched_it_for_long(lock, capsys):
    held_elsewhere(lock)
    began = time.monotonic()
    with locked(lock, "the demo"):
        assert time.monotonic() - began >= 0.9
    assert re.search(r"waiting for the demo: in use by process \d+ on elsewhere", capsys.readouterr().out)


def test_a_link_in_the_place_of_a_lock_is_refused(lock, tmp_path):
    lock.symlink_to(tmp_path / "of someone else")
    with pytest.raises(SnaketuneError, match="is a link, which no stage makes; remove it"):
        take(lock)


def test_a_holder_whose_lease_was_taken_writes_nothing_more(tmp_path, lock, monkeypatch):
    lost = []
    monkeypatch.setattr(locks, "_end_process", lost.append)
    holding = locked(lock, "demo")
    lease = holding.__enter__()
    work = WorkFolder(tmp_path, lease)
    work.check_held()
    other = tmp_path / "other"
    held_elsewhere(other)
    other.replace(lock)
    with pytest.raises(SnaketuneError, match=r"was taken over by process \d+ on elsewhere .*nothing more"):
        work.check_held()
    for _ in range(100):
        if lost:
            break
        time.sleep(0.05)
    assert "was taken over by" in lost[0]
    lease.release()
    assert lock.exists()


def test_a_folder_that_is_renamed_is_not_said_to_be_taken_over(tmp_path):
    lease = take(tmp_path / "a/b/lock")
    (tmp_path / "a").rename(tmp_path / "moved")
    with pytest.raises(SnaketuneError, match=r"lock no longer exists: it or a folder above it was renamed"):
        WorkFolder(tmp_path / "a/b", lease).check_held()


def test_clean_keeps_what_another_host_works_in(tmp_path, capsys):
    root = tmp_path / "results/.work"
    work = root / "demo/0123"
    work.mkdir(parents=True)
    held_elsewhere(work / "lock")
    clean(root, remove=True)
    assert re.search(r"kept .*0123: in use by process \d+ on elsewhere", capsys.readouterr().out)
    os.utime(work / "lock", (time.time() - 5,) * 2)
    clean(root, remove=True)
    assert not work.exists()
