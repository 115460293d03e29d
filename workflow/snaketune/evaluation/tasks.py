"""Tasks of lm-evaluation-harness through its library: tasks that it ships, by name, or tasks in local YAML files.

They are prepared before a model is loaded, so that bad names, data or chat templates are refused, and data fetched, before
anything is computed.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from snaketune.config.evaluations import TaskSettings
from snaketune.errors import SnaketuneError, first_line
from snaketune.evaluation.score_intervals import SHARES, t_interval
from snaketune.evaluation.task_code import refuse_code
from snaketune.stages.host.disk_errors import disk_error_message
from snaketune.suggestions import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Bootstrap samples for standard errors without a formula; lm-evaluation-harness' default of 100,000 takes minutes.
BOOTSTRAP = 1000
HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([0-9a-f]{40})/")


@dataclass(frozen=True, kw_only=True)
class PreparedTasks:
    """Tasks with their data: lm_eval's task and group objects, where they are from, and the commits of the data by Hub
    repository (an empty list where the commit isn't known)."""

    manager: Any
    tasks: list[Any]
    where: str
    tokenizer: "PreTrainedTokenizerBase"
    chat_template: bool
    data: dict[str, list[str]]


@contextmanager
def prepared_tasks(
    questions: TaskSettings, folder: Path | None, tokenizer_folder: Path, scratch: Path
) -> Iterator[PreparedTasks]:
    """Load tasks with their data, which are available as long as the context lasts. SnaketuneError: there is no task of
    that name, one runs code, its data can't be loaded, or the tokenizer has no chat template although `chat_template` is
    true.

    Args:
        folder: folder of local task files, whose data files are relative to the working directory; None for tasks that
            lm-evaluation-harness ships, whose data `datasets` fetches and caches.
        scratch: an existing folder for `datasets`' cache of local data; empty again afterwards.
    """
    from lm_eval import tasks
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    has_template = tokenizer.chat_template is not None
    if questions.chat_template is True and not has_template:
        raise SnaketuneError(
            "eval.tasks.chat_template is true, but the tokenizer has none; set it to auto, or set a template under "
            "tokenizers.NAME.chat_template"
        )
    options = {"include_path": str(folder), "include_defaults": False} if folder else {}
    manager = tasks.TaskManager(**options)
    where = str(folder) if folder else "lm-evaluation-harness"
    for name in questions.names:
        if name not in manager.all_tasks:
            raise SnaketuneError(f"eval.tasks.names: {where} has no {name!r}{unknown(name, manager.all_tasks)}")
    refuse_code(manager.task_index, questions.names)
    with _own_datasets_cache(scratch) if folder else nullcontext():
        loaded = _load(manager, questions.names, where)
        yield PreparedTasks(
            manager=manager,
            tasks=[part for name in questions.names for part in _parts(manager, loaded, name)],
            where=where,
            tokenizer=tokenizer,
            chat_template=has_template if questions.chat_template == "auto" else questions.chat_template,
            data=_commits(loaded["tasks"]),
        )


def run_tasks(
    model: "PreTrainedModel", prepared: PreparedTasks, questions: TaskSettings, batch_size: int
) -> dict[str, Any]:
    """Evaluate a model on the tasks; SnaketuneError if a task gives no numeric score.

    Returns:
        The entries of scores.json, by task and metric (`METRIC,FILTER` where the task has a named filter): `tasks`,
        `task_stderrs` by lm-evaluation-harness, and their `task_intervals`.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=prepared.tokenizer, batch_size=batch_size, backend="causal")
    # Bootstrap standard errors are computed in this process, which evaluates nothing else, instead of one process per core.
    os.environ["DISABLE_MULTIPROC"] = "1"
    results = simple_evaluate(
        model=wrapped,
        tasks=prepared.tasks,
        num_fewshot=questions.few_shot,
        limit=questions.limit,
        task_manager=prepared.manager,
        apply_chat_template=prepared.chat_template,
        fewshot_as_multiturn=prepared.chat_template and questions.few_shot_as_multiturn,
        system_instruction=questions.system_instruction,
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    measured = sorted(results["results"].items())
    scores = {task: _numbers(values) for task, values in measured}
    # Groups need no scores: their tasks have them.
    empty = [task for task in results["configs"] if not scores.get(task)]
    if empty:
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(empty)} in {prepared.where} gives no numeric score; check its metric_list"
        )
    stderrs = {task: _numbers(values, "_stderr") for task, values in measured}
    intervals = {task: _intervals(scores[task], errors, _size(results, task)) for task, errors in stderrs.items()}
    return {"tasks": scores, "task_stderrs": stderrs, "task_intervals": intervals}


def _load(manager: Any, names: tuple[str, ...], where: str) -> dict[str, dict[str, Any]]:
    """lm_eval's tasks and groups by name, with their data loaded."""
    try:
        return manager.load(list(names))
    except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
        if disk_error_message(error):
            raise
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(names)} of {where} can't be loaded ({type(error).__name__}: {first_line(error)}). "
            "Data from the Hub are fetched once, which needs a network, and then read from the cache of `datasets`"
        ) from error


def _parts(manager: Any, loaded: dict[str, dict[str, Any]], name: str) -> list[Any]:
    """The task or group of a name, or the tasks of a tag."""
    if name in loaded["groups"]:
        return [loaded["groups"][name]]
    names = (name,) if name in loaded["tasks"] else sorted(manager.task_index[name].tags)
    return [loaded["tasks"][task] for task in names]


def _commits(tasks: dict[str, Any]) -> dict[str, list[str]]:
    commits: dict[str, set[str]] = {}
    for task in tasks.values():
        data = getattr(task, "dataset", None)
        splits = data.values() if isinstance(data, dict) else ()
        known = {HUB_FILE.match(url) for split in splits for url in split.info.download_checksums or ()} - {None}
        for file in known:
            commits.setdefault(file[1], set()).add(file[2])
        path = getattr(task, "DATASET_PATH", None)
        if not known and path and "/" in path and not Path(path).exists():
            commits.setdefault(path, set())
    return {repository: sorted(revisions) for repository, revisions in sorted(commits.items())}


def _numbers(measured: dict[str, Any], ending: str = "") -> dict[str, float]:
    """The values of `METRIC,FILTER`, or of `METRIC_stderr,FILTER` with `ending="_stderr"`, rounded."""
    values, digits = {}, 6 if ending else 4
    for key, value in sorted(measured.items()):
        metric, comma, by = key.partition(",")
        wanted = comma and metric.endswith("_stderr") == bool(ending)
        if wanted and isinstance(value, int | float) and math.isfinite(value):
            values[f"{metric.removesuffix(ending)},{by}".removesuffix(",none")] = round(float(value), digits)
    return values


def _intervals(scores: dict[str, float], stderrs: dict[str, float], size: int) -> dict[str, list[float]]:
    shares = {metric: metric.startswith(SHARES) for metric in stderrs if metric in scores}
    known = {metric: t_interval(scores[metric], stderrs[metric], size, share) for metric, share in shares.items()}
    return {metric: interval for metric, interval in known.items() if interval}


def _size(results: dict[str, Any], name: str) -> int:
    """The number of documents that a task, or all tasks of a group, was evaluated on.

    >>> samples = {"a": {"effective": 3}, "b": {"effective": 4}}
    >>> _size({"n-samples": samples, "group_subtasks": {"all": ["a", "more"], "more": ["b"]}}, "all")
    7
    """
    if samples := results["n-samples"].get(name):
        return samples["effective"]
    return sum(_size(results, part) for part in results["group_subtasks"].get(name, ()))


@contextmanager
def _own_datasets_cache(scratch: Path) -> Iterator[None]:
    """Use a temporary cache of `datasets` in `scratch` for local data, since the shared one identifies files by path and
    time, or, if compressed, by path alone. Cached Hub data (`OWNER___NAME`, by commit) remain available,
    also without a network."""
    from datasets import config

    with TemporaryDirectory(dir=scratch, prefix="datasets-") as cache:
        for hub in Path(config.HF_DATASETS_CACHE).glob("*___*"):
            (Path(cache) / hub.name).symlink_to(hub.resolve())
        # `datasets` reads its environment once, at import, and tasks are loaded without a `cache_dir`.
        shared, config.HF_DATASETS_CACHE = config.HF_DATASETS_CACHE, Path(cache)
        try:
            yield
        finally:
            config.HF_DATASETS_CACHE = shared
