"""The table of all stages, collected from their declarations: every module of the package with a line `STAGE = Stage(`.

The modules are imported by name, since packages further down import from this one and never the other way round. At their top
they import nothing heavy, and nothing that imports this table.
"""

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
    """Import all declarations and return the stages by name, each after those whose results it reads; SnaketuneError if two
    modules declare one stage, or an input names an unknown stage."""
    stages: dict[str, Stage] = {}
    for path in sorted(path for path in PACKAGE.rglob("*.py") if DECLARATION in path.read_bytes()):
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
    SnaketuneError if an input names an unknown stage, or stages read each other's results."""
    by_name = {stage.name: stage for stage in stages}
    before: dict[str, set[str]] = {}
    for name, stage in by_name.items():
        for role, taken in stage.inputs.items():
            if missing := next((other for other in taken.stages if other not in by_name), None):
                raise SnaketuneError(
                    f"{stage.module}: STAGE.inputs[{role!r}]: there is no stage {missing!r}{unknown(missing, by_name)}"
                )
        # A stage may continue a result of its own.
        before[name] = {other for taken in stage.inputs.values() for other in taken.stages} - {name}
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = " → ".join(error.args[1])
        raise SnaketuneError(f"stages read each other's results: {cycle}; change their STAGE.inputs") from None
    ordered: dict[str, Stage] = {}
    while waiting := before.keys() - ordered.keys():
        ready = (name for name in waiting if before[name] <= ordered.keys())
        name = min(ready, key=lambda name: (by_name[name].reads_manifests, name))
        ordered[name] = by_name[name]
    return ordered


STAGES: dict[str, Stage] = find_stages()
