"""Which tasks would run code that a model wrote, or that comes with their data: none of them is asked.

Looked at in the task files, before anything that they name is imported or fetched. What ships with lm-evaluation-harness
itself, and the Python modules beside a local YAML file, run as they are: they are chosen by whoever installed or wrote them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from snaketune.errors import SnaketuneError

# The metric of `evaluate` that executes responses.
CODE_EVAL = "code_eval"


class Entry(Protocol):
    """What lm_eval's TaskManager knows of a name: `cfg` is its YAML, `tags` the tasks of a tag."""

    cfg: dict[str, Any] | None
    tags: set[str]


def refuse_code(index: dict[str, Entry], names: tuple[str, ...]) -> None:
    """Args: index: lm_eval's `TaskManager.task_index`.

    Raises:
        SnaketuneError: one of these tasks, or of the tasks of these groups and tags, needs code.
    """
    for name in names:
        for task, config in sorted(task_configs(index, name)):
            if why := _why_not(config):
                raise SnaketuneError(
                    f"eval.tasks.names: {task}{'' if task == name else f' (of {name})'} {why}. Code of models and data sets "
                    "isn't run here; leave the task out"
                )


def task_configs(index: dict[str, Entry], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks that a name stands for, with what their YAML says."""
    entry = index.get(name)
    config = entry.cfg if entry else None
    if config is None:
        for task in sorted(entry.tags) if entry else ():
            yield from task_configs(index, task)
    elif "group" in config and "class" not in config:
        yield from _members(index, config)
    else:
        yield name, config


def _members(index: dict[str, Entry], group: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A group's tasks: names, or mappings that say something else of a named task or hold another group."""
    members = group.get("task")
    for member in members if isinstance(members, list) else [members]:
        said = member if isinstance(member, dict) else {}
        named = said.get("group", said.get("task")) if said else member
        if isinstance(named, str) and named in index:
            yield from ((task, {**config, **said}) for task, config in task_configs(index, named))
        elif "group" in said:
            yield from _members(index, said)
        elif said:
            yield str(named), said


def _why_not(config: dict[str, Any]) -> str | None:
    if config.get("unsafe_code"):
        return "runs what the model writes (unsafe_code)"
    arguments = config.get("dataset_kwargs")
    if isinstance(arguments, dict) and arguments.get("trust_remote_code"):
        return "needs code that comes with its data set (trust_remote_code)"
    if any(CODE_EVAL in text for text in _texts(config.get("metric_list"))) or any(
        map(_names_code_eval, _texts(config))
    ):
        return f"runs what the model writes ({CODE_EVAL})"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _names_code_eval(function: str) -> bool:
    """Whether this is a function (`/folder/module.name`, as the index has it) of a module that names that metric."""
    if not function.startswith("/") or "\n" in function:
        return False
    module = Path(f"{function.rpartition('.')[0]}.py")
    try:
        return module.is_file() and CODE_EVAL in module.read_text(encoding="utf-8")
    except OSError:
        return False
