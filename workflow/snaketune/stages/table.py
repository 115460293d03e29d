"""The table of all stages, collected from their declarations: every module of the package with a line `STAGE = Stage(`.

The modules are imported by name, since packages further down import from this one and never the other way round. At their top
they import nothing heavy, and nothing that imports this table.
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
    """Import all declarations and return the stages by name, each after those whose results it reads.

    Raises:
        SnaketuneError: two modules declare one stage, or an input names an unknown stage.
    """
    stages: dict[str, Stage] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if DECLARATION not in path.read_bytes():
            continue
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        stage = import_module(module).STAGE
        if stage.module != module:
            raise SnaketuneError(f"{path}: STAGE has module={stage.module!r}; write module=__name__")
        if stage.name in stages:
            raise SnaketuneError(
                f"the stage {stage.name} is declared twice, by {stages[stage.name].module} and {module}; rename one module"
            )
        stages[stage.name] = stage
    return sort_stages(stages.values())


def sort_stages(stages: Iterable[Stage]) -> dict[str, Stage]:
    """Sort stages so that each follows those whose results it reads, ties by name; those that read any manifests are last.

    Raises:
        SnaketuneError: an input names an unknown stage, or stages read each other's results.
    """
    by_name = {stage.name: stage for stage in stages}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, stage in by_name.items():
        sorter.add(name)
        for role, taken in stage.inputs.items():
            for other in taken.stages:
                if other not in by_name:
                    raise SnaketuneError(
                        f"{stage.module}: STAGE.inputs[{role!r}]: there is no stage {other!r}{unknown(other, by_name)}"
                    )
                # A stage may continue a result of its own.
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
            heapq.heappush(ready, (by_name[name].reads_manifests, name))
        _, name = heapq.heappop(ready)
        ordered[name] = by_name[name]
        sorter.done(name)
    return ordered


STAGES: dict[str, Stage] = find_stages()
