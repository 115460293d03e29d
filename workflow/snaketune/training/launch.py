"""Start a training through `accelerate launch`, one process per GPU, and wait for it.

The job's arguments travel as `state/job.json` in the work folder, its result comes back as `state/outcome.json`. No torch is
imported here; `training.launched` is what runs in the processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact, write_json
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.gpus import visible_gpus
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.stages.work import WorkFolder

PARENT_VARIABLE = "SNAKETUNE_PARENT"


def launch(
    worker: str, *, stage: str, spec: SftSpec | DpoSpec, operation: Operation, work: WorkFolder, **artifacts: Artifact
) -> Outcome:
    """Run the worker's `train` under accelerate and return what it reports.

    Args:
        worker, stage: modules, the one that does the work and the stage's own, of whose code the fingerprint is.
        artifacts: by role; the job tells what they held when its fingerprint was computed.
    Raises:
        SnaketuneError: it failed; its own message stands above in the log.
    """
    outcome_file = work.state / "outcome.json"
    outcome_file.unlink(missing_ok=True)
    job_file = work.state / "job.json"
    job = {
        "worker": worker,
        "stage": stage,
        "spec": spec.model_dump(mode="json"),
        "operation": operation.model_dump(mode="json"),
        "work": str(work.folder),
        **{role: str(artifact.manifest_path) for role, artifact in artifacts.items()},
        "contents": {role: artifact.content for role, artifact in artifacts.items()},
    }
    write_json(job_file, job)
    processes = max(1, min(operation.gpus, len(visible_gpus())))
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_processes", str(processes), "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *(["--cpu"] if not visible_gpus() else []),
        *(["--multi_gpu"] if processes > 1 else ["--quiet"]),
        *("--module", "snaketune.training.launched", str(job_file)),
    ]
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    status = subprocess.run(command, env=environment).returncode
    if status == 0 and outcome_file.is_file():
        return Outcome(**json.loads(outcome_file.read_text(encoding="utf-8")))
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    raise SnaketuneError(f"the training process ended early ({how}); what it said stands above. Run again to resume")


def read_passed(job: dict[str, Any], role: str, payload: str) -> Artifact:
    """An artifact that a job names. One written by hand has no `contents`, and takes what there is.

    Raises:
        SnaketuneError: somebody has replaced it since; the result would be kept as that of the old one.
    """
    artifact = read_artifact(Path(job[role]), payload)
    if artifact.content != job.get("contents", {}).get(role, artifact.content):
        raise SnaketuneError(f"{artifact.manifest_path} changed since this job began; run again")
    return artifact


def parent_is_gone() -> bool:
    """Whether the process that launched this training has died, so that nobody waits for it any more."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return False
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def is_first_process() -> bool:
    """Whether this is the process that writes, of those that train together."""
    return int(os.environ.get("RANK", 0)) == 0
