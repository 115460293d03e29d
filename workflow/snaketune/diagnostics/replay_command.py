"""`python -m snaketune replay MANIFEST`: replay a training whose record may be of another clone.

results/replay/sft-demo/    verify.json, as `verification` writes it
"""

from dataclasses import asdict
from pathlib import Path

from snaketune.artifacts.digests import digest_json
from snaketune.config.operation import Execution
from snaketune.diagnostics.replay import Record, replayed
from snaketune.diagnostics.verified import FILE, as_text
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WORK_ROOT, WorkFolder, remove
from snaketune.stages.host.gpus import claimed_gpus
from snaketune.stages.host.locks import locked
from snaketune.stages.job import RESULTS, result_at
from snaketune.stages.job_files import job_file_of, read_job_file


def replay(manifest: Path, steps: int) -> int:
    """Replay a training and print what was compared; return the exit status, 1 if something differs from the record.

    Raises:
        SnaketuneError: there is no job file of it, an input is missing, or the training fails.
    """
    record, out = read_record(manifest), manifest.parent
    stage, name = record.result.manifest["stage"], out.name
    job_file = read_job_file(job_file_of(stage, name))
    gpus = Execution.model_validate(job_file.operation).gpus
    work = WorkFolder(WORK_ROOT / "replay" / digest_json([str(manifest), record.result.manifest])[:32])
    with locked(work.folder / "lock", f"a replay of {manifest}"), claimed_gpus(gpus):
        try:
            checks = list(replayed(record, job_file, steps, work))
        finally:
            remove(work.folder)
    content = {"checks": [asdict(check) for check in checks]}
    folder = RESULTS / "replay" / f"{stage}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, content)
    print(f"replay of {manifest}", as_text(content["checks"]), sep="\n", flush=True)
    return int(any(check.status == "failed" for check in checks))


def read_record(manifest: Path) -> Record:
    """The record beside a training's manifest, with its snapshots; SnaketuneError if there is none."""
    result, folder = result_at(manifest), manifest.parent
    if result.manifest["stage"] not in ("sft", "dpo"):
        raise SnaketuneError(f"{manifest} is no training; expected the manifest of an sft or dpo result")
    record = Record.read(result, tuple(map(result_at, folder.parent.glob(f"{folder.name}@*/manifest.json"))))
    if not record.lines:
        raise SnaketuneError(f"{manifest.with_name('run.json')} has no history to compare with")
    return record
