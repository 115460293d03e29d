"""All checks of a family of runs: environment (disk, models on the Hub), machine (driver, libraries, memory),
tokenizer, rows and settings."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.operation import Execution
from snaketune.diagnostics import run_checks
from snaketune.diagnostics.leaks import check_leaks
from snaketune.diagnostics.run_checks import check_new_tokens
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.model.reward_head import with_reward_head
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import RAW_FORMAT_VERSION
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import read_config, scratch_config
from snaketune.models.traced_model import TracedModel, trace_model
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun, PreflightSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import check_machine
from snaketune.training.save_model import choose_dtype


def check_family(
    spec: PreflightSpec,
    tokenizer: Artifact,
    packs: list[Artifact],
    corpora: list[Artifact],
    evaluated: list[Artifact],
) -> Iterator[Finding]:
    """Yield all findings, from the inputs of the stage."""
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # The base model is checked with SFT runs; those on responses of the family's models are checked later, maybe without any.
    if first := next((run.key for run in spec.runs if run.kind == "sft"), None):
        yield from _check_base(first, spec, chat, tokenizer)
    for run in spec.runs:
        yield from check_hub(f"{run.key}.reference", run.reference)
        yield from _check_run(run, spec, chat, packs)
    trained, held_out = (
        {corpus.folder.parent.name: corpus for corpus in artifacts} for artifacts in (corpora, evaluated)
    )
    yield from check_leaks(spec.evaluations, trained, held_out)
    yield from run_checks.check_missing_answers(spec.evaluations, held_out)


def _check_base(first: str, spec: PreflightSpec, chat: ChatTokenizer, tokenizer: Artifact) -> Iterator[Finding]:
    """Check base model and tokenizer. Args: first: the key of the family's first run, which findings name."""
    yield from check_hub(f"{first}.base", spec.base)
    yield from run_checks.check_pad_token(first, chat, tokenizer.manifest)
    config = None
    # A config that can't be read is reported for each run that starts from it.
    with suppress(SnaketuneError):
        config = read_config(spec.base)
    if config:
        yield from run_checks.check_tokenizer_match(first, chat, config)


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
        trained = {"trained_model": with_reward_head} if run.rewards else {}
        found = check_machine(run.run, operation, compute, config, rows, dropout=sft, summed=summed, **trained)
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


GB = 1e9
SECONDS_TO_ANSWER = 10.0


def check_disk_space(run: PreflightRun, planned: TracedModel, width: int, folder: Path) -> Iterator[Finding]:
    """Check that the result fits on the disk, with two checkpoints: the older one is removed after the newer one is complete.
    With `keep: best`, two more copies of the trained weights; each checkpoint of averaged weights has one more.

    Args:
        width: bytes per number of the result.
        folder: the folder of all results.
    """
    free = shutil.disk_usage(folder).free
    whole = run.run.lora is None or run.run.lora.merge
    result = width * (planned.parameters if whole else planned.trained)
    # Of each checkpoint: weights and two optimizer states, in float32.
    training = run.run.training
    copies = 3 + (training.keep == "best") + (training.average is not None)
    needed = result + 2 * 4 * copies * planned.trained
    do = "free disk space (`snakemake clean_work` removes old work)"
    # An existing result may be current, and then nothing is written.
    if result > free and not (folder / run.key.replace(".", "/", 1) / "manifest.json").is_file():
        problem = f"its result takes up to {result / GB:.1f} GB, but the disk of {folder} has {free / GB:.1f} GB free"
        yield Finding(key=run.key, problem=problem, do=f"{do}, or move results to another disk")
    elif needed > free:
        problem = f"result and checkpoints take up to {needed / GB:.1f} GB, but the disk has {free / GB:.1f} GB free"
        yield Finding(key=run.key, problem=problem, do=do, certain=False)


def check_hub(key: str, base: Pretrained | Scratch | None) -> Iterator[Finding]:
    """Check that a model from the Hub is cached or can be downloaded: repository, revision, and safetensors in it.

    Args:
        key: the config key that names it.
    """
    if not isinstance(base, Pretrained) or Path(base.path).is_dir():
        return
    # The import takes a second, so it is done for models from the Hub only.
    from huggingface_hub import HfApi, errors, snapshot_download

    path, revision, certain = base.path, base.revision or "main", True
    # It may be in the cache.
    with suppress(OSError, ValueError):
        if any(Path(snapshot_download(path, revision=revision, local_files_only=True)).glob("*.safetensors")):
            return
    try:
        info = HfApi().model_info(path, revision=revision, timeout=SECONDS_TO_ANSWER)
        if info.gated:
            # The description of a gated model is public, its files aren't.
            HfApi().auth_check(path)
        if any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            return
        problem = f"{path} has no safetensors at revision {revision!r}"
        do = "choose a revision that has them; other formats could run code and aren't read"
    except errors.GatedRepoError:
        problem = f"{path} is gated on the Hub, and your account has no access"
        do = "accept its conditions on its page, and set HF_TOKEN in the environment"
    except errors.RevisionNotFoundError:
        problem, do = f"{path} has no revision {revision!r}", "choose one that is on its page"
    except errors.RepositoryNotFoundError:
        problem = f"the Hub has no model {path!r}, or your account can't see it"
        do = "check the name, which is no local folder either; for a private model set HF_TOKEN in the environment"
    except Exception as error:
        # Any other error: libraries have many names for a network failure, and the next try may succeed.
        name, certain = type(error).__name__, isinstance(error, errors.OfflineModeIsEnabled)
        problem = f"{path} isn't in the Hub's cache on this machine, and the Hub can't be reached ({name})"
        do = f"download it on a machine with a network: hf download {path} --revision {revision}"
    yield Finding(key=f"{key}.path", problem=problem, do=do, certain=certain)
