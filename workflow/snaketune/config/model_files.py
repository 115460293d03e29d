"""The files of a model's or tokenizer's folder that count: those that a library can load.

Libraries find files by name, in the folder and below it, and new releases find more. So every file counts that isn't known to
be something else, and no config in the folder may name a file that doesn't count, whatever the key.
"""

import json
import os
import re
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path
from typing import Any

from snaketune.config.base import check_plain
from snaketune.config.secrets import nested
from snaketune.errors import SnaketuneError


def _names(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)), re.IGNORECASE)


# Hidden folders hold records of git and of downloads.
OTHER_FOLDERS = _names(".*", "__pycache__", "checkpoint-*", "original", "onnx", "openvino", "coreml", "metal")
OTHER_FILES = _names(
    # Documentation.
    *(".*", "readme*", "license*", "notice*", "*.md", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp"),
    # Weights for other libraries, and pickles: of weights only safetensors are loaded.
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.npy", "*.npz", "*.h5", "*.msgpack", "*.ot"),
    *("*.gguf", "*.onnx", "*.onnx_data", "*.tflite", "*.bin.index.json"),
)
WEIGHTS, INDEX = ".safetensors", ".safetensors.index.json"
OWN_SHARD = re.compile(r"[^/\\]+\.safetensors")


def model_files(path: str | None) -> tuple[str, ...]:
    """The files that count of a model in a local folder, sorted; none for a Hub id, whose revision identifies its
    content. SnaketuneError for a link that leads out of the folder."""
    if not path or not Path(path).is_dir():
        return ()
    root = Path(path).resolve()
    if Path.cwd().is_relative_to(root):
        raise SnaketuneError(
            f"{path} holds the working directory, and so its results; give the model a folder of its own"
        )
    # A snapshot in the Hub's cache consists of links.
    places = (root, root.parents[1] / "blobs") if root.parent.name == "snapshots" else (root,)
    files = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not OTHER_FOLDERS.match(name)]
        for name in (*below, *(name for name in names if not OTHER_FILES.match(name))):
            file = Path(folder, name)
            # The files of a linked folder would be found by libraries, and not here.
            if file.is_symlink() and (name in below or not any(map(file.resolve().is_relative_to, places))):
                raise SnaketuneError(
                    f"{file} is a link to {file.resolve()}; put a copy or a hard link in its place, or name the folder "
                    "that it leads to"
                )
            # Weights below the folder are loaded only if a config names them, which is refused.
            if file.is_file() and (folder == path or file.suffix != WEIGHTS):
                files.append(check_plain(path, str(file)))
    return tuple(sorted(files))


def check_model_files(path: str) -> None:
    """Raise SnaketuneError if a config or an index in a model's local folder names a file that doesn't count, in the folder or
    outside of it."""
    files = [Path(file).absolute() for file in model_files(path)]
    for file in files:
        if file.name.endswith(INDEX):
            check_index(path, file)
        if not ("config" in file.name and file.suffix == ".json"):
            continue
        for key, value in texts(_read(file)):
            named = Path(os.path.normpath(Path(path).absolute() / value))
            if named not in files and _is_file(named):
                raise SnaketuneError(
                    f"{file}: {key} names {value!r}, which can't be part of a model; expected a file in {path}, of weights "
                    f"*{WEIGHTS} directly in it. Move the file there, or remove the key if nothing needs it"
                )


def check_index(path: str, index: Path) -> None:
    """Raise SnaketuneError if the index of a model's weights names files other than safetensors in the model's own folder."""
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        foreign = [name for name in shards if not OWN_SHARD.fullmatch(name)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnaketuneError(f"the model {path!r}: {index.name} can't be read: {error!r}") from None
    if foreign:
        raise SnaketuneError(
            f"the model {path!r}: {index.name} names {foreign[0]!r}; expected *{WEIGHTS} in its folder"
        )


def texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts in a JSON value, each with its dotted key, without indices in lists.

    >>> [*texts({"a": [{"b": "c"}, 1], "d": "e"})]
    [('a.b', 'c'), ('d', 'e')]
    """
    for keys, inner in nested(value):
        if isinstance(inner, str):
            yield ".".join(key for key in keys if not key.isdecimal()), inner


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A text too long for a name.
        return False


def _read(file: Path) -> Any:
    # Where it can't be read, loading the model says so.
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
