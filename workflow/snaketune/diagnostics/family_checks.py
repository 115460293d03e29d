"""All checks of a family of runs: environment, machine (driver, libraries, memory), tokenizer, rows and settings."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.diagnostics import run_checks
from snaketune.diagnostics.environment import check_disk_space, check_file_system, check_hub
from snaketune.diagnostics.leaks import check_leaks
from snaketune.diagnostics.new_tokens import check_new_tokens
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import RAW_FORMAT_VERSION
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import read_config, scratch_config
from snaketune.models.memory import trace_model
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun, PreflightSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import check_machine
from snaketune.training.save_model import choose_dtype


def check_family(
    spec: PreflightSpec,
    folder: Path,
    tokenizer: Artifact,
    packs: list[Artifact],
    corpora: list[Artifact],
    evaluated: list[Artifact],
) -> Iterator[Finding]:
    """Yield all findings. Args: folder: on the file system of the results; the others are the inputs of the stage."""
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # The first run of the family.
    first = next(run.key for run in spec.runs if run.kind == "sft")
    yield from check_hub(f"{first}.base", spec.base)
    yield from check_file_system(folder)
    yield from run_checks.check_pad_token(first, chat, tokenizer.manifest)
    config = None
    # A config that can't be read is reported for each run that starts from it.
    with suppress(SnaketuneError):
        config = read_config(spec.base)
    if config:
        yield from run_checks.check_tokenizer_match(first, chat, config)
    for run in spec.runs:
        yield from check_hub(f"{run.key}.reference", run.reference)
        yield from _check_run(run, spec, chat, packs)
    trained, held_out = ({one.folder.parent.name: one for one in some} for some in (corpora, evaluated))
    yield from check_leaks(spec.evaluations, trained, held_out)
    yield from run_checks.check_missing_answers(spec.evaluations, held_out)


def _rows_of(packs: list[Artifact]) -> list[PackedRows | None]:
    """Return the training rows of the packs; None for raw ones."""
    return [None if _is_raw(pack) else open_rows(pack, "train") for pack in packs]


def _is_raw(pack: Artifact) -> bool:
    # TRL's trainer makes its rows itself, and their lengths aren't known yet.
    return pack.manifest.get("format_version") == RAW_FORMAT_VERSION


def _check_raw(run: PreflightRun, base: Pretrained, chat: ChatTokenizer, packs: list[Artifact]) -> Iterator[Finding]:
    # The training itself reports a config that can't be read, and modules that don't exist.
    with suppress(SnaketuneError):
        config, compute = read_config(base), resolve_compute(run.run.training.precision)
        if planned := trace_model(config, compute, lora=run.run.lora, trainable=run.run.training.trainable):
            yield from check_new_tokens(run, base, config, chat, planned, _rows_of(packs), compute)


def _check_run(run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, packs: list[Artifact]) -> Iterator[Finding]:
    pretrained, pack = isinstance(spec.base, Pretrained), packs[run.pack]
    yield from run_checks.check_dropped_tokens(run.key, pack.manifest)
    yield from run_checks.check_hyperparameters(run, pretrained, pack.manifest)
    yield from run_checks.check_raced_rows(run, pack.manifest)
    if _is_raw(pack):
        if pretrained:
            yield from _check_raw(run, spec.base, chat, packs)
        return
    operation = Execution(**run.model_dump(include=set(Execution.model_fields)))
    training, sft = run.run.training, run.kind == "sft"
    try:
        # What the training itself checks when it starts.
        compute = resolve_compute(training.precision)
        config = read_config(spec.base) or scratch_config(spec.base, chat)
        rows = open_rows(pack, "train")
        summed = sft and run.run.loss == "nll" and not rows.weighted
        found = check_machine(run.run, operation, compute, config, rows, dropout=sft, summed=summed)
    except SnaketuneError as error:
        yield Finding(key=run.key, problem=str(error), do="correct it first: the training would stop at it")
        return
    if run.needs_reference:
        yield from run_checks.check_training_noise(run.key, config)
    if pretrained:
        yield from run_checks.check_positions(run.key, rows.longest[0], config, bool(spec.base.rope))
    for finding in found.findings:
        yield finding if finding.key == "flash-attn" else replace(finding, key=f"{run.key}.{finding.key}")
    if found.planned:
        if pretrained:
            yield from check_new_tokens(run, spec.base, config, chat, found.planned, _rows_of(packs), compute)
        width = choose_dtype(training.save_dtype, config if pretrained else None, compute).itemsize
        yield from check_disk_space(run, found.planned, width, WORK_ROOT.parent)
