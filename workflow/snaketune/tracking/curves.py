"""Training curves: transformers' callbacks for trackers, each of which receives a run that this module opens.

A tracker that fails or is offline is reported and dropped; the training continues. TensorBoard hides the points after the
checkpoint that a training resumes from, which are computed again. The others have no call for that: they show these points
twice, at the same step and with the same values.
"""

import os
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

# What describes the machine, its user and the code: host, paths, command, packages, git.
UNSENT = ("disable_code", "disable_git", "x_disable_machine_info", "x_disable_meta", "x_disable_stats")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A training run as trackers see it.

    Attributes:
        name: stage and name, such as `sft/demo`.
        out: the folder where its result is published; `results` is that of all results.
        fingerprint: of its result: the same in all attempts, and unique to this training.
        parameters: its spec, by dotted keys; the same on every machine.
    """

    settings: Tracking
    stage: str
    name: str
    out: Path
    results: Path
    fingerprint: str
    parameters: dict[str, bool | int | float | str]

    @classmethod
    def of(cls, stage: str, spec: dict[str, Any], settings: Tracking, work: WorkFolder, out: Path) -> Self:
        """Args: spec: as plain JSON; work: its work folder, which is below the folder of all results."""
        identity = {"stage": stage, "name": f"{stage}/{out.name}", "fingerprint": work.folder.name}
        place = {"out": out, "results": work.folder.parents[2]}
        return cls(settings=settings, parameters=dict(_flat(spec)), **identity, **place)


class Curves(TrainerCallback, AbstractContextManager):
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
            message = f"{type(error).__name__}: {IN_ADDRESS.sub('//', ' '.join(str(error).split()))[:300]}"
            continues = "failed and is not used any more; the training continues without it"
            print(f"tracking.{name} {continues} ({message})", flush=True)


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

    configured = tracked.settings.wandb
    run = {"id": tracked.fingerprint, "name": tracked.name, "group": tracked.stage, "config": tracked.parameters}
    place = {"project": tracked.settings.project, "entity": configured.entity, "dir": tracked.results}
    # Without a mode, WANDB_MODE chooses one, which thus can't turn an offline run online.
    way = {"resume": "allow"} if configured.online else {"mode": "offline"}
    settings = dict.fromkeys(UNSENT, True) | {"silent": True, "console": "off", "x_save_requirements": False}
    opened = wandb.init(**run, **place, **way, settings=settings)
    opened.define_metric("*", step_metric="train/global_step")
    return opened, _Wandb()


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

    # trackio knows an earlier attempt by its name only.
    name = f"{tracked.name} {tracked.fingerprint[:8]}"
    run = {"name": name, "group": tracked.stage, "config": tracked.parameters, "resume": "allow"}
    opened = ExitStack()
    opened.callback(trackio.init(tracked.settings.project, **run, auto_log_gpu=False, auto_log_cpu=False).finish)
    return opened, _Trackio()


def _mlflow(tracked: TrackedRun, step: int) -> tuple[AbstractContextManager, TrainerCallback]:
    # The last is the callback's: it would add transformers' arguments, with paths of this machine.
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_MAX_LOG_PARAMS": "0"}
    # Seconds instead of MLflow's default of minutes, during which the training would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    import mlflow

    mlflow.set_tracking_uri(tracked.settings.mlflow.tracking_uri or (tracked.results / "mlruns").absolute().as_uri())
    # Locked, so that trainings that start together create only one experiment.
    with locked(tracked.results / ".mlflow.lock", "another training to make MLflow's experiment"):
        mlflow.set_experiment(tracked.settings.project)
    same = f"tags.`snaketune.fingerprint` = '{tracked.fingerprint}'"
    earlier = [run.info.run_id for run in mlflow.search_runs(filter_string=same, output_format="list")]
    tags = {"snaketune.fingerprint": tracked.fingerprint, "snaketune.stage": tracked.stage}
    opened = mlflow.start_run(earlier[0] if earlier else None, run_name=tracked.name, tags=tags)
    mlflow.log_params(tracked.parameters)
    return opened, MLflowCallback()


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
