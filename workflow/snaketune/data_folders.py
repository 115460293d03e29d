"""Folders as sources: which of their files are data, and whether the program that wrote a folder has finished.

Spark, datatrove and others leave more than data in a folder, and say there what is done:

    part-00000-….parquet             data
    _SUCCESS                         Spark, Hadoop: the job has finished
    _temporary/…                     Spark, Hadoop: parts of a job that hasn't
    _delta_log/…                     Delta Lake: which of the files are the table's
    logs/executor.json               datatrove: `world_size`, the number of tasks
    logs/completions/00000           datatrove: a task that has finished
    README.md, dataset_info.json     Hub, `datasets`: about the data
    train-….parquet, test/…          Hub, `datasets`: splits, of which only some are meant

Only what these names show is decided. A folder of another program, such as NeMo Curator's, has no such marks and is taken as it
is. A pattern takes what it matches, without these checks.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

SUCCESS, TEMPORARY, DELTA = "_SUCCESS", "_temporary", "_delta_log"
# Names that only Spark gives: the number of the task, and the id of the job.
SPARK_PART = re.compile(r"part-\d{5,}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
EXECUTOR, COMPLETIONS = "executor.json", "completions"
# Files about a data set: a repository's, and what `save_to_disk` writes beside the rows.
ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|citation)(\.(md|rst|txt|cff))?|dataset_(infos?|dict)\.json|state\.json", re.IGNORECASE
)
# A word that is all of a name, or before a number: `train-00000-of-00002.parquet`, not `dev-ops.jsonl`.
WHOLE = r"(?=[-_.\d]*(of[-_.\d]*)?(\.[a-z.]+)?$|[-_.]\d)"
TRAINED = re.compile(rf"train(ing)?{WHOLE}", re.IGNORECASE)
EVALUATED = re.compile(rf"(test|valid(ation)?|val|dev|eval(uation)?){WHOLE}", re.IGNORECASE)


def data_files(folder: str, names: Iterable[str], read: Callable[[str], bytes], succeeded: bool = False) -> list[str]:
    """The names of the data files of a folder, in order; ValueError if the program that writes it hasn't finished, or it holds
    files to train on and others to evaluate with.

    >>> data_files("d", ["b.jsonl", "a/x.jsonl", "_SUCCESS", ".crc/b"], lambda name: b"")
    ['a/x.jsonl', 'b.jsonl']

    Args:
        names: of all files and folders within it, relative to it.
        read: reads one of its files.
        succeeded: whether a folder around it has Spark's mark, as for one partition of a table.
    """
    names = sorted(names)
    parts = {name: PurePosixPath(name).parts for name in names}
    pattern = f"to read the files as they are, name a pattern, such as {folder.rstrip('/')}/**/*.parquet"
    for mark, what in (
        (TEMPORARY, "Spark or Hadoop is writing to it, or was ended while it did; wait for the job, or run it again"),
        (DELTA, "it is a table of Delta Lake, which also holds files of older versions; write the table as Parquet"),
    ):
        if found := next((name for name in names if mark in parts[name]), None):
            raise ValueError(f"{folder!r} holds {found}: {what}; {pattern}")
    logs = [PurePosixPath(name).parent for name in names if parts[name][-1] == EXECUTOR]
    logs = [log for log in logs if any(PurePosixPath(name).is_relative_to(log / COMPLETIONS) for name in names)]
    for log in logs:
        _check_tasks(folder, log, names, read)
    data = [name for name in names if not any(part.startswith(("_", ".")) and "=" not in part for part in parts[name])]
    data = [name for name in data if not any(PurePosixPath(name).is_relative_to(log) for log in logs)]
    data = [name for name in data if not ABOUT.fullmatch(parts[name][-1])]
    splits: dict[re.Pattern[str], str] = {}
    for name in data:
        # The folder of a split may hold files of any name.
        matches = (split for part in parts[name] for split in (TRAINED, EVALUATED) if split.match(part))
        if split := next(matches, None):
            splits.setdefault(split, name)
    if len(splits) == 2:
        raise ValueError(
            f"{folder!r} holds several splits, such as {' and '.join(splits.values())}; name the folder of one of them, or a "
            f"pattern, such as {folder.rstrip('/')}/train*.jsonl"
        )
    marked = [PurePosixPath(name).parent for name in names if parts[name][-1] == SUCCESS]
    for name in data:
        finished = succeeded or any(PurePosixPath(name).is_relative_to(place) for place in marked)
        if SPARK_PART.match(parts[name][-1]) and not finished:
            raise ValueError(
                f"{folder!r} holds {name}, which Spark wrote, and no {SUCCESS}, which it writes at the end of a job; run the "
                f"job again; {pattern}"
            )
    return data


def _check_tasks(folder: str, log: PurePosixPath, names: list[str], read: Callable[[str], bytes]) -> None:
    """Check the tasks of datatrove in the same way as its `jobs_status`."""
    try:
        tasks = json.loads(read(str(log / EXECUTOR)))["world_size"]
    except (ValueError, LookupError, TypeError):
        return
    # One folder of logs may serve several runs, of which only the last is described.
    done = {PurePosixPath(name).name for name in names if PurePosixPath(name).parent == log / COMPLETIONS}
    missing = [rank for rank in range(tasks) if f"{rank:05d}" not in done] if isinstance(tasks, int) else []
    if missing:
        raise ValueError(
            f"{folder!r}: {len(missing)} of {tasks} tasks of datatrove haven't finished (no {log / COMPLETIONS / ''}"
            f"/{missing[0]:05d}); run it again, which skips the tasks that have"
        )
