"""The table of all stages, each after those whose results it reads.

The modules are imported by name, since packages further down import from this one and never the other way round. At their top
they import nothing heavy, and nothing that imports this table.
"""

from importlib import import_module

from snaketune.stages.declaration import Stage

MODULES = (
    "corpus.read",
    "corpus.decide",
    "corpus.filter",
    "corpus.corpus",
    "tokenization.tokenizer",
    "tokenization.tokenize",
    "packing.plan",
    "packing.write",
    "packing.pack",
    "training.calibrate",
    "diagnostics.preflight",
    "training.teacher",
    "training.sft",
    "training.ref_logps",
    "training.dpo",
    "training.reward",
    "training.merge",
    "publishing.convert",
    "sampling.prompts",
    "sampling.sample",
    "sampling.judge",
    "sampling.rate",
    "sampling.score",
    "sampling.select",
    "evaluation.eval",
    "evaluation.compare",
    "evaluation.race",
    "training.ref_pass",
    "training.teacher_pass",
    "sampling.generate",
    "diagnostics.timing",
    "diagnostics.bottleneck",
    "diagnostics.verification",
    "diagnostics.reproduction",
    "publishing.cards.card",
    "report.report",
)


STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (import_module(f"snaketune.{module}").STAGE for module in MODULES)
}
