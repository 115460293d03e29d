"""Who works in a folder is seen there to live: by this machine's kernel, and by other hosts through a file that is touched."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host import locks
from snaketune.stages.host.locks import Holder, Lease, holder, locked


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds as fractions of them."""
    monkeypatch.setattr(locks, "SECONDS_BETWEEN_BEATS", 0.1)
    monkeypatch.setattr(locks, "WATCHED_SECONDS", 0.3)
    monkeypatch.setattr(locks, "SETTLING_SECONDS", 0.1)
    monkeypatch.setattr(locks, "SECONDS_BETWEEN_TRIES", 0.05)


@pytest.fixture
def lock(tmp_path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def no_flock(monkeypatch):
    """Simulate an NFS mount without its lock service."""

    def refused(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)


def elsewhere() -> Holder:
    """A process of another machine."""
    return replace(Holder.here(), host="other", boot="another boot", process=1)


def put(lock: Path, who: Holder, *, beat_ago: float = 0.0) -> Path:
    """Write another process's lease, with its last heartbeat that long ago."""
    lease = Lease(lock).path
    lease.write_text(json.dumps(asdict(who)))
    os.utime(lease, (time.time() - beat_ago,) * 2)
    return lease


def beating(lease: Path, until: threading.Event) -> None:
    while not until.wait(0.05):
        os.utime(lease)


def test_the_holder_of_a_lock_has_a_lease_with_heartbeats(lock):
    with locked(lock, "demo") as lease:
        first = lease.path.stat().st_mtime_ns
        assert lease.is_ours()
        assert lease.holder().process == os.getpid()
        time.sleep(0.5)
        assert lease.path.stat().st_mtime_ns > first
    assert not lease.path.exists()
    assert {path.name for path in lock.parent.iterdir()} == {"lock"}


def test_another_host_that_lives_is_waited_for(lock, capsys):
    lease, done = put(lock, elsewhere()), threading.Event()
    alive = threading.Thread(target=beating, args=(lease, done))
    alive.start()
    taken = []

    def take():
        with locked(lock, "demo abc"):
            taken.append(time.monotonic())

    waiting = threading.Thread(target=take)
    waiting.start()
    time.sleep(0.8)
    assert not taken
    assert capsys.readouterr().out == "waiting for demo abc: in use by process 1 on other\n"
    done.set()
    alive.join()
    # It ends as it should.
    lease.unlink()
    waiting.join(5)
    assert taken


def test_another_host_that_is_silent_is_dead_after_it_was_watched(lock):
    put(lock, elsewhere(), beat_ago=locks.DEAD_SECONDS + 5)
    started = time.monotonic()
    with locked(lock, "demo") as lease:
        assert lease.is_ours()
    assert time.monotonic() - started >= locks.WATCHED_SECONDS


def test_an_outage_of_the_file_server_ends_no_lease(lock):
    """All leases look old when it is back, until the next beats come through."""
    lease, done = put(lock, elsewhere(), beat_ago=locks.DEAD_SECONDS + 5), threading.Event()
    asking = Lease(lock)
    assert not asking.take(flock=True)
    time.sleep(0.2)
    alive = threading.Thread(target=beating, args=(lease, done))
    alive.start()
    time.sleep(0.3)
    assert not asking.take(flock=True)
    done.set()
    alive.join()


def test_the_clocks_of_hosts_are_not_used(lock, monkeypatch):
    put(lock, elsewhere())
    for wrong in (1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: 1.7e9 + wrong)
        asking = Lease(lock)
        asking.take(flock=True)
        time.sleep(0.4)
        assert not asking.take(flock=True)


def test_with_flock_a_dead_process_of_this_machine_causes_no_wait(lock):
    put(lock, replace(Holder.here(), process=1, token="of a killed process"))
    started = time.monotonic()
    with locked(lock, "demo"):
        assert time.monotonic() - started < 0.1


def test_without_flock_the_lease_is_the_lock(lock, no_flock, capsys):
    order = []

    def work(name):
        with locked(lock, "demo"):
            order.append(f"{name} begins")
            time.sleep(0.3)
            order.append(f"{name} ends")

    several = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for one in several:
        one.start()
    for one in several:
        one.join(10)
    names = [entry.split()[0] for entry in order]
    assert names[::2] == names[1::2]
    assert sorted(names[::2]) == ["a", "b", "c"]
    said = capsys.readouterr().out
    assert said.count("no flock in") == 3
    assert f"in use by process {os.getpid()} on " in said


def test_of_two_who_take_a_dead_lease_one_gets_it(lock):
    put(lock, elsewhere(), beat_ago=1000)
    got = []

    def take(asking):
        for _ in range(12):
            if asking.take(flock=False):
                got.append(asking)
                return
            time.sleep(0.05)

    several = [threading.Thread(target=take, args=(Lease(lock),)) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert len(got) == 1
    assert got[0].is_ours()


def test_an_empty_lease_is_dead_in_time(lock):
    """Left by a process that died while it made it."""
    lease = put(lock, elsewhere())
    lease.write_text("")
    assert not Lease(lock).is_free(flock=True)
    os.utime(lease, (time.time() - 1000,) * 2)
    with locked(lock, "demo"):
        pass


def test_a_full_disk_leaves_no_lease(lock, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", full)
        with pytest.raises(OSError, match="No space left"):
            Lease(lock).take(flock=True)
    assert not list(lock.parent.glob("*lease*"))
    assert Lease(lock).take(flock=True)


def test_a_holder_whose_lease_was_taken_writes_nothing_more(tmp_path, lock):
    ended = []
    lease = Lease(lock)
    assert lease.take(flock=True)
    work = WorkFolder(tmp_path, lease)
    work.start()
    (work.payload / "rows").write_text("half")
    work.check_held()
    put(lock, elsewhere())
    with pytest.raises(SnaketuneError, match=r"was taken over by process 1 on other.*resumes from the last checkpoint"):
        work.finish({}, {})
    assert not work.finished.exists()
    # Nor does it wait for that: the next beat ends it.
    lease.beat(ended.append)
    time.sleep(0.4)
    assert len(ended) == 1
    lease.give_back()
    assert lease.path.exists()


@pytest.mark.parametrize("moved", ["results", "results/.work/demo/abc", "results/.work/demo/abc/lock.lease"])
def test_a_folder_that_is_renamed_is_not_said_to_be_taken_over(tmp_path, monkeypatch, moved):
    monkeypatch.chdir(tmp_path)
    folder = Path("results/.work/demo/abc")
    folder.mkdir(parents=True)
    lease = Lease(folder / "lock")
    assert lease.take(flock=True)
    Path(moved).rename("elsewhere")
    missing = moved if "lease" in moved else str(folder)
    with pytest.raises(SnaketuneError, match=rf"^{re.escape(missing)} no longer exists: .* was renamed.*run again"):
        lease.check()


def test_a_holder_that_was_suspended_for_long_ends_when_it_continues(lock):
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from snaketune.stages.host import locks\nlocks.SECONDS_BETWEEN_BEATS = 0.1\n"
        "from snaketune.stages.host.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'demo'):\n    print('held', flush=True); time.sleep(60)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, lock], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        put(lock, elsewhere())
        process.send_signal(signal.SIGCONT)
        assert process.wait(5) == 1
        assert process.stderr.read().startswith(f"error: {lock.parent} was taken over by process 1 on other")


def test_clean_keeps_what_another_host_works_in(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "results/.work/demo/abc"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    lease = put(folder / "lock", elsewhere())
    clean(tmp_path / "results/.work", remove=True)
    assert "in use by process 1 on other" in capsys.readouterr().out
    assert lease.exists()
    assert holder(folder / "lock") == "process 1 on other"
    # On a full disk the file system's clock can't be read.
    monkeypatch.setattr(Lease, "_now", lambda lease: (folder / "no room").stat().st_mtime)
    clean(tmp_path / "results/.work", remove=True)
    assert lease.exists()
    os.utime(lease, (time.time() - 1000,) * 2)
    clean(tmp_path / "results/.work", remove=True)
    assert not folder.exists()
