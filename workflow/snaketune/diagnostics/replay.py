"""The first steps of a finished training once more, and some from its last snapshot, in a work folder of their own; their log
lines and weights are compared with the record.

The training's own job computes, ended early as a snapshot is, with the batch plan of the record. On the same kind of machine,
with the same versions, every figure has to be the same; elsewhere it may differ by rounding.

The stage `reproduction` replays the trainings of a config, and `replay_command` one whose record may be of another clone.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from shutil import copytree
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_json
from snaketune.config.tracking import Tracking
from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.diagnostics.verified import FILE, as_text, counts_of
from snaketune.engine.checkpoints import last_checkpoint, step_of
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import CHECKPOINTS, WORK_ROOT, WorkFolder, remove
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile
from snaketune.stages.loaded_job import LoadedJob, read_job
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import ending_at
from snaketune.stages.run import build_once
from snaketune.training.launch.oom_retry import launch

FIRST_STEPS, LATER_STEPS = "first steps = record", "steps from snapshot = record"
OF_LINES = "relative difference of loss and gradient norm of log lines"
# Of log lines; how a machine computes, by run.json; and the largest difference elsewhere, relative, by data type.
COMPARED = ("loss", "grad_norm")
MACHINE = ("device", "processor", "threads", "processes", "micro_batch_rows", "gradient_checkpointing")
ELSEWHERE = {"float32": 1e-3, "bfloat16": 5e-2}
# How a replay is run: neither with what is measured and decided before a training, nor from its snapshots.
ALONE = {"race": "", "snapshots": (), "preflight": "", "calibration": ""}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a finished training.

    Attributes:
        result: as published, or as an input of the stage.
        run: its run.json, with the log lines.
        snapshots: published ones, by their share of its steps.
    """

    result: Artifact
    run: dict[str, Any]
    snapshots: tuple[Artifact, ...] = ()

    @classmethod
    def read(cls, result: Artifact, snapshots: tuple[Artifact, ...]) -> "Record":
        by_share = sorted(snapshots, key=lambda one: one.manifest["spec"]["training"]["until"])
        run = read_json(result.manifest_path.with_name("run.json"), {})
        return cls(result=result, run=run, snapshots=tuple(by_share))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.run.get("history", [])

    @property
    def steps(self) -> int:
        return self.lines[-1]["step"]

    def end(self, start: int, steps: int) -> int:
        """The step of the first log line at least so many steps later, or of the last one."""
        return next((line["step"] for line in self.lines if line["step"] >= start + steps), self.steps)

    def share(self, end: int) -> float | None:
        """The share of the whole run's steps, rounded up, at which a replay ends after step `end`; None for the whole run."""
        # Of a run that its race has paused, or that ends early.
        until, steps = self.result.manifest["spec"]["training"]["until"], self.steps
        if end == steps:
            return until
        # Less by a part of a step: the whole run has at most a step for each of `until` fewer than the recorded ones suggest.
        return (end - (steps - end) / (2 * steps)) / steps * (until or 1.0)


def write_replayed(record: Record, job_file: JobFile, steps: int, work: WorkFolder) -> Outcome:
    """Fill `work.payload` with verify.json, and print it as a table. Args: as of `replayed`."""
    checks = [asdict(check) for check in replayed(record, job_file, steps, work)] if record.lines else []
    if not checks:
        checks = [asdict(not_checked(FIRST_STEPS, OF_LINES, "run.json of the training isn't here, or has no history"))]
    print(as_text(checks), flush=True)
    write_json(work.payload / FILE, {"checks": checks})
    return Outcome(counts=counts_of(checks))


def replayed(record: Record, job_file: JobFile, steps: int, work: WorkFolder) -> Iterator[Check]:
    """Yield the checks of a training.

    Args:
        job_file: of the training, of which the first steps are computed, at least `steps`.
        work: the folder in whose state they are computed, with the GPUs claimed.
    """
    first, *_ = [*record.snapshots, None]
    end = record.end(0, steps)
    at_snapshot = first is not None and first.manifest["counts"]["steps"] <= max(end, 10 * steps)
    ends = first.manifest["counts"]["steps"] if first and at_snapshot else end
    made, run = _run(record, job_file, ends, work)
    yield _same_inputs(record, made)
    yield _same_lines(FIRST_STEPS, record, made, run, 0)
    if first and at_snapshot:
        yield _same_weights("snapshot = record", record, made, run, first)
    kept = [WorkFolder(WORK_ROOT / job_file.stage / one.manifest["fingerprint"]) for one in record.snapshots]
    resumable = [one for one in kept if any(one.state.glob(CHECKPOINTS))]
    if not resumable:
        reason = "no snapshot's state is here; training.snapshots keeps some"
        yield not_checked(LATER_STEPS, OF_LINES, reason)
        return
    last = last_checkpoint(resumable[-1].state / "checkpoints")
    start = step_of(last) if last else 0
    made, run = _run(record, job_file, record.end(start, steps), work, resumable[-1])
    yield _same_lines(LATER_STEPS, record, made, run, start)
    if run["history"][-1]["step"] == record.steps:
        yield _same_weights("weights = record", record, made, run, record.result)


def _run(
    record: Record, job_file: JobFile, end: int, work: WorkFolder, start: WorkFolder | None = None
) -> tuple[Artifact, dict[str, Any]]:
    """Train up to a step; return the result and its run.json. Args: start: a work folder to resume from."""
    root = work.state / "replay"
    remove(root)
    root.mkdir(parents=True)
    plan = {key: record.run[key] for key in ("micro_batch_rows", "gradient_checkpointing") if key in record.run}
    changed = {
        "spec": ending_at(job_file.spec, record.share(end)),
        "out": str(root / "out"),
        "operation": job_file.operation | ALONE | plan,
        "code": None,
        "stale": (),
        "tracking": Tracking(tensorboard=False),
    }
    path = root / "job.json"
    write_json(path, job_file.model_copy(update=changed).model_dump(mode="json"))
    job = read_job(path)
    build_once(job, partial(_build, job, start), root / "work")
    return result_at(root / "out/manifest.json"), read_json(root / "out/run.json", {})


def _build(job: LoadedJob, start: WorkFolder | None, work: WorkFolder) -> Outcome:
    if start:
        copytree(start.state / "checkpoints", work.state / "checkpoints", dirs_exist_ok=True)
    return launch(job, work)


def _same_inputs(record: Record, made: Artifact) -> Check:
    """Compare the digests of all inputs, and the spec."""
    there, here = record.result.manifest, made.manifest
    differing = _differing(there["inputs"], here["inputs"])
    if ending_at(there["spec"], 1.0) != ending_at(here["spec"], 1.0):
        differing.append("spec")
    reason = f"{', '.join(sorted(differing))}, so that the training is another one"
    return judged("inputs = recorded", "inputs by digest, and spec, that differ", len(differing), 0, reason=reason)


def _differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The keys whose values differ."""
    return [key for key in {**there, **here} if there.get(key) != here.get(key)]


def _elsewhere(record: Record, made: Artifact, run: dict[str, Any]) -> list[str]:
    """What differs between the machine and versions of the record and these."""
    there, here = record.result.manifest, made.manifest
    names = [name for name in MACHINE if record.run.get(name) != run.get(name)]
    names += _differing(there["versions"], here["versions"])
    return names + (["code"] if there["code"] != here["code"] else [])


def _judged(
    name: str, compares: str, figure: float, where: str, record: Record, made: Artifact, run: dict[str, Any]
) -> Check:
    """A check of a relative difference: 0 on the same kind of machine."""
    elsewhere = _elsewhere(record, made, run)
    tolerance = ELSEWHERE[record.result.manifest["dtype"]] if elsewhere else 0.0
    how = f"made with another {', '.join(elsewhere)}" if elsewhere else "on the same kind of machine"
    return judged(name, f"{compares}, {how}", figure, tolerance, reason=where)


def _same_lines(name: str, record: Record, made: Artifact, run: dict[str, Any], start: int) -> Check:
    recorded = {line["step"]: line for line in record.lines}
    lines = [line for line in run["history"] if line["step"] > start and line["step"] in recorded]
    differences = [
        (abs(line[key] - recorded[line["step"]][key]) / max(abs(recorded[line["step"]][key]), 1e-9), line["step"], key)
        for line in lines
        for key in COMPARED
        if key in line and key in recorded[line["step"]]
    ]
    if not differences:
        return not_checked(name, OF_LINES, "the record has no line of these steps")
    worst, step, key = max(differences)
    of = f"{len(lines)} log lines, steps {start + 1} to {lines[-1]['step']}"
    compares = f"relative difference of loss and gradient norm in {of}"
    return _judged(name, compares, worst, f"{key} of step {step}", record, made, run)


def _same_weights(name: str, record: Record, made: Artifact, run: dict[str, Any], published: Artifact) -> Check:
    import torch
    from safetensors.torch import load_file

    files = [file for file in published.manifest["payload"] if file.endswith(".safetensors")]
    apart = size = 0.0
    for file in files:
        if made.manifest["payload"].get(file) == published.manifest["payload"][file]:
            continue
        here, there = load_file(made.file(file)), load_file(published.file(file))
        for tensor in there:
            apart += torch.dist(here[tensor].double(), there[tensor].double()).item() ** 2
            size += there[tensor].double().square().sum().item()
    figure = (apart / size) ** 0.5 if size else 0.0
    compares = f"relative difference of the weights in {len(files)} files"
    return _judged(name, compares, figure, "the weights differ", record, made, run)
