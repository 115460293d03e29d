"""Tracked trainings that are killed with SIGKILL in their own processes, and the points that their trackers have afterwards.

As a program: imports the libraries once and forks a process for each attempt; only that process imports the trackers.
"""

import errno
import json
import os
import signal
import struct
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import TensorBoardCallback

from snaketune.config.tracking import Tracking
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.sft import SftTrainer
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tracking.curves import Curves, TrackedRun
from snaketune.training import pipeline
from snaketune.training.prepared import PreparedTraining, TrainingRun
from tests.models.conftest import CPU, tiny_model
from tests.training.executed import executed, loss_of, made_by

from .pipeline_runs import FORKED, prepare_forks, read_pack, spec

EVERYTHING = {"wandb": {}, "trackio": True, "mlflow": {}}
STEPS, CHECKPOINT = 18, 4


def train(root: Path, fingerprint: str, tracking: Tracking | None, name: str = "demo", log_steps: int = 1) -> None:
    """Train three epochs of six steps on 22 rows, with a log line every `log_steps` and a checkpoint every fourth step."""
    made, work = spec(), WorkFolder(root / "results/.work/sft" / fingerprint)
    if os.environ.get("RANK", "0") == "0":
        work.start()
    out = root / "results/sft" / name
    tracked = TrackedRun.of("sft", made.model_dump(mode="json"), tracking, work, out) if tracking else None
    run = TrainingRun(
        spec=made,
        operation=executed(made.training, checkpoint_steps=CHECKPOINT, log_steps=log_steps),
        work=work,
        compute=CPU,
        tracked=tracked,
    )
    rows = open_rows(read_pack(root), "train")
    initial = made_by(lambda *_: tiny_model("llama"))
    pipeline.train(PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=initial, loss=loss_of(made)))


def killed_at(where: str, patch: pytest.MonkeyPatch) -> None:
    """Kill this process at a step: after its log line (`log 7`), when the checkpoint is written but not marked complete
    (`save 8`), or once it is complete (`saved 8`)."""
    what, step = where.split()

    def kill(at: int) -> None:
        if at == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    if what == "log":
        on_log = Curves.on_log

        def logged(self, args, state, control, **more):
            on_log(self, args, state, control, **more)
            kill(state.global_step)

        patch.setattr(Curves, "on_log", logged)
    else:
        on_save = TrainingFeatures.on_save

        def saved(self, args, state, control, **more):
            if what == "save":
                kill(state.global_step)
            on_save(self, args, state, control, **more)
            kill(state.global_step)

        patch.setattr(TrainingFeatures, "on_save", saved)


def fill_disk_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Make TensorBoard's disk full from this step on."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    on_log, write = TensorBoardCallback.on_log, RecordWriter.write
    full = []

    def fail(self, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    def logged(self, args, state, control, **more):
        full.extend([True] * (state.global_step == step))
        on_log(self, args, state, control, **more)

    patch.setattr(RecordWriter, "write", fail)
    patch.setattr(TensorBoardCallback, "on_log", logged)


def attempt(root: Path, how: dict[str, Any]) -> None:
    """Run one attempt in this process."""
    with (root / f"{how['fingerprint']}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= how.get("environment", {})
    with (root / "sockets").open("a", buffering=1) as seen:
        if how.get("watched", True):
            sys.addaudithook(
                lambda event, about: (
                    print(event, about, file=seen)
                    if event in ("socket.getaddrinfo", "socket.sendto", "socket.connect") and not is_local(about[-1])
                    else None
                )
            )
        if kill := how.get("kill"):
            killed_at(kill, pytest.MonkeyPatch())
        if full := how.get("full"):
            fill_disk_at(full, pytest.MonkeyPatch())
        tracking = Tracking(**how["tracking"]) if how["tracking"] is not None else None
        train(root, how["fingerprint"], tracking, how.get("name", "demo"), how.get("log_steps", 1))


def is_local(address: Any) -> bool:
    """Whether an address is a unix socket, through which wandb talks to its own service process."""
    return isinstance(address, str | bytes)


def held(root: Path, fingerprints: list[str]) -> None:
    """Write the points of trackio, MLflow and Weights & Biases, by tracker and fingerprint: [step, curve, value]; and MLflow's
    runs and trackio's config of each fingerprint."""
    os.environ |= {"TRACKIO_DIR": str(root / "results/trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}
    import wandb  # noqa: F401
    from mlflow.tracking import MlflowClient
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    client = MlflowClient(tracking_uri=(root / "results/mlruns").as_uri())
    (experiment,) = [found for found in client.search_experiments() if found.name == "snaketune"]
    points: dict[str, Any] = {"trackio": {}, "mlflow": {}, "wandb": {}, "runs": defaultdict(list), "trackio runs": {}}
    for run in client.search_runs([experiment.experiment_id]):
        fingerprint = run.data.tags["snaketune.fingerprint"]
        points["mlflow"][fingerprint] = [
            [point.step, f"train/{curve}", point.value]
            for curve in run.data.metrics
            for point in client.get_metric_history(run.info.run_id, curve)
        ]
        facts = [run.info.run_name, run.data.tags["snaketune.stage"], run.info.status, run.data.params]
        points["runs"][fingerprint].append(facts)
    of_trackio = {run.name: run for run in Api().runs("snaketune")}
    for fingerprint in fingerprints:
        run = of_trackio.pop(f"sft/demo {fingerprint[:8]}")
        points["trackio runs"][fingerprint] = run.config
        points["trackio"][fingerprint] = [
            [line["train/global_step"], curve, value]
            for line in SQLiteStorage.get_logs("snaketune", run.name, run_id=run.id)
            for curve, value in line.items()
            if curve.startswith("train/") and curve != "train/global_step"
        ]
        points["wandb"][fingerprint] = [
            point
            for folder in sorted((root / "results/wandb").glob(f"offline-run-*-{fingerprint}"))
            for point in wandb_points(folder / f"run-{fingerprint}.wandb")
        ]
    assert not of_trackio
    (root / "held.json").write_text(json.dumps(points))


def wandb_points(path: Path):
    """Yield the points of an offline run. wandb has no Python reader for the format: after 7 bytes, records in LevelDB's log
    format, each with checksum, length and kind (1 complete, 2 first, 3 middle, 4 last), in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, record_bytes = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        record_bytes += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):
            record, record_bytes = Record.FromString(record_bytes), b""
            if record.HasField("history"):
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for curve, value in values.items():
                    if curve.startswith("train/") and curve != "train/global_step":
                        yield [values["train/global_step"], curve, value]


def in_a_process(work: Callable[..., None], *arguments: Any) -> int:
    child = FORKED.Process(target=work, args=arguments)
    child.start()
    child.join()
    return child.exitcode


def main(root: Path) -> None:
    """Run the attempts of `attempts.json` in `root` in order, then write the points of the fingerprints under `held`."""
    plan = json.loads((root / "attempts.json").read_text())
    # Only trackers, which no process but an attempt's imports, read these.
    os.environ |= {"HOME": str(root / "home"), "PYTHONWARNINGS": "ignore"}
    warnings.simplefilter("ignore")
    prepare_forks(root)
    exits = [in_a_process(attempt, root, how) for how in plan["attempts"]]
    (root / "exits.json").write_text(json.dumps(exits))
    if plan["held"]:
        assert in_a_process(held, root, plan["held"]) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
