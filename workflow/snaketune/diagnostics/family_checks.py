"""All checks of a family of runs: the environment (disk, file system, Hub), the machine (driver, libraries, memory), the
tokenizer, the rows and the settings."""

from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Pretrained
from snaketune.diagnostics.environment import check_disk_space, check_file_system, check_hub
from snaketune.diagnostics.leaks import check_leaks
from snaketune.diagnostics.run_checks import (
    check_dropped_tokens,
    check_hyperparameters,
    check_missing_answers,
    check_pad_token,
    check_tokenizer_match,
)
from snaketune.errors import SnaketuneError
from snaketune.models.devices import resolve_compute
from snaketune.models.load_model import read_config, scratch_config
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import RAW_FORMAT_VERSION
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun, PreflightSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import check_machine
from snaketune.training.checkpoint.save_model import choose_dtype


def check_family(
    spec: PreflightSpec,
    folder: Path,
    tokenizer: Artifact,
    packs: list[Artifact],
    corpora: list[Artifact],
    evaluated: list[Artifact],
) -> list[Finding]:
    """Return all findings, each once. Args: folder: on the file system of the results; the others as those of the stage."""
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # The first run of the family.
    first = next(run.key for run in spec.runs if run.kind == "sft")
    findings = [
        *check_hub(f"{first}.base", spec.base),
        *check_file_system(folder),
        *check_pad_token(first, chat, tokenizer.manifest),
    ]
    try:
        if config := read_config(spec.base):
            findings += check_tokenizer_match(first, chat, config)
    except SnaketuneError:
        # Reported for each run that starts from it.
        pass
    for run in spec.runs:
        findings += check_hub(f"{run.key}.reference", run.reference)
        findings += _check_run(run, spec, chat, packs[run.pack])
    findings += check_leaks(spec.evaluations, corpora, evaluated)
    findings += check_missing_answers(spec.evaluations, evaluated)
    return list(dict.fromkeys(findings))


def _check_run(run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, pack: Artifact) -> list[Finding]:
    pretrained = isinstance(spec.base, Pretrained)
    findings = [
        *check_dropped_tokens(run.key, pack.manifest),
        *check_hyperparameters(run, pretrained, pack.manifest),
    ]
    if pack.manifest.get("format_version") == RAW_FORMAT_VERSION:
        # TRL's trainer makes its rows itself, and their lengths aren't known yet.
        return findings
    operation = Execution(**run.model_dump(include=set(Execution.model_fields)))
    training, sft = run.run.training, run.kind == "sft"
    try:
        # What the training itself checks when it starts.
        compute = resolve_compute(training.precision)
        config = read_config(spec.base) or scratch_config(spec.base, chat)
        rows, count = PackedRows(pack, "train"), operation.processes
        found = check_machine(run.run, operation, compute, config, rows, dropout=sft, summed=sft, processes=count)
    except SnaketuneError as error:
        do = "correct it first: the training would stop at it"
        return [*findings, Finding(key=run.key, problem=str(error), do=do)]
    for finding in found.findings:
        key = finding.key if finding.key == "flash-attn" else f"{run.key}.{finding.key}"
        findings.append(replace(finding, key=key))
    if found.planned:
        width = choose_dtype(training.save_dtype, config if pretrained else None, compute).itemsize
        findings += check_disk_space(run, found.planned, width, WORK_ROOT.parent)
    return findings
