"""Jobs that are run, of an invented stage or without a file, for tests of what runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel

from snaketune.config.base import Model
from snaketune.stages.cache.fingerprint import Key
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.stages.run import build_once
from snaketune.stages.table import STAGES


class Ending(Model):
    until: float = 0.5


class SnapshotSpec(Model):
    """Of a run whose state other runs resume from."""

    training: Ending = Ending()


def demo_job(
    folder: Path,
    *,
    stage: str = "demo",
    spec: dict[str, Any] | BaseModel | None = None,
    payload: str = "rows",
    libraries: tuple[str, ...] = (),
    measures: bool = False,
    keys: tuple[Key, ...] = (),
    **job: Any,
) -> LoadedJob:
    declared = Stage(
        module=f"tests.{stage}",
        spec=Model,
        payload=payload,
        libraries=libraries,
        measures=measures,
        cache_keys=(lambda job: keys) if keys else None,
    )
    spec = spec if isinstance(spec, BaseModel) else RootModel[dict[str, Any]](spec or {})
    about = {"path": folder / "job.json", "code": "c", "out": folder / "results/demo/x"} | job
    return LoadedJob(stage=declared, spec=spec, **about)


def job_of(stage: str, folder: Path, spec: Any = None, **job: Any) -> LoadedJob:
    """A job of a stage, without a file."""
    about = {"path": folder / "job.json", "code": "c", "out": folder / "out"} | job
    return LoadedJob(stage=STAGES[stage], spec=spec, **about)


def build_demo(folder: Path, build: Callable[[WorkFolder], Outcome], **job: Any) -> Path:
    """Build a job's result once, below `folder`; return its manifest."""
    loaded = demo_job(folder, **job)
    build_once(loaded, build, folder / "results/.work")
    return loaded.out / "manifest.json"
