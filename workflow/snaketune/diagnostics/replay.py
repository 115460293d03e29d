"""`python -m snaketune replay RESULT`: the first steps of a finished training once more, and some from its last snapshot, in a
folder of their own; their log lines and weights are compared with the record.

The training's own job computes, ended early as a snapshot is, with the batch plan of the record. On the same kind of machine,
with the same versions, every figure has to be the same; elsewhere it may differ by rounding.

    results/.replay/            job file and work folders, removed at the end
    results/replay/sft-demo/    verify.json, as `verification` writes it
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_json
from snaketune.config.tracking import Tracking
from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.diagnostics.verified import FILE, as_text
from snaketune.engine.checkpoints import last_checkpoint, step_of
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import CHECKPOINTS, WORK_ROOT, WorkFolder, remove
from snaketune.stages.host.gpus import claimed_gpus
from snaketune.stages.job import RESULTS, result_at
from snaketune.stages.job_files import JobFile, job_file_of, read_job_file
from snaketune.stages.loaded_job import LoadedJob, read_job
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import ending_at
from snaketune.stages.run import build_once
from snaketune.training.launch.oom_retry import launch

ROOT = RESULTS / ".replay"
STEPS = 20
# Of log lines; how a machine computes, by run.json; and the largest difference elsewhere, relative, by data type.
COMPARED = ("loss", "grad_norm")
MACHINE = ("device", "processor", "threads", "processes", "micro_batch_rows", "gradient_checkpointing")
ELSEWHERE = {"float32": 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a finished training: its published result, run.json, and the log lines in it."""

    result: Artifact
    run: dict[str, Any]

    @classmethod
    def of(cls, manifest: Path) -> "Record":
        record = cls(result=result_at(manifest), run=read_json(manifest.with_name("run.json"), {}))
        if record.result.manifest["stage"] not in ("sft", "dpo"):
            raise SnaketuneError(f"{manifest} is no training; expected the manifest of an sft or dpo result")
        if not record.lines:
            raise SnaketuneError(f"{manifest.with_name('run.json')} has no history to compare with")
        return record

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.run.get("history", [])

    @property
    def steps(self) -> int:
        return self.lines[-1]["step"]

    def end(self, start: int, steps: int) -> int:
        """The step of the first log line at least so many steps later, or of the last one."""
        return next((line["step"] for line in self.lines if line["step"] >= start + steps), self.steps)

    def snapshots(self) -> Iterator[Artifact]:
        """Yield the published snapshots of the training, by their share of its steps."""
        folder = self.result.manifest_path.parent
        found = map(result_at, folder.parent.glob(f"{folder.name}@*/manifest.json"))
        yield from sorted(found, key=lambda one: one.manifest["spec"]["training"]["until"])


def replay(manifest: Path, steps: int = STEPS) -> int:
    """Replay a training and print what was compared; return the exit status, 1 if something differs from the record.

    Raises:
        SnaketuneError: there is no job file of it, an input is missing, or the training fails.
    """
    record, out = Record.of(manifest), manifest.parent
    stage, name = record.result.manifest["stage"], out.name
    job_file = read_job_file(job_file_of(stage, name))
    remove(ROOT)
    try:
        checks = list(_checks(record, job_file, steps))
    finally:
        remove(ROOT)
    content = {"checks": [asdict(check) for check in checks]}
    folder = RESULTS / "replay" / f"{stage}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, content)
    print(f"replay of {manifest}", as_text(content["checks"]), sep="\n", flush=True)
    return int(any(check.status == "failed" for check in checks))


def _checks(record: Record, job_file: JobFile, steps: int) -> Iterator[Check]:
    first, *_ = [*record.snapshots(), None]
    end = record.end(0, steps)
    at_snapshot = first is not None and first.manifest["counts"]["steps"] <= max(end, 10 * steps)
    made, run = _run(record, job_file, first.manifest["counts"]["steps"] if first and at_snapshot else end)
    yield _same_inputs(record, made)
    yield _same_lines("first steps = record", record, made, run, 0)
    if first and at_snapshot:
        yield _same_weights("snapshot = record", record, made, run, first)
    kept = [
        (one, WorkFolder(WORK_ROOT / made.manifest["stage"] / one.manifest["fingerprint"]))
        for one in record.snapshots()
    ]
    resumable = [(one, work) for one, work in kept if any(work.state.glob(CHECKPOINTS))]
    if not resumable:
        reason = "no snapshot's state is here; training.snapshots keeps some"
        yield not_checked("steps from snapshot = record", "log lines after a snapshot", reason)
        return
    _, work = resumable[-1]
    last = last_checkpoint(work.state / "checkpoints")
    start = step_of(last) if last else 0
    made, run = _run(record, job_file, record.end(start, steps), work)
    yield _same_lines("steps from snapshot = record", record, made, run, start)
    if run["history"][-1]["step"] == record.steps:
        yield _same_weights("weights = record", record, made, run, record.result)


def _run(
    record: Record, job_file: JobFile, end: int, start: WorkFolder | None = None
) -> tuple[Artifact, dict[str, Any]]:
    """Train up to a step; return the result and its run.json. Args: start: a work folder to resume from."""
    remove(ROOT)
    # Half a step less, since the share of the steps is rounded up.
    share = None if end == record.steps else (end - 0.5) / record.steps
    plan = {key: record.run[key] for key in ("micro_batch_rows", "gradient_checkpointing") if key in record.run}
    plain = {"race": "", "snapshots": (), "preflight": "", "calibration": ""}
    path = ROOT / "job.json"
    spec, out = ending_at(job_file.spec, share), str(ROOT / "out")
    changed = {"spec": spec, "out": out, "operation": job_file.operation | plain | plan, "code": None, "stale": ()}
    changed["tracking"] = Tracking(tensorboard=False)
    path.parent.mkdir(parents=True)
    write_json(path, job_file.model_copy(update=changed).model_dump(mode="json"))
    job = read_job(path)
    with claimed_gpus(job.operation.gpus):
        build_once(job, partial(_build, job, start), ROOT / "work")
    return result_at(Path(out) / "manifest.json"), read_json(Path(out) / "run.json", {})


def _build(job: LoadedJob, start: WorkFolder | None, work: WorkFolder) -> Outcome:
    if start:
        shutil.copytree(start.state / "checkpoints", work.state / "checkpoints", dirs_exist_ok=True)
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
        return not_checked(name, "loss and gradient norm of log lines", "the record has no line of these steps")
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
