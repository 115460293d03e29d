"""The memory cgroups of this process, v1 or v2: limits of a container, a SLURM job or a service, and kills by the kernel.

See admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst of the kernel's documentation.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# The names of the same values in v2 and v1.
LIMIT = ("memory.max", "memory.limit_in_bytes")
USED = ("memory.current", "memory.usage_in_bytes")
EVENTS = ("memory.events", "memory.oom_control")
# v1 has a number near 2**63 for none.
NO_LIMIT = 2**60
# The page cache, which is reclaimed on demand; `total_` of v1 includes the groups below, as every value of v2 does.
CACHE = r"^{}(?:in)?active_file (\d+)$"
KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def available_memory(mount: Path = MOUNT, proc: Path = PROC) -> int | None:
    """Return the bytes available below the memory limits of this process's groups, the least of nested ones; None without."""
    available = []
    for group in _groups(mount, proc):
        with suppress(OSError, StopIteration):
            if (limit := _limit(group)) is not None:
                stat = _read([group / "memory.stat"])
                cache = re.findall(CACHE.format("total_"), stat, re.M) or re.findall(CACHE.format(""), stat, re.M)
                available.append(limit - int(_read(group / name for name in USED)) + sum(map(int, cache)))
    return min(available, default=None)


def oom_kills(mount: Path = MOUNT, proc: Path = PROC) -> dict[str, int]:
    """Return how many processes the kernel has killed for memory since a group exists, by group: of this process's own group
    and those around it up to the outermost limit; without groups that count, of the machine. Empty if nothing counts."""
    groups = [group for group in _groups(mount, proc) if any((group / name).is_file() for name in EVENTS)]
    limited = [number for number, group in enumerate(groups) if _limit(group) is not None]
    counted: dict[str, int] = {}
    with suppress(OSError):
        # A group of this name may be another one after a restart of machine or container.
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        for group in groups[: max(limited, default=0) + 1]:
            if match := KILLS.search(_read(group / name for name in EVENTS)):
                counted[f"{group} ({group.stat().st_ino}, boot {boot})"] = int(match[1])
        if not counted and (match := KILLS.search((proc / "vmstat").read_text(encoding="ascii"))):
            counted[f"{proc / 'vmstat'} (boot {boot})"] = int(match[1])
    return counted


def _groups(mount: Path, proc: Path) -> list[Path]:
    """Return the folders of this process's memory cgroups, from its own to the outermost. Some may not exist: a container may
    see only the outermost, whose limit is its own."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    path_of = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    v1 = next((path for controllers, path in path_of.items() if "memory" in controllers.split(",")), None)
    root, path = (mount / "memory", v1) if v1 is not None else (mount, path_of.get(""))
    if path is None:
        return []
    folder = root / path.strip("/")
    return [group for group in (folder, *folder.parents) if group.is_relative_to(root)]


def _limit(group: Path) -> int | None:
    """Return a group's own limit in bytes; None if it has none."""
    with suppress(OSError, StopIteration, ValueError):
        # v2 has the word `max` for none.
        if (limit := int(_read(group / name for name in LIMIT))) < NO_LIMIT:
            return limit
    return None


def _read(paths: Iterable[Path]) -> str:
    return next(path for path in paths if path.is_file()).read_text(encoding="ascii")
