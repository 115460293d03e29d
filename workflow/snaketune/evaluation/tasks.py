"""Tasks of lm-evaluation-harness through its own library: those that it ships, by name, or those in local YAML files.

They are prepared before a model is loaded: names, data and chat template are refused, or fetched, while nothing has been
computed. The index of what it ships takes lm-evaluation-harness some 15 s.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from snaketune.config.evaluations import TaskQuestions
from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError
from snaketune.evaluation.harness_results import harness_results
from snaketune.evaluation.score_intervals import SHARES, t_interval
from snaketune.evaluation.task_code import refuse_code
from snaketune.stages.host.disk_errors import disk_trouble

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Samples that a standard error is found from where there is no formula; lm-evaluation-harness' own 100,000 take minutes.
BOOTSTRAP = 1000
HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([0-9a-f]{40})/")


@dataclass(frozen=True, kw_only=True)
class PreparedTasks:
    """Tasks with their data.

    Attributes:
        tasks: what lm_eval made of the names.
        where: what has them, for messages.
        folder: their files.
        data: by repository on the Hub, the commits that the data are of; none where that isn't known.
    """

    manager: Any
    tasks: list[Any]
    where: str
    folder: Path
    tokenizer: "PreTrainedTokenizerBase"
    chat_template: bool
    data: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """By task and metric (`METRIC,FILTER` where a task filters responses by a filter of its own).

    Attributes:
        stderrs, intervals: of the scores that lm-evaluation-harness gives a standard error for.
        harness: `lm_eval.json`.
    """

    scores: dict[str, dict[str, float]]
    stderrs: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, list[float]]]
    harness: dict[str, Any]


@contextmanager
def prepared_tasks(
    questions: TaskQuestions, folder: Path | None, tokenizer_folder: Path, scratch: Path
) -> Iterator[PreparedTasks]:
    """Tasks with their data, which are there as long as the context lasts.

    Paths of data files in a local task's YAML are relative to the working directory.

    Args:
        folder: of local task files; None for what lm-evaluation-harness ships, whose data `datasets` fetches and keeps.
        scratch: an existing folder for what `datasets` makes of local data; empty again afterwards.
    Raises:
        SnaketuneError: there is no task of that name, one needs code, its data can't be had, or the tokenizer has no chat
            template where one is asked for.
    """
    from lm_eval import tasks
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    has_template = tokenizer.chat_template is not None
    if questions.chat_template is True and not has_template:
        raise SnaketuneError(
            "eval.tasks.chat_template is true, but the tokenizer has none; leave it at auto, or name one under "
            "tokenizers.NAME.chat_template"
        )
    own = {"include_path": str(folder), "include_defaults": False} if folder else {}
    manager = tasks.TaskManager(**own)
    where = str(folder) if folder else "lm-evaluation-harness"
    for name in questions.names:
        if name not in manager.all_tasks:
            raise SnaketuneError(f"eval.tasks.names: {where} has no {name!r}{unknown(name, manager.all_tasks)}")
    refuse_code(manager.task_index, questions.names)
    with _own_datasets_cache(scratch if folder else None):
        loaded = _load(manager, questions.names, where)
        yield PreparedTasks(
            manager=manager,
            tasks=[part for name in questions.names for part in _parts(manager, loaded, name)],
            where=where,
            folder=folder or Path(tasks.__file__).parent,
            tokenizer=tokenizer,
            chat_template=has_template if questions.chat_template == "auto" else questions.chat_template,
            data=_commits(loaded["tasks"]),
        )


def run_tasks(
    model: "PreTrainedModel", prepared: PreparedTasks, questions: TaskQuestions, batch_size: int
) -> TaskScores:
    """Ask a model.

    Raises:
        SnaketuneError: a task gives no score.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=prepared.tokenizer, batch_size=batch_size, backend="causal")
    with _in_this_process():
        found = simple_evaluate(
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
    scores = {task: _numbers(measured) for task, measured in sorted(found["results"].items())}
    # Groups need none: their tasks have theirs.
    empty = [task for task in found["configs"] if not scores.get(task)]
    if empty:
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(empty)} in {prepared.where} gives no score that is a number; see its metric_list"
        )
    stderrs = {task: _numbers(measured, "_stderr") for task, measured in sorted(found["results"].items())}
    return TaskScores(
        scores=scores,
        stderrs=stderrs,
        intervals={task: _intervals(scores[task], some, _size(found, task)) for task, some in stderrs.items()},
        harness=harness_results(
            found,
            [prepared.folder, prepared.folder.absolute(), Path.cwd()],
            fewshot_as_multiturn=prepared.chat_template and questions.few_shot_as_multiturn,
            system_instruction=questions.system_instruction,
            chat_template=prepared.tokenizer.chat_template if prepared.chat_template else None,
        ),
    )


def _load(manager: Any, names: tuple[str, ...], where: str) -> dict[str, dict[str, Any]]:
    """lm_eval's tasks and groups by name, their data with them."""
    try:
        return manager.load(list(names))
    except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
        if disk_trouble(error):
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(names)} of {where} can't be loaded ({type(error).__name__}: {said}). What comes "
            "from the Hub is fetched once, where there is a network, and then lies in the cache of `datasets`"
        ) from error


def _parts(manager: Any, loaded: dict[str, dict[str, Any]], name: str) -> list[Any]:
    """The task or group of a name, or the tasks of a tag."""
    entry = manager.task_index[name]
    if name in loaded["groups"]:
        return [loaded["groups"][name]]
    return [loaded["tasks"][task] for task in ((name,) if name in loaded["tasks"] else sorted(entry.tags))]


def _commits(tasks: dict[str, Any]) -> dict[str, list[str]]:
    """By repository, the commits that `datasets` says their data are of."""
    found: dict[str, set[str]] = {}
    for task in tasks.values():
        data = getattr(task, "dataset", None)
        splits = data.values() if isinstance(data, dict) else ()
        known = {HUB_FILE.match(url) for split in splits for url in split.info.download_checksums or ()} - {None}
        for file in known:
            found.setdefault(file[1], set()).add(file[2])
        path = getattr(task, "DATASET_PATH", None)
        if not known and path and "/" in path and not Path(path).exists():
            found.setdefault(path, set())
    return {repository: sorted(commits) for repository, commits in sorted(found.items())}


def _numbers(measured: dict[str, Any], ending: str = "") -> dict[str, float]:
    """From lm-eval's `METRIC,FILTER` and `METRIC_stderr,FILTER`: one of the two, by metric and filter, rounded."""
    found = {}
    for key, value in sorted(measured.items()):
        metric, comma, by = key.partition(",")
        is_stderr = metric.endswith("_stderr")
        if comma and isinstance(value, int | float) and math.isfinite(value) and is_stderr == (ending == "_stderr"):
            found[f"{metric.removesuffix('_stderr')},{by}".removesuffix(",none")] = round(
                float(value), 4 + 2 * is_stderr
            )
    return found


def _intervals(scores: dict[str, float], stderrs: dict[str, float], size: int) -> dict[str, list[float]]:
    """Of the metrics that have one."""
    known = {
        metric: t_interval(scores[metric], stderr, size, share=metric.startswith(SHARES))
        for metric, stderr in stderrs.items()
        if metric in scores
    }
    return {metric: interval for metric, interval in known.items() if interval}


def _size(found: dict[str, Any], name: str) -> int:
    """Documents that a task was asked about; of a group, all of its tasks'.

    >>> asked = {"a": {"effective": 3}, "b": {"effective": 4}}
    >>> _size({"n-samples": asked, "group_subtasks": {"all": ["a", "more"], "more": ["b"]}}, "all")
    7
    """
    if own := found["n-samples"].get(name):
        return own["effective"]
    return sum(_size(found, part) for part in found["group_subtasks"].get(name, ()))


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Standard errors that have no formula are found here, not in as many processes as the machine has cores."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _own_datasets_cache(scratch: Path | None) -> Iterator[None]:
    """Local data read again, not found in a cache that knows files by path and time, or, where compressed, by path alone.

    What it holds of the Hub (`OWNER___NAME`, by commit) stays in use, also without a network.

    Args:
        scratch: where it is made; None for no cache of its own.
    """
    if scratch is None:
        yield
        return
    from datasets import config

    shared = config.HF_DATASETS_CACHE
    with TemporaryDirectory(dir=scratch, prefix="datasets-") as own:
        for hub in Path(shared).glob("*___*"):
            (Path(own) / hub.name).symlink_to(hub.resolve())
        config.HF_DATASETS_CACHE = Path(own)
        try:
            yield
        finally:
            config.HF_DATASETS_CACHE = shared
