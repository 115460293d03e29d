"""Weights & Biases: online during training, or offline in a folder for `wandb sync`.

An offline run has only what its process flushed, which after a kill is almost nothing. So a resumed training writes a complete
new folder, with the lines of the checkpoint and then its own, and the folders of earlier attempts are removed. Online, the
server reports which steps it has.
"""

import os
import shutil
from collections import defaultdict

from snaketune.tracking.curves import TrackedRun

SECONDS_TO_FINISH = 60


class Run:
    """One training in Weights & Biases; its id is its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        # Turn off wandb's reports of its own errors. Read at import, and when wandb-core starts.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        configured = tracked.settings.wandb
        settings = wandb.Settings(
            root_dir=str(tracked.results),
            silent=True,
            console="off",
            finish_timeout=SECONDS_TO_FINISH,
            # Machine, paths, command, code and packages are in run.json or private.
            **dict.fromkeys(("save_code", "x_save_requirements"), False),
            **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation"), True),
            **dict.fromkeys(("x_disable_machine_info", "x_disable_meta", "x_disable_stats"), True),
        )
        if not configured.online:
            for folder in tracked.results.glob(f"wandb/offline-run-*-{tracked.fingerprint}"):
                shutil.rmtree(folder)
        tracked.results.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=tracked.settings.project,
            entity=configured.entity,
            name=tracked.name,
            group=tracked.stage,
            id=tracked.fingerprint,
            config=tracked.parameters,
            # None leaves the mode to WANDB_MODE, which thus can't turn an offline run online.
            mode=None if configured.online else "offline",
            resume="allow" if configured.online else None,
            settings=settings,
        )
        newest = self.run.step - 1 if self.run.resumed else -1
        self.newest: dict[str, int] = defaultdict(lambda: newest)

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        for step, values in points:
            self.run.log(values, step=step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
