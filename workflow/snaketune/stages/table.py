"""The table of all stages, each after those whose results it reads.

The modules are imported by name, since packages further down import from this one and never the other way round. At their top
they import nothing heavy, and nothing that imports this table.
"""

from importlib import import_module

from snaketune.errors import SnaketuneError
from snaketune.stages.declaration import Stage
from snaketune.suggestions import unknown

MODULES = (
    "corpus.corpus",
    "tokenization.tokenizer",
    "tokenization.tokenize",
    "packing.plan",
    "packing.write",
    "packing.pack",
    "training.calibrate",
    "diagnostics.preflight",
    "training.sft",
    "training.ref_logps",
    "training.dpo",
    "training.merge",
    "publishing.convert",
    "evaluation.eval",
    "evaluation.race",
    "training.ref_pass",
    "diagnostics.timing",
    "diagnostics.bottleneck",
    "publishing.cards.card",
    "report.report",
)


def table_of(stages: tuple[Stage, ...]) -> dict[str, Stage]:
    """Return stages by name; SnaketuneError if an input names a stage that isn't among those before it."""
    table: dict[str, Stage] = {}
    for stage in stages:
        # A stage may continue a result of its own.
        table[stage.name] = stage
        for role, source in stage.inputs.items():
            if missing := next((name for name in source.stages if name not in table), None):
                problem = f"there is no stage {missing!r} before it in stages/table.py{unknown(missing, table)}"
                raise SnaketuneError(f"{stage.module}: STAGE.inputs[{role!r}]: {problem}")
    return table


STAGES = table_of(tuple(import_module(f"snaketune.{module}").STAGE for module in MODULES))
