"""Weights & Biases: sent while it trains, or kept in a folder that `wandb sync` sends.

An offline run holds what its process flushed, which after a kill is next to nothing. So a resumed training writes a folder of
its own, whole: the checkpoint's lines, and then its own; what the attempts before it left is removed. Online, the server knows
what it has.
"""

import os
import shutil
from collections import defaultdict

from snaketune.tracking.curves import TrackedRun

SECONDS_TO_FINISH = 60


class Run:
    """One training; its id is its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        # Its reports of its own errors. Read where it is imported, as wandb-core's are where that is started.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        asked = tracked.settings.wandb
        settings = wandb.Settings(
            root_dir=str(tracked.results),
            silent=True,
            console="off",
            finish_timeout=SECONDS_TO_FINISH,
            # Machine, paths, command, code, packages: what run.json says, or nobody's business.
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        if not asked.online:
            for folder in (tracked.results / "wandb").glob(f"offline-run-*-{tracked.fingerprint}"):
                shutil.rmtree(folder)
        tracked.results.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=tracked.settings.project,
            entity=asked.entity,
            name=tracked.name,
            group=tracked.name.partition("/")[0],
            id=tracked.fingerprint,
            config=tracked.parameters,
            # What the environment says counts only where it may.
            mode=None if asked.online else "offline",
            resume="allow" if asked.online else None,
            settings=settings,
        )
        newest = self.run.step - 1 if self.run.resumed else 0
        self.newest: dict[str, int] = defaultdict(lambda: newest)

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        for step, values in points:
            self.run.log(values, step=step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
