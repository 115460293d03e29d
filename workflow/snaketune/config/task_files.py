"""Tasks of lm-evaluation-harness: the files that local ones consist of, and whether it ships tasks of the configured names.

A task's YAML can include other YAML files, read rows from data files or a folder, and call functions of a Python module.
lm-eval resolves includes and modules relative to the YAML file, and data relative to the working directory. Files that those
functions open themselves aren't detected. A Hub dataset is identified by its name, as a Hub model is.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from snaketune.config.base import check_plain, is_local_path
from snaketune.config.secrets import nested
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown

TASKS = (".yaml", ".yml")
DATA = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
PACKED = (".gz", ".zst")
# Documentation, which doesn't affect a task.
NOT_READ = (".md", ".rst")
# Of the files that lm-evaluation-harness ships, those with other suffixes define tasks.
NO_TASKS = (".py", ".pyc", ".md", ".sh", ".json", ".jpg")
# `task: name`, `"task": "name"`, `- group: name`, `tag: [one, two]`, and `- name` in lists of them.
NAMED = re.compile(rb"""^[ ]*(?:-[ ]+)?(?:["']?(?:task|group|tag)["']?[ ]*:|-)[ ]*(\S[^\n#]*)""", re.MULTILINE)


class Function(str):
    """The value of a `!function module.name` tag."""


class Loader(yaml.SafeLoader):
    """YAML loader that knows lm-eval's tag `!function` and doesn't import anything."""


def _function(loader: Loader, node: yaml.ScalarNode) -> Function:
    return Function(loader.construct_scalar(node))


Loader.add_constructor("!function", _function)


class TaskFiles(NamedTuple):
    """The files of tasks, sorted."""

    inside: tuple[str, ...]  # all files of the folder that can affect the tasks
    outside: tuple[str, ...]  # files elsewhere that the tasks name

    @property
    def data(self) -> tuple[str, ...]:
        """The files that contain rows."""
        paths = ((text, Path(text)) for text in (*self.inside, *self.outside))
        return tuple(text for text, path in paths if (path.stem if path.suffix in PACKED else path.name).endswith(DATA))


def task_files(folder: str) -> TaskFiles:
    """All files that the tasks in `folder` consist of; SnaketuneError if a task names a file that doesn't exist, or one whose
    content can't be tracked, such as a URL."""
    inside = _below(Path(folder))
    # By their content's place, so that a file that is named in two ways is one.
    known, read, named = {path.resolve() for path in inside}, set(), set()
    waiting = [path for path in inside if path.suffix in TASKS]
    while waiting:
        task = waiting.pop()
        if task.resolve() not in read:
            read.add(task.resolve())
            files = list(_named(task))
            named.update(files)
            waiting += [path for path in files if path.suffix in TASKS]
    outside = {path for path in named if path.resolve() not in known}
    return TaskFiles(*(tuple(sorted(check_plain(folder, str(path)) for path in paths)) for paths in (inside, outside)))


def _below(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in NOT_READ)
    hidden = (".", "__pycache__")
    return sorted(path for path in files if not any(part.startswith(hidden) for part in path.relative_to(folder).parts))


def _named(task: Path) -> Iterator[Path]:
    """The files that a task's YAML names."""
    try:
        content = yaml.load(task.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SnaketuneError(f"{task} can't be read as YAML: {' '.join(str(error).split())}") from None
    for _, value in nested(content):
        if isinstance(value, Function):
            yield from _module(task, value)
        elif isinstance(value, dict):
            for included in _texts(value.get("include")):
                yield _existing(task, "include", task.parent / included)
            yield from _dataset(task, value)


def _texts(value: Any) -> list[str]:
    return [text for _, text in nested(value) if isinstance(text, str)]


def _module(task: Path, function: Function) -> Iterator[Path]:
    """Yield the local module of a function; nothing for a library, which is identified by its version."""
    module = function.rpartition(".")[0]
    name = f"{module.replace('.', '/')}.py"
    top = module.split(".")[0]
    # lm-eval also accepts a path before the last dot.
    places = (task.parent / name, task.parent / f"{module}.py", Path(name))
    if path := next((path for path in places if path.is_file()), None):
        yield path
    elif not top or (top not in sys.stdlib_module_names and find_spec(top) is None):
        raise SnaketuneError(f"{task}: !function {function}: there is no {task.parent / name}, and no library {top!r}")


def _dataset(task: Path, value: dict[str, Any]) -> Iterator[Path]:
    """Local data: `dataset_path` as a folder or file, or `dataset_kwargs` with `data_files` or `data_dir`."""
    path, arguments = value.get("dataset_path"), value.get("dataset_kwargs")
    path = path if isinstance(path, str) else ""
    arguments = arguments if isinstance(arguments, dict) else {}
    files, folder = _texts(arguments.get("data_files")), arguments.get("data_dir")
    is_local = is_local_path(path) or (path != "" and Path(path).exists() and not _is_reader(path))
    if "/" in path and not is_local:
        # A Hub dataset; its data files are on the Hub, too.
        return
    root = Path(path).expanduser() if is_local else Path()
    if isinstance(folder, str):
        root /= folder
    for file in files:
        if "://" in file:
            raise SnaketuneError(
                f"{task}: data_files: changes of {file!r} can't be detected; download it, and name the local file"
            )
        if not any(letter in file for letter in "*?["):
            yield _existing(task, "data_files", root / file)
            continue
        found = Path(root.anchor or ".").glob(str(root.relative_to(root.anchor) / file))
        matches = sorted(path for path in found if path.is_file())
        if not matches:
            raise SnaketuneError(f"{task}: data_files: no file matches {str(root / file)!r} (looked in {Path.cwd()})")
        yield from matches
    if not files and (is_local or isinstance(folder, str)):
        key = "data_dir" if isinstance(folder, str) else "dataset_path"
        yield from [root] if root.is_file() else _below(_existing(task, key, root))


def _is_reader(name: str) -> bool:
    """Whether `datasets` takes a name for one of its readers, such as `json`, even if a folder of that name exists."""
    # Imported here, as it is slow and rarely needed.
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return name in _PACKAGED_DATASETS_MODULES


def _existing(task: Path, key: str, path: Path) -> Path:
    path = path.expanduser()
    if not path.exists():
        raise SnaketuneError(
            f"{task}: {key}: {str(path)!r} doesn't exist (looked in {Path.cwd()}), so changes of it couldn't be detected; "
            "paths of data are relative to the working directory, paths of includes to the YAML file"
        )
    return path


def check_shipped_tasks(config: Workflow) -> None:
    """Raise SnaketuneError if the installed lm-evaluation-harness, if any, ships no task of a name under `eval.NAME.tasks`.

    Building its own index takes fifteen seconds. Searching its files for the names takes milliseconds for names that exist, and
    a second for a missing one, for which all 14,000 files are read. The search can accept a word that isn't a task, such as an
    item of another list; the stage then reports that before it loads a model.
    """
    configured = {
        name: entry.tasks.names for name, entry in config.eval.items() if entry.tasks and entry.tasks.folder is None
    }
    folder = tasks_folder()
    if not configured or folder is None:
        return
    known: set[str] = set()
    names = {name for tasks in configured.values() for name in tasks}
    # Most tasks are in a folder that their name begins with, so searching those first reads few files.
    for path in sorted(folder.iterdir(), key=lambda path: not any(name.startswith(path.name) for name in names)):
        known |= task_names(path)
        if names <= known:
            return
    missing = ((evaluation, name) for evaluation, tasks in configured.items() for name in tasks if name not in known)
    evaluation, name = next(missing)
    raise SnaketuneError(
        f"eval.{evaluation}.tasks.names: lm-evaluation-harness ships no task, tag or group {name!r}{unknown(name, known)} "
        "(`lm-eval ls tasks` lists all; tasks of your own need `folder`)"
    )


def tasks_folder() -> Path | None:
    """The folder of lm-evaluation-harness' tasks; None if it isn't installed. Doesn't import it."""
    spec = find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks" if spec and spec.submodule_search_locations else None


def task_names(folder: Path) -> set[str]:
    """The names of all tasks, tags and groups in the task files of a folder, and some other words."""
    paths = (Path(path, file) for path, _, files in os.walk(folder) for file in files if not file.endswith(NO_TASKS))
    values = {value for path in paths for value in NAMED.findall(path.read_bytes())}
    names = (name.strip(b" \t\r\"'[]{}") for value in values for name in value.split(b","))
    return {name.decode("utf-8", "replace") for name in names if name}
