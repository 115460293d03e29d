"""Training curves: transformers' callbacks for trackers, each of which receives a run that this module opens.

A tracker that fails or is offline is reported and dropped; the training continues. TensorBoard hides the points after the
checkpoint that a training resumes from, which are computed again. The others have no call for that: they show these points
twice, at the same step and with the same values.
"""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

from snaketune.config.tracking import IN_ADDRESS, Tracking
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.locks import locked

FINGERPRINT = "snaketune.fingerprint"
# What describes the machine, its user and the code: host, paths, command, packages, git.
UNSENT = ("disable_code", "disable_git", "x_disable_machine_info", "x_disable_meta", "x_disable_stats")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A training run as trackers see it.

    Attributes:
        out: the folder where its result is published; `results` is that of all results.
        fingerprint: of its result: the same in all attempts, and unique to this training.
        parameters: its spec, by dotted keys; the same on every machine.
    """

    settings: Tracking
    stage: str
    out: Path
    results: Path
    fingerprint: str
    parameters: dict[str, bool | int | float | str]

    @classmethod
    def of(cls, stage: str, spec: dict[str, Any], settings: Tracking, work: WorkFolder, out: Path) -> Self:
        """Args: spec: as plain JSON; work: its work folder, which is below the folder of all results."""
        place = {"out": out, "results": work.folder.parents[2], "fingerprint": work.folder.name}
        return cls(settings=settings, stage=stage, parameters=dict(_flat(spec)), **place)

    @property
    def name(self) -> str:
        """Stage and name, such as `sft/demo`."""
        return f"{self.stage}/{self.out.name}"


class Curves(TrainerCallback):
    """Passes log lines to the callbacks of the configured trackers, whose runs are open while the context lasts.

    Args:
        tracked: None for no trackers, as in processes other than the main one.
        step: the training resumes after it; 0 at the start.
    """

    def __init__(self, tracked: TrackedRun | None, step: int):
        self.trackers: dict[str, tuple[AbstractContextManager, TrainerCallback]] = {}
        for name, open_run in TRACKERS.items() if tracked else ():
            if getattr(tracked.settings, name) not in (None, False):
                with self._reported(name):
                    self.trackers[name] = open_run(tracked, step)

    def on_log(self, args, state, control, logs, **_):
        """Pass on numbers, not answers to held-out prompts and flags; nor the Trainer's last line, of this attempt alone."""
        if "train_runtime" in logs:
            return
        numbers = {name: value for name, value in logs.items() if type(value) in (int, float)}
        for name, (_, callback) in list(self.trackers.items()):
            with self._reported(name):
                callback.on_log(args, state, control, logs=numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for name, (run, _) in list(self.trackers.items()):
            with self._reported(name):
                run.__exit__(*error)

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        # Some libraries call sys.exit on settings that they reject.
        except (Exception, SystemExit) as error:
            self.trackers.pop(name, None)
            message = IN_ADDRESS.sub("//", re.sub(r"\s+", " ", str(error)))[:300]
            print(
                f"tracking.{name} failed and is not used any more; the training continues without it "
                f"({type(error).__name__}: {message})",
                flush=True,
            )


# Each tracker's library is imported only if it is configured: that takes up to a second.


def _tensorboard(tracked: TrackedRun, step: int) -> tuple[AbstractContextManager, TrainerCallback]:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from torch.utils.tensorboard import SummaryWriter

    # Of step 0 there may be a measurement.
    purged = step + 1 if step else 0
    writer = SummaryWriter(str(tracked.out / "tensorboard" / tracked.fingerprint[:8]), purge_step=purged)
    writer.file_writer.add_summary(hparams_pb(tracked.parameters, trial_id=tracked.fingerprint))
    return writer, TensorBoardCallback(writer)


class _Wandb(WandbCallback):
    def setup(self, *_, **__) -> None:
        """Do nothing: the run is open, and transformers would add its arguments, with paths of this machine."""


def _wandb(tracked: TrackedRun, step: int) -> tuple[AbstractContextManager, TrainerCallback]:
    # wandb would report its own errors. It reads this at import.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    online = tracked.settings.wandb.online
    run = wandb.init(
        project=tracked.settings.project,
        entity=tracked.settings.wandb.entity,
        name=tracked.name,
        group=tracked.stage,
        id=tracked.fingerprint,
        config=tracked.parameters,
        dir=tracked.results,
        # None leaves the mode to WANDB_MODE, which thus can't turn an offline run online.
        mode=None if online else "offline",
        resume="allow" if online else None,
        settings=dict.fromkeys(UNSENT, True) | {"silent": True, "console": "off", "x_save_requirements": False},
    )
    run.define_metric("*", step_metric="train/global_step")
    return run, _Wandb()


class _Trackio(TrackioCallback):
    def setup(self, *_, **__) -> None:
        """See `_Wandb`."""


def _trackio(tracked: TrackedRun, step: int) -> tuple[AbstractContextManager, TrainerCallback]:
    # With these it would send curves, which only the config may ask for.
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        os.environ.pop(name, None)
    # trackio reads it at import.
    os.environ.setdefault("TRACKIO_DIR", str((tracked.results / "trackio").absolute()))
    import trackio

    run = trackio.init(
        tracked.settings.project,
        # trackio knows an earlier attempt by its name only.
        name=f"{tracked.name} {tracked.fingerprint[:8]}",
        group=tracked.stage,
        config=tracked.parameters,
        resume="allow",
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    closed = ExitStack()
    closed.callback(run.finish)
    return closed, _Trackio()


def _mlflow(tracked: TrackedRun, step: int) -> tuple[AbstractContextManager, TrainerCallback]:
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    # The callback's: it would add transformers' arguments, with paths of this machine.
    os.environ["MLFLOW_MAX_LOG_PARAMS"] = "0"
    # Seconds instead of MLflow's default of minutes, during which the training would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    import mlflow

    mlflow.set_tracking_uri(tracked.settings.mlflow.tracking_uri or (tracked.results / "mlruns").absolute().as_uri())
    # Locked, so that trainings that start together create only one experiment.
    with locked(tracked.results / ".mlflow.lock", "another training to make MLflow's experiment"):
        mlflow.set_experiment(tracked.settings.project)
    found = f"tags.`{FINGERPRINT}` = '{tracked.fingerprint}'"
    earlier = mlflow.search_runs(filter_string=found, max_results=1, output_format="list")
    run = mlflow.start_run(
        earlier[0].info.run_id if earlier else None,
        run_name=tracked.name,
        tags={FINGERPRINT: tracked.fingerprint, "snaketune.stage": tracked.stage},
    )
    mlflow.log_params(tracked.parameters)
    return run, MLflowCallback()


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Flatten a spec to dotted keys; local paths are reduced to their last component.

    >>> dict(_flat({"base": {"path": "/models/tiny"}, "training": {"betas": [0.9, 0.95], "seed": 0}, "lora": None}))
    {'base.path': 'tiny', 'training.betas': '[0.9, 0.95]', 'training.seed': 0, 'lora': 'none'}
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, str) and value.startswith(("/", ".", "~")):
        yield key, Path(value).name
    else:
        yield key, value if isinstance(value, bool | int | float | str) else "none" if value is None else str(value)
