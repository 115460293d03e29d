"""Memory limits and kills of nested cgroups, v1 and v2, from files as the kernel writes them."""

from pathlib import Path

import pytest

from snaketune.engine.model.cgroups import available_memory, oom_kills

NONE = {"v2": "max", "v1": "9223372036854771712"}
OTHERS = "12:cpuset:/\n1:name=systemd:/elsewhere\n"


@pytest.fixture(params=["v2", "v1"])
def cgroup(request, tmp_path):
    """Functions that write a group's files and the process's group, and the arguments of the functions tested."""
    v1, mount, proc = request.param == "v1", tmp_path / "cgroup", tmp_path / "proc"

    class Cgroup:
        none, arguments = NONE[request.param], (mount, proc)

        @staticmethod
        def group(path: str, limit="none", used: int = 0, cache: int = 0, kills: int | None = 0) -> None:
            folder = (mount / "memory" if v1 else mount) / path
            folder.mkdir(parents=True, exist_ok=True)
            limit = NONE[request.param] if limit == "none" else limit
            # Of shared memory, which counts as `file` and `cache` too, nothing can be reclaimed.
            shared, active, inactive = 7, cache // 2, cache - cache // 2
            stat = f"active_file {active}\ninactive_file {inactive}\n"
            if v1:
                files = {"limit_in_bytes": limit, "usage_in_bytes": used + cache}
                files["stat"] = f"cache 1\ninactive_file 1\nactive_file 1\ntotal_cache {cache + shared}\n" + "".join(
                    f"total_{line}\n" for line in stat.splitlines()
                )
                files["oom_control"] = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
            else:
                files = {"max": limit, "current": used + cache, "stat": f"anon 1\nfile {cache + shared}\n{stat}"}
                files["events"] = f"low 0\nhigh 0\nmax 9\noom 9\noom_kill {kills}\noom_group_kill 0\n"
            for name, text in files.items():
                (folder / f"memory.{name}").write_text(f"{text}\n")

        @staticmethod
        def process(path: str, machine_kills: int = 0) -> None:
            (proc / "self").mkdir(parents=True, exist_ok=True)
            line = f"4:hugetlb,memory:/{path}\n0::/\n" if v1 else f"0::/{path}\n"
            (proc / "self/cgroup").write_text(OTHERS + line)
            (proc / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
            (proc / "sys/kernel/random/boot_id").write_text("b\n")
            (proc / "vmstat").write_text(f"pgfault 1\noom_kill {machine_kills}\n")

    return Cgroup


@pytest.mark.parametrize(
    ("groups", "available"),
    [
        ({"slice/job": {"used": 5}}, None),
        ({"slice/job": {"limit": 100, "used": 30, "cache": 9}}, 70),
        # The least of all around it.
        ({"slice": {"limit": 100, "used": 90}, "slice/job": {"limit": 50, "used": 20}}, 10),
        ({"slice": {"limit": 100, "used": 40}, "slice/job": {"used": 20}}, 60),
        # In a container the path isn't there, and the outermost group is its own.
        ({".": {"limit": 100, "used": 40}}, 60),
        ({"other": {"limit": 1}}, None),
    ],
)
def test_the_memory_available_is_that_of_the_tightest_group(cgroup, groups, available):
    cgroup.process("slice/job")
    for path, values in groups.items():
        cgroup.group(path, **values)
    assert available_memory(*cgroup.arguments) == available


def counts(cgroup) -> dict[str, int]:
    return {str(Path(group.split(" (")[0]).name): count for group, count in oom_kills(*cgroup.arguments).items()}


def test_kills_are_counted_up_to_the_outermost_limit(cgroup):
    cgroup.process("all/job/step", machine_kills=8)
    cgroup.group("all", kills=7)
    cgroup.group("all/job", limit=100, kills=2)
    cgroup.group("all/job/step", kills=1)
    assert counts(cgroup) == {"step": 1, "job": 2}
    # Those of others have another limit, or none.
    cgroup.group("all/job")
    assert counts(cgroup) == {"step": 1}


def test_without_a_group_that_counts_the_machine_does(cgroup):
    cgroup.process("all/job", machine_kills=8)
    assert counts(cgroup) == {"vmstat": 8}
    (cgroup.arguments[1] / "vmstat").unlink()
    assert counts(cgroup) == {}
    (cgroup.arguments[1] / "self/cgroup").unlink()
    assert (available_memory(*cgroup.arguments), counts(cgroup)) == (None, {})
