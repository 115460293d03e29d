"""Checks of the `preflight` stage: what would fail, or crawl, hours later, found in seconds before the first training of a
family.

A family is an SFT run that starts from a base, those that go on from it, and their DPO runs; none of them trains before this
has passed. Looked at are the place (disk, file system, Hub), the machine (driver, libraries, memory), the tokenizer, the rows
and the settings. What is certain to break a run stops here, all of it told at once; the rest stands in the log and the report.

    findings.json    findings: severity (stops, warns), where (sft.demo), key (sft.demo.packing.length), found, do

It is of this machine and moment, so it is made anew wherever it runs, and nothing is computed again because of it.
"""

from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Pretrained
from snaketune.diagnostics.dropped_tokens import lost_tokens
from snaketune.diagnostics.environment import disk_space, file_system, hub
from snaketune.diagnostics.hyperparameters import out_of_range
from snaketune.diagnostics.leaks import held_out_in_training
from snaketune.diagnostics.missing_answers import exact_match_of_nothing
from snaketune.diagnostics.special_tokens import pads_with_the_end
from snaketune.diagnostics.tokenizer_match import tokenizer_of_another
from snaketune.errors import SnaketuneError
from snaketune.models.devices import resolve_compute
from snaketune.models.load_model import read_config, scratch_config
from snaketune.models.memory_trace import TracedModel
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import RAW_FORMAT_VERSION
from snaketune.stages.cache.work_folders import WORK_ROOT, WorkFolder
from snaketune.stages.gpu_needs import Finding, tell
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PreflightRun, PreflightSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.autotune.machine_check import examine
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
        corpora: that are trained on, in that order too.
        evaluated: whose held-out rows the runs' models are asked about.
    Raises:
        SnaketuneError: with all that is certain to break a run.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # The run that the family begins with.
    first = next(run.key for run in spec.runs if run.kind == "sft")
    found = [
        *hub(f"{first}.base", spec.base),
        *file_system(work.folder),
        *pads_with_the_end(first, chat, tokenizer.manifest),
    ]
    found += _of_base(first, spec, chat)
    for run in spec.runs:
        found += hub(f"{run.key}.reference", run.reference)
        found += _of_run(run, spec, chat, packs[run.pack], WORK_ROOT.parent)
    found += held_out_in_training(spec.evaluations, corpora, evaluated)
    found += exact_match_of_nothing(spec.evaluations, evaluated)
    found = list(dict.fromkeys(found))
    write_json(work.payload / FINDINGS, {"findings": [as_json(finding) for finding in found]})
    tell(found)
    if not found:
        print("nothing was found that would fail or crawl", flush=True)
    return Outcome(counts={"runs": len(spec.runs), "findings": len(found)})


def _of_base(key: str, spec: PreflightSpec, chat: ChatTokenizer) -> list[Finding]:
    try:
        config = read_config(spec.base)
    except SnaketuneError:
        # Told of each run that begins with it.
        return []
    return tokenizer_of_another(key, chat, config) if config else []


def as_json(finding: Finding) -> dict[str, str]:
    """As the report reads it."""
    return {
        "severity": "stops" if finding.certain else "warns",
        "where": ".".join(finding.key.split(".")[:2]),
        "key": finding.key,
        "found": finding.found,
        "do": finding.do,
    }


def _of_run(run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, pack: Artifact, place: Path) -> list[Finding]:
    found = [*lost_tokens(run.key, pack.manifest), *out_of_range(run, isinstance(spec.base, Pretrained), pack.manifest)]
    if pack.manifest.get("format_version") == RAW_FORMAT_VERSION:
        # TRL makes its rows itself, of lengths that nobody knows yet.
        return found
    fits, planned, width = _machine(run, spec, chat, pack)
    return found + fits + (disk_space(run, planned, width, place) if planned else [])


def _machine(
    run: PreflightRun, spec: PreflightSpec, chat: ChatTokenizer, pack: Artifact
) -> tuple[list[Finding], TracedModel | None, int]:
    """What of the machine doesn't fit the run, by the rules by which the training itself looks when it begins; what is planned,
    and bytes of a number of its result."""
    operation = Execution(**run.model_dump(include=set(Execution.model_fields)))
    try:
        compute = resolve_compute(run.run.training.precision)
        config = read_config(spec.base) or scratch_config(spec.base, chat)
        fitness = examine(
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
        return [Finding(key=run.key, found=str(error), do="mend it first: the training would stop at it")], None, 0
    found = [_named(run, finding) for finding in fitness.findings]
    stored = config if isinstance(spec.base, Pretrained) else None
    return found, fitness.planned, choose_dtype(run.run.training.save_dtype, stored, compute).itemsize


def _named(run: PreflightRun, finding: Finding) -> Finding:
    """With the whole key."""
    key = finding.key if finding.key == "flash-attn" else f"{run.key}.{finding.key}"
    return replace(finding, key=key)
