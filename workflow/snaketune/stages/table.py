"""The table of all stages, found by their declarations: every module below the package with a line `STAGE = Stage(`.

The modules are imported by name, since packages below import from this one and never the other way round. They import nothing
heavy, and nothing that imports this table, at their top.
"""

import heapq
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError
from snaketune.stages.declaration import Stage

PACKAGE = Path(__file__).parent.parent
DECLARATION = b"\nSTAGE = Stage("


def find_stages() -> dict[str, Stage]:
    """All stages by name, each after those whose results it reads.

    Raises:
        SnaketuneError: two modules declare one stage, or an input names a stage that there isn't.
    """
    found: dict[str, Stage] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if DECLARATION not in path.read_bytes():
            continue
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        stage = import_module(module).STAGE
        if stage.module != module:
            raise SnaketuneError(f"{path}: STAGE has module={stage.module!r}; write module=__name__")
        if stage.name in found:
            raise SnaketuneError(
                f"the stage {stage.name} is declared twice, by {found[stage.name].module} and {module}; rename one module"
            )
        found[stage.name] = stage
    return sort_stages(found.values())


def sort_stages(stages: Iterable[Stage]) -> dict[str, Stage]:
    """By name, each after those whose results it reads, ties by name; those that read manifests of any stage are the last.

    Raises:
        SnaketuneError: an input names a stage that there isn't, or stages read each other.
    """
    found = {stage.name: stage for stage in stages}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, stage in found.items():
        sorter.add(name)
        for role, taken in stage.inputs.items():
            for other in taken.stages:
                if other not in found:
                    raise SnaketuneError(
                        f"{stage.module}: STAGE.inputs[{role!r}]: there is no stage {other!r}{unknown(other, found)}"
                    )
                # A stage may continue from a result of its own.
                if other != name:
                    sorter.add(name, other)
    try:
        sorter.prepare()
    except CycleError as error:
        raise SnaketuneError(
            f"stages read each other's results: {' → '.join(error.args[1])}; change their STAGE.inputs"
        ) from None
    ordered: dict[str, Stage] = {}
    ready: list[tuple[bool, str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (found[name].reads_manifests, name))
        _, name = heapq.heappop(ready)
        ordered[name] = found[name]
        sorter.done(name)
    return ordered


STAGES: dict[str, Stage] = find_stages()
