"""Start a stage through `accelerate launch`, one process per GPU, and wait for it.

What the processes are told travels as `state/job.json` in the work folder, their result comes back as `state/outcome.json`. No
torch is imported here; `training.launched` is what runs in the processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.base import Model
from snaketune.config.runs import Operation
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.gpus import visible_gpus
from snaketune.stages.outcome import Outcome
from snaketune.stages.work import WorkFolder

PARENT_VARIABLE = "SNAKETUNE_PARENT"


def launch(
    stage: str,
    *,
    spec: Model,
    operation: Operation,
    tracking: Tracking,
    work: WorkFolder,
    out: Path,
    artifacts: dict[str, list[Artifact]],
    files: dict[str, list[Path]],
) -> Outcome:
    """Run the stage's `build` under accelerate and return what it reports.

    Args:
        out: where the result will be published; its curves are drawn there meanwhile.
        artifacts, files: by role; the job tells what artifacts held when its fingerprint was computed.
    Raises:
        SnaketuneError: it failed; its own message stands above in the log.
    """
    outcome_file = work.state / "outcome.json"
    outcome_file.unlink(missing_ok=True)
    job_file = work.state / "job.json"
    job = {
        "stage": stage,
        "spec": spec.model_dump(mode="json"),
        "operation": operation.model_dump(mode="json"),
        "tracking": tracking.model_dump(mode="json"),
        "work": str(work.folder),
        "out": str(out),
        "artifacts": {role: {str(one.manifest_path): one.content for one in some} for role, some in artifacts.items()},
        "files": {role: [str(path) for path in some] for role, some in files.items()},
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
