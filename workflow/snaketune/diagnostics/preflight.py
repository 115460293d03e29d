"""The `preflight` stage: problems that would stop or slow down trainings, found before the first one of a family
(`diagnostics.family_checks`)."""

from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PreflightSpec

STAGE = Stage(
    module=__name__,
    spec=PreflightSpec,
    payload="findings",
    inputs={
        "tokenizer": exactly_one("tokenizer"),
        "packs": any_number("pack"),
        "corpora": any_number("corpus"),
        "evaluated": any_number("corpus"),
    },
    files=("base",),
    operation=("gpus",),
    # It checks trainings and computes nothing.
    cost=Cost(mb=3000, minutes=10),
    measures=True,
)


def build(
    spec: PreflightSpec,
    work: WorkFolder,
    *,
    tokenizer: Artifact,
    packs: list[Artifact],
    corpora: list[Artifact],
    evaluated: list[Artifact],
    base: list[Path],
) -> Outcome:
    """Fill `work.payload` with `findings.json`; see `check_family`."""
    from snaketune.diagnostics.family_checks import check_family

    return check_family(spec, work, tokenizer=tokenizer, packs=packs, corpora=corpora, evaluated=evaluated, base=base)
