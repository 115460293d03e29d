"""The files that local tasks of lm-evaluation-harness consist of: those in their folder, and those elsewhere that they name.

A task's YAML can include other YAML files, read rows from data files or a folder, and call functions of a Python module.
lm-eval resolves includes and modules relative to the YAML file, and data relative to the working directory. Files that those
functions open themselves aren't detected. A Hub dataset is identified by its name, as a Hub model is.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from snaketune.config.paths import check_plain
from snaketune.errors import SnaketuneError

TASKS = (".yaml", ".yml")
DATA = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
PACKED = (".gz", ".zst")
# Documentation, which doesn't affect a task.
NOT_READ = (".md", ".rst")


class Function(str):
    """The value of a `!function module.name` tag."""


class Loader(yaml.SafeLoader):
    """YAML loader that knows lm-eval's tag `!function` and doesn't import anything."""


Loader.add_constructor("!function", lambda loader, node: Function(loader.construct_scalar(node)))


class TaskFiles(NamedTuple):
    """The files of tasks, sorted.

    Attributes:
        inside: all files of the folder that can affect the tasks.
        outside: files elsewhere that the tasks name.
    """

    inside: tuple[str, ...]
    outside: tuple[str, ...]

    @property
    def data(self) -> tuple[str, ...]:
        """The files that contain rows."""
        return tuple(path for path in (*self.inside, *self.outside) if _is_data(Path(path)))


def task_files(folder: str) -> TaskFiles:
    """All files that the tasks in `folder` consist of.

    Raises:
        SnaketuneError: a task names a file that doesn't exist, or one whose content can't be tracked, such as a URL.
    """
    inside = _below(Path(folder))
    named: dict[Path, None] = {}
    waiting = [path for path in inside if path.suffix in TASKS]
    read = set()
    while waiting:
        task = waiting.pop()
        if task.resolve() in read:
            continue
        read.add(task.resolve())
        for path in _named(task):
            named[path] = None
            if path.suffix in TASKS:
                waiting.append(path)
    known = {path.resolve() for path in inside}
    outside = {str(path) for path in named if path.resolve() not in known}
    for path in (*map(str, inside), *outside):
        check_plain(folder, path)
    return TaskFiles(tuple(sorted(map(str, inside))), tuple(sorted(outside)))


def _is_data(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix in DATA


def _below(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in NOT_READ)
    return sorted(
        path for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    )  # fmt: skip


def _named(task: Path) -> Iterator[Path]:
    """The files that a task's YAML names."""
    try:
        content = yaml.load(task.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SnaketuneError(f"{task} can't be read as YAML: {' '.join(str(error).split())}") from None
    for value in _values(content):
        if isinstance(value, Function):
            yield from _module(task, value)
        elif isinstance(value, dict):
            for included in _texts(value.get("include")):
                yield _existing(task, "include", task.parent / included)
            yield from _dataset(task, value)


def _values(value: Any) -> Iterator[Any]:
    """Yield a nested value and all values inside it."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _values(inner)


def _texts(value: Any) -> list[str]:
    return [text for text in _values(value) if isinstance(text, str)]


def _module(task: Path, function: Function) -> Iterator[Path]:
    """Yield the local module of a function; nothing for a library, which is identified by its version."""
    module = function.rpartition(".")[0]
    name = f"{module.replace('.', '/')}.py"
    # lm-eval also accepts a path before the last dot.
    for path in (task.parent / name, task.parent / f"{module}.py", Path(name)):
        if path.is_file():
            yield path
            return
    top = module.split(".")[0]
    if not top or (top not in sys.stdlib_module_names and find_spec(top) is None):
        raise SnaketuneError(f"{task}: !function {function}: there is no {task.parent / name}, and no library {top!r}")


def _dataset(task: Path, value: dict[str, Any]) -> Iterator[Path]:
    """Local data: `dataset_path` as a folder or file, or `dataset_kwargs` with `data_files` or `data_dir`."""
    path, arguments = value.get("dataset_path"), value.get("dataset_kwargs")
    arguments = arguments if isinstance(arguments, dict) else {}
    path = path if isinstance(path, str) else ""
    files, folder = _texts(arguments.get("data_files")), arguments.get("data_dir")
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    is_local = is_local or (path != "" and Path(path).exists() and not _is_reader(path))
    if "/" in path and not is_local:
        # A Hub dataset; its data files are on the Hub, too.
        return
    root = Path(path).expanduser() if is_local else Path()
    root = root / folder if isinstance(folder, str) else root
    for file in files:
        if "://" in file:
            raise SnaketuneError(
                f"{task}: data_files: changes of {file!r} can't be detected; download it, and name the local file"
            )
        if any(letter in file for letter in "*?["):
            matches = [
                one for one in Path(root.anchor or ".").glob(str(root.relative_to(root.anchor) / file)) if one.is_file()
            ]
            if not matches:
                raise SnaketuneError(
                    f"{task}: data_files: no file matches {str(root / file)!r} (looked in {Path.cwd()})"
                )
            yield from sorted(matches)
        else:
            yield _existing(task, "data_files", root / file)
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
