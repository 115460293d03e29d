"""Run one stage from paths and texts, as its rule and the command line give them."""

import json
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.code import check_code, import_checked, templates
from snaketune.stages.gpus import claimed_gpus, visible_gpus
from snaketune.stages.jobs import result_at
from snaketune.stages.linked import link_payload
from snaketune.stages.needs import needs_of_gpu, tell
from snaketune.stages.once import run_once
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES
from snaketune.stages.work import WorkFolder


def bring_back_from_the_future(read: Iterable[Artifact], operation: Execution) -> None:
    """Give results that were read, or waited for, the time of now where theirs is yet to come, as after a clock was set back.

    Snakemake refuses what was made of a file of a later time, and removes it. Times of results decide nothing else.
    """
    paths = [
        path
        for artifact in read
        for path in (artifact.manifest_path, artifact.folder, artifact.folder / ".snakemake_timestamp")
    ]
    paths += [Path(told) for told in (operation.preflight, operation.calibration) if told]
    paths += Path().glob(operation.parts) if operation.parts else ()
    for path in paths:
        # What may not be touched is left to Snakemake, which says what it thinks of it.
        with suppress(OSError):
            if path.stat().st_mtime > time.time():
                os.utime(path)


def run(
    stage_name: str,
    *,
    spec: str,
    code: str,
    inputs: dict[str, list[Path]],
    out: Path,
    operation: Execution,
    tracking: Tracking,
    reruns_on: str = "code",
) -> None:
    """Run one stage from paths, as the command line does.

    Args:
        spec: the spec as JSON.
        inputs: by role, manifests of artifacts or files from outside.
        out: folder that the result is published in.
        tracking: where the curves of a launched stage go.
        reruns_on: `versions` if a result made with other versions of the stage's libraries isn't taken.
    Raises:
        SnaketuneError: a spec or an input that doesn't fit the stage.
    """
    stage = STAGES[stage_name]
    try:
        typed = stage.spec.model_validate_json(spec)
    except ValidationError as error:
        raise SnaketuneError(f"--spec doesn't fit stage {stage_name}: {error}") from None
    artifacts = {role: [result_at(path) for path in inputs.get(role, [])] for role in (*stage.one, *stage.many)}
    for role in stage.one:
        if len(artifacts[role]) != 1:
            raise SnaketuneError(f"stage {stage_name} needs exactly one {role}, got {len(artifacts[role])}")
    files = {role: inputs.get(role, []) for role in stage.files}

    def build(work: WorkFolder) -> Outcome:
        # A launched process imports what shapes the result, and checks that itself.
        (check_code if stage.launcher else import_checked)(stage.module, code, stage_name)
        if stage.gpu and not (operation.gpus and visible_gpus()):
            tell(needs_of_gpu(typed, operation))
        with claimed_gpus(operation.gpus) if stage.gpu and not stage.key_module else nullcontext():
            if stage.launcher:
                launch = import_module(stage.launcher).launch
                outcome = launch(
                    stage_name,
                    spec=typed,
                    operation=operation,
                    tracking=tracking,
                    work=work,
                    out=out,
                    artifacts=artifacts,
                    files=files,
                )
            else:
                told = {"operation": operation} if stage.takes_operation else {}
                outcome = import_module(stage.module).build(typed, work, **stage.arguments(artifacts, files), **told)
        if templates(stage.module):
            # Read while it worked.
            check_code(stage.module, code, stage_name)
        return outcome

    device = ("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else ""
    if stage.key_module:
        # Before anything of it is imported to ask what counts.
        check_code(stage.module, code, stage_name)
    # It is asked of the very device that computes.
    with claimed_gpus(operation.gpus) if stage.key_module else nullcontext():
        keys = (
            import_module(stage.key_module).keys(stage_name, typed, operation, code, device) if stage.key_module else ()
        )
        run_once(
            stage=stage_name,
            spec=json.loads(canonical(typed)),
            artifacts=artifacts,
            files=files,
            code=code,
            out=out,
            payload=stage.payload,
            build=build,
            libraries=stage.libraries(typed, artifacts),
            reruns_on=reruns_on,
            anew=stage.measures,
            device=device,
            keys=keys,
        )
    bring_back_from_the_future(chain.from_iterable(artifacts.values()), operation)
    if stage.link:
        # Also where there was nothing to compute: what an older result names may have been linked since.
        link_payload(out, stage.link)
