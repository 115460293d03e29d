"""Tasks of lm-evaluation-harness from local YAML files, through its own library."""

from pathlib import Path

from transformers import PreTrainedModel

from snaketune.errors import SnaketuneError


def run_tasks(
    model: PreTrainedModel,
    tokenizer_folder: Path,
    folder: Path,
    names: tuple[str, ...],
    limit: int | None,
    batch_size: int,
) -> dict[str, dict[str, float]]:
    """Scores by task and metric.

    Paths of data files in a task's YAML are relative to the working directory.

    Raises:
        SnaketuneError: the folder has no task of that name.
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
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        backend="causal",
    )
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
    return {
        task: {
            metric.removesuffix(",none"): round(float(value), 4)
            for metric, value in sorted(scores.items())
            if isinstance(value, int | float) and metric.endswith(",none") and "_stderr" not in metric
        }
        for task, scores in sorted(found["results"].items())
    }
