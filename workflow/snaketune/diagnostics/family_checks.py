"""Checks of the `preflight` stage: problems that would stop or slow down a family's trainings, found in seconds beforehand.

A family is an SFT run that starts from a base model, the runs that continue it, and their DPO runs; none of them trains before
these checks have passed. They cover the environment (disk, file system, Hub), the machine (driver, libraries, memory), the
tokenizer, the rows and the settings. All findings that are certain to stop a run are raised in one error; the others are in the
log and the report.

    findings.json    findings: severity (stops, warns), where (sft.demo), key (sft.demo.packing.length), found, do

The findings depend on machine and time, so they are made again wherever the stage runs, and no result depends on them.
"""

from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Pretrained
from snaketune.diagnostics.dropped_tokens import check_dropped_tokens
from snaketune.diagnostics.environment import check_disk_space, check_file_system, check_hub
from snaketune.diagnostics.hyperparameters import check_hyperparameters
from snaketune.diagnostics.leaks import check_leaks
from snaketune.diagnostics.missing_answers import check_missing_answers
from snaketune.diagnostics.special_tokens import check_pad_token
from snaketune.diagnostics.tokenizer_match import check_tokenizer_match
from snaketune.errors import SnaketuneError
from snaketune.models.devices import resolve_compute
from snaketune.models.load_model import read_config, scratch_config
from snaketune.models.memory_trace import TracedModel
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import RAW_FORMAT_VERSION
from snaketune.stages.cache.work_folders import WORK_ROOT, WorkFolder
from snaketune.stages.findings import Finding, report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PreflightRun, PreflightSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import check_machine
from snaketune.training.checkpoint.save_model import choose_dtype
from snaketune.training.loop.preflight_record import FINDINGS


def check_family(
    spec: PreflightSpec,
    work: WorkFolder,
    *,
    tokenizer: Artifact,
    packs: list[Artifact],
    corpora: list[Artifact],
    evaluated: list[Artifact],
    base: list[Path],
) -> Outcome:
    """Fill `work.payload` with `findings.json`.

    Args:
        packs: in the order in which the spec's runs number them.
        corpora: those that are trained on, in the order of the packs.
        evaluated: those whose held-out rows the runs' models are evaluated on.
    Raises:
        SnaketuneError: with all findings that are certain to stop a run.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # The first run of the family.
    first = next(run.key for run in spec.runs if run.kind == "sft")
    findings = [
        *check_hub(f"{first}.base", spec.base),
        *check_file_system(work.folder),
        *check_pad_token(first, chat, tokenizer.manifest),
    ]
    findings += _check_base(first, spec, chat)
    for run in spec.runs:
        findings += check_hub(f"{run.key}.reference", run.reference)
        findings += _check_run(run, spec, chat, packs[run.pack], WORK_ROOT.parent)
    findings += check_leaks(spec.evaluations, corpora, evaluated)
    findings += check_missing_answers(spec.evaluations, evaluated)
    findings = list(dict.fromkeys(findings))
    write_json(work.payload / FINDINGS, {"findings": [as_json(finding) for finding in findings]})
    report_findings(findings)
    if not findings:
        print("no finding: nothing would stop or slow down these trainings", flush=True)
    return Outcome(counts={"runs": len(spec.runs), "findings": len(findings)})


def _check_base(key: str, spec: PreflightSpec, chat: ChatTokenizer) -> list[Finding]:
    try:
        config = read_config(spec.base)
    except SnaketuneError:
        # Reported for each run that starts from it.
        return []
    return check_tokenizer_match(key, chat, config) if config else []


def as_json(finding: Finding) -> dict[str, str]:
    """Return a finding as the report reads it."""
    return {
        "severity": "stops" if finding.certain else "warns",
        "where": ".".join(finding.key.split(".")[:2]),
        "key": finding.key,
        "found": finding.problem,
        "do": finding.do,
    }


def _check_run(
    run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, pack: Artifact, folder: Path
) -> list[Finding]:
    findings = [
        *check_dropped_tokens(run.key, pack.manifest),
        *check_hyperparameters(run, isinstance(spec.base, Pretrained), pack.manifest),
    ]
    if pack.manifest.get("format_version") == RAW_FORMAT_VERSION:
        # TRL's trainer makes its rows itself, and their lengths aren't known yet.
        return findings
    fits, planned, width = _check_machine(run, spec, chat, pack)
    return findings + fits + (check_disk_space(run, planned, width, folder) if planned else [])


def _check_machine(
    run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, pack: Artifact
) -> tuple[list[Finding], TracedModel | None, int]:
    """Return the findings of the checks that the training itself makes when it starts; the traced model or None; and the bytes
    per parameter of the result."""
    operation = Execution(**run.model_dump(include=set(Execution.model_fields)))
    try:
        compute = resolve_compute(run.run.training.precision)
        config = read_config(spec.base) or scratch_config(spec.base, chat)
        machine_check = check_machine(
            run.run,
            operation,
            compute,
            config,
            PackedRows(pack, "train"),
            dropout=run.kind == "sft",
            summed=run.kind == "sft",
            processes=operation.processes,
        )
    except SnaketuneError as error:
        return [Finding(key=run.key, problem=str(error), do="correct it first: the training would stop at it")], None, 0
    findings = [_with_run_key(run, finding) for finding in machine_check.findings]
    stored = config if isinstance(spec.base, Pretrained) else None
    return findings, machine_check.planned, choose_dtype(run.run.training.save_dtype, stored, compute).itemsize


def _with_run_key(run: PreflightRun, finding: Finding) -> Finding:
    """Return a finding with its key prefixed by the run's key."""
    key = finding.key if finding.key == "flash-attn" else f"{run.key}.{finding.key}"
    return replace(finding, key=key)
