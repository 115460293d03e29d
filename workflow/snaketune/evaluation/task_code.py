"""Refusal of tasks that would run code written by a model, or code that comes with their data.

The task files are checked before anything that they name is imported or fetched. Code that ships with lm-evaluation-harness,
and Python modules beside a local YAML file, are trusted: the user installed or wrote them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from snaketune.errors import SnaketuneError

# A metric of the package `evaluate` that executes responses.
CODE_EVAL = "code_eval"


class Entry(Protocol):
    """An entry of lm_eval's task index: `cfg` is its YAML, `tags` the tasks of a tag."""

    cfg: dict[str, Any] | None
    tags: set[str]


def refuse_code(index: dict[str, Entry], names: tuple[str, ...]) -> None:
    """Raise SnaketuneError if one of these tasks, or a task of these groups and tags, of lm_eval's `TaskManager.task_index`
    would run such code."""
    for name in names:
        for task, config in sorted(task_configs(index, name)):
            if reason := _refusal(config):
                raise SnaketuneError(
                    f"eval.tasks.names: {task}{'' if task == name else f' (of {name})'} {reason}. Code of models and data sets "
                    "isn't run here; remove the task"
                )


def task_configs(index: dict[str, Entry], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tasks of a task, group or tag, with their YAML."""
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
    """Yield a group's tasks. Its members are names, or mappings that override a named task or contain another group."""
    members = group.get("task")
    for member in members if isinstance(members, list) else [members]:
        mapping = member if isinstance(member, dict) else {}
        name = mapping.get("group", mapping.get("task")) if mapping else member
        if isinstance(name, str) and name in index:
            yield from ((task, {**config, **mapping}) for task, config in task_configs(index, name))
        elif "group" in mapping:
            yield from _members(index, mapping)
        elif mapping:
            yield str(name), mapping


def _refusal(config: dict[str, Any]) -> str:
    if config.get("unsafe_code"):
        return "runs code that the model writes (unsafe_code)"
    arguments = config.get("dataset_kwargs")
    if isinstance(arguments, dict) and arguments.get("trust_remote_code"):
        return "needs code that comes with its data set (trust_remote_code)"
    named = any(CODE_EVAL in text for text in _texts(config.get("metric_list")))
    if named or any(map(_names_code_eval, _texts(config))):
        return f"runs code that the model writes ({CODE_EVAL})"
    return ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _names_code_eval(function: str) -> bool:
    """Whether this is a function (`/folder/module.name` in the index) of a module that mentions code_eval."""
    if not function.startswith("/") or "\n" in function:
        return False
    module = Path(f"{function.rpartition('.')[0]}.py")
    try:
        return module.is_file() and CODE_EVAL in module.read_text(encoding="utf-8")
    except OSError:
        return False
