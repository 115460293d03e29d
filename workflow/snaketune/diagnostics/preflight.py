"""The `preflight` stage: problems that would stop or slow down trainings, found in seconds before the first one of a family.

A family is an SFT run that starts from a base model, the runs that continue it, and their DPO runs; none of them trains before
these checks have passed. All findings that are certain to stop a run are raised in one error; the others are in the log and the
report. They depend on machine and time, so they are made again wherever the stage runs, and no result depends on them.

    findings.json    findings: severity (stops, warns), where (sft.demo), key (sft.demo.packing.length), found, do
"""

from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.findings import Finding, report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PreflightSpec

# What decides which rows of a corpus are held out, for advice on leaks.
SPLIT = tuple(f"spec.{key}" for key in ("kind", "decontamination", "near_duplicates", "split_seed", "held_out"))
STAGE = Stage(
    module=__name__,
    spec=PreflightSpec,
    payload="findings",
    inputs={
        "tokenizer": exactly_one("tokenizer", entries=("adopted.own_pad_token",)),
        "packs": any_number("pack", entries=("counts", "packing_metadata")),
        "corpora": any_number("corpus", entries=SPLIT),
        "evaluated": any_number("corpus", entries=SPLIT),
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
    """Fill `work.payload` with `findings.json`; SnaketuneError with all findings that are certain to stop a run.

    Args:
        packs: in the order in which the spec's runs number them.
        corpora: those that are trained on, in the order of the packs.
        evaluated: those whose held-out rows the runs' models are evaluated on.
    """
    from snaketune.diagnostics.family_checks import check_family
    from snaketune.training.preflight_record import FINDINGS

    # Several runs may share a finding.
    findings = list(dict.fromkeys(check_family(spec, work.folder, tokenizer, packs, corpora, evaluated)))
    write_json(work.payload / FINDINGS, {"findings": [as_json(finding) for finding in findings]})
    report_findings(findings)
    if not findings:
        print("no finding: nothing would stop or slow down these trainings", flush=True)
    return Outcome(counts={"runs": len(spec.runs), "findings": len(findings)})


def as_json(finding: Finding) -> dict[str, str]:
    return {
        "severity": "stops" if finding.certain else "warns",
        "where": ".".join(finding.key.split(".")[:2]),
        "key": finding.key,
        "found": finding.problem,
        "do": finding.do,
    }
