"""Tasks of lm-evaluation-harness from local YAML files, through its own library."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from snaketune.errors import SnaketuneError


def run_tasks(
    model: PreTrainedModel,
    tokenizer_folder: Path,
    folder: Path,
    names: tuple[str, ...],
    limit: int | None,
    batch_size: int,
    scratch: Path,
) -> dict[str, dict[str, float]]:
    """Scores by task and metric; `METRIC,FILTER` where a task filters responses by a filter of its own.

    Paths of data files in a task's YAML are relative to the working directory.

    Args:
        scratch: an existing folder for what `datasets` makes of the data; empty again afterwards.
    Raises:
        SnaketuneError: the folder has no task of that name, or a task gives no score.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(missing)} not found in {folder}; it has {', '.join(manager.all_tasks) or 'none'}"
        )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        backend="causal",
    )
    with _own_datasets_cache(scratch):
        found = simple_evaluate(
            model=wrapped,
            tasks=list(names),
            limit=limit,
            task_manager=manager,
            apply_chat_template=tokenizer.chat_template is not None,
            bootstrap_iters=0,
            log_samples=False,
            verbosity="WARNING",
        )
    scores = {task: _numbers(measured) for task, measured in sorted(found["results"].items())}
    # Groups need none: their tasks have theirs.
    empty = [task for task in found["configs"] if not scores.get(task)]
    if empty:
        raise SnaketuneError(
            f"eval.tasks.names: {', '.join(empty)} in {folder} gives no score that is a number; see its metric_list"
        )
    return scores


def _numbers(measured: dict[str, Any]) -> dict[str, float]:
    """From lm-eval's `METRIC,FILTER`, without standard errors and counts."""
    return {
        key.removesuffix(",none"): round(float(value), 4)
        for key, value in sorted(measured.items())
        if isinstance(value, int | float) and "," in key and not key.split(",")[0].endswith("_stderr")
    }


@contextmanager
def _own_datasets_cache(scratch: Path) -> Iterator[None]:
    """Local data read again, not found in a cache that knows files by path and time, or, where compressed, by path alone.

    What it holds of the Hub (`OWNER___NAME`, by commit) stays in use, also without a network.
    """
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
