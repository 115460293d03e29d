"""Disks that are full for a while, read-only, or without locks and links."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.torture.chain import Chain
from benchmarks.torture.processes import kill_chain
from benchmarks.torture.trials import SECONDS, Failed, Trial

# Bytes that an empty file or folder takes on a tmpfs.
PAGE = 4096
UNKNOWN = {
    "flock fails: ENOLCK": {"no_flock": errno.ENOLCK},
    "flock fails: ENOSYS": {"no_flock": errno.ENOSYS},
    "hard links refused: EPERM": {"no_links": errno.EPERM},
    "hard links refused: EMLINK": {"no_links": errno.EMLINK},
}


def full(trial: Trial) -> None:
    """The disk fills up while a stage writes, and is enlarged afterwards."""
    chain = trial.before(trial.point)
    if may_mount():
        trial.counts["by"] = "tmpfs"
        # Small results write much more than they store, or much less, so only the beginning may fit.
        with small_disk(chain, free=int(trial.drawn.uniform(0, 0.4) * written_by(trial))) as enlarge:
            said = chain.wait(chain.start(*trial.targets), SECONDS)
            trial.check_message(said, fails=None)
            trial.hit(said.status != 0)
            enlarge()
            trial.recover(unlock=False)
        return
    trial.counts["by"] = "RLIMIT_FSIZE"
    # In KiB, and Snakemake's own files have to fit.
    limit = trial.drawn.randint(16, 64)
    trial.check_message(chain.wait(chain.start(*trial.targets, before=f"ulimit -f {limit}"), SECONDS), fails=None)
    trial.recover(unlock=False)


def read_only(trial: Trial) -> None:
    """Make the results folder read-only for a while."""
    chain = trial.before("plan", to="pack")
    with unwritable(chain.results):
        trial.check_message(chain.wait(chain.start(*trial.targets), SECONDS))
    trial.recover(unlock=False)


def unknown_calls(trial: Trial) -> None:
    """Run on file systems without locks or links, with one kill and resume."""
    chain = trial.having(())
    orders = UNKNOWN[trial.point]
    chain.order(**orders)
    trial.kill(chain.start(), after=trial.drawn.uniform(5, trial.reference.seconds))
    trial.recover(unlock=True, orders=orders)
    if "no_flock" in orders and "no flock in" not in chain.read("first.log") + chain.read("again.log"):
        raise Failed("no process called flock")


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def mount(*arguments: object, command: str = "mount") -> None:
    subprocess.run([command, *map(str, arguments)], check=True)


def written_by(trial: Trial) -> int:
    """Bytes of the stage's results in pages, without hard links to each other and to results of earlier stages."""
    results = trial.reference.chain.results
    folders = (results / ".work" / trial.point, results / trial.point)
    own: dict[int, int] = {}
    others: set[int] = set()
    for path in results.rglob("*"):
        if path.is_file() and not any(path.is_relative_to(folder) for folder in folders):
            others.add(path.stat().st_ino)
        elif path.is_file() and path.name != "lock":
            own[path.stat().st_ino] = -(-path.stat().st_size // PAGE) * PAGE
    return sum(size for inode, size in own.items() if inode not in others)


@contextmanager
def small_disk(chain: Chain, *, free: int) -> Iterator[Callable[[], None]]:
    """The results on a disk of their own with so many bytes free; yields a function that enlarges it."""
    there = chain.results.with_name("results-until-now")
    chain.results.mkdir(exist_ok=True)
    chain.results.rename(there)
    chain.results.mkdir()
    mount("-t", "tmpfs", "-o", "size=1g", "torture", chain.results)
    try:
        subprocess.run(["cp", "-a", f"{there}/.", str(chain.results)], check=True)
        used = os.statvfs(chain.results)
        size = (used.f_blocks - used.f_bfree) * used.f_bsize + free // PAGE * PAGE
        mount("-o", f"remount,size={max(size, PAGE)}", chain.results)
        yield lambda: mount("-o", f"remount,size={2**30}", chain.results)
    finally:
        kill_chain(chain.folder)
        mount(chain.results, command="umount")


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Make a folder unwritable, by a mount (which binds root too) or by its permissions."""
    if may_mount():
        mount("--bind", folder, folder)
        try:
            mount("-o", "remount,ro,bind", folder)
            yield
        finally:
            mount(folder, command="umount")
        return
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o755)
