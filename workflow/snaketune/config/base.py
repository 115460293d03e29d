"""Base class and common types of the config models: immutable, typed, unknown keys refused.

Paths are normalized, so that `./data/x` and `data//x` are one file to every job, and have no special characters.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from snaketune.data_folders import SUCCESS, data_files
from snaketune.errors import SnaketuneError
from snaketune.locations import check_url, is_remote, is_several, listed

# Without braces and control characters, which Snakemake's wildcards and shells would interpret.
PLAIN_PATH = re.compile(r"[^{}\x00-\x1f]+")
# Names become folder names and Snakemake wildcards, so they are restricted to characters that are safe in paths and shells.
# A snapshot of a run is called after it and the share of its steps: demo@0.5.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:@0\.[0-9]+)?"
# Of jobs: the name of a reference pass begins with that of its model, which may be a snapshot.
JOB_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.@-]*"
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$", max_length=80)]
# What can be evaluated; the name of a grid stands for all its runs.
EvaluatedModel = Annotated[str, Field(pattern=f"^(base|sft|dpo|merge|reward):{NAME_PATTERN}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# A commit, tag or branch on the Hub, by git's rules for names. It becomes part of paths in the Hub's cache.
Revision = Annotated[str, Field(pattern=r"^\w[\w.+@-]*(/\w[\w.+@-]*)*$", max_length=200)]
# A single line without control characters.
ShortText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Reference(str):
    """The name of another entry of the config, or a model as `KIND:NAME`, where `base` stands for the initial weights of an SFT
    run.

    Attributes:
        section, name: of the entry; of a model, its kind and the name.
    """

    section: str
    name: str

    @classmethod
    def to(cls, section: str, value: str) -> "Reference":
        """Args: section: of a name without a kind."""
        reference = cls(value)
        kind, _, reference.name = value.rpartition(":")
        reference.section = kind or section
        return reference


def names(section: str) -> AfterValidator:
    """Mark a value as the name of an entry of a section, or as a model."""
    return AfterValidator(lambda value: Reference.to(section, value))


CorpusName = Annotated[Name, names("corpora")]
TokenizerName = Annotated[Name, names("tokenizers")]
SftName = Annotated[Name, names("sft")]
TeacherName = Annotated[Name, names("teacher")]
SampleName = Annotated[Name, names("sample")]
ScoreName = Annotated[Name, names("score")]
ModelReference = Annotated[str, Field(pattern=f"^(base|sft|dpo|merge):{NAME_PATTERN}$"), names("")]
TrainedModel = Annotated[str, Field(pattern=f"^(sft|dpo):{NAME_PATTERN}$"), names("")]
RewardReference = Annotated[str, Field(pattern=f"^reward:{NAME_PATTERN}$"), names("")]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def _with_one_group(pattern: str) -> str:
    if (groups := re.compile(pattern).groups) != 1:
        raise ValueError(f"expected exactly one group in parentheses, found {groups}")
    return pattern


Regex = Annotated[str, AfterValidator(_compiles)]
RegexWithOneGroup = Annotated[Regex, AfterValidator(_with_one_group)]


class Model(BaseModel):
    """A config section: immutable, with unknown keys refused. Docstrings of its attributes become descriptions in the schema
    (docs/write_config.py)."""

    # A validator is built when it is first used, since a job uses few of the models that it imports.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and true as booleans, which pydantic would convert to 1.
        if not isinstance(value, bool):
            return value
        annotation = cls.model_fields[str(info.field_name)].annotation
        allowed = (
            annotation,
            *get_args(annotation),
            *(member for kind in get_args(annotation) for member in get_args(kind)),
        )
        # `in` would find the number 1 for true.
        if not any(kind is bool or kind is value for kind in allowed):
            raise ValueError(f"found {str(value).lower()}, which isn't a valid value for this key")
        return value


def check_plain(key: str, path: str) -> str:
    """The path; SnaketuneError if it contains braces, which Snakemake would expand, or control characters. Args: key:
    the config key or folder that it comes from, for the message."""
    if not PLAIN_PATH.fullmatch(path):
        raise SnaketuneError(
            f"{key}: {path!r} contains braces or control characters, which Snakemake can't handle; rename it"
        )
    return path


def is_local_path(path: str) -> bool:
    """Whether a path can't be a Hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def normalized_path(path: str) -> str:
    """Normalize a path: relative if it is inside the working directory, without `./`, `//` and a trailing `/`.

    A path that doesn't exist stays as it is: it may be a Hub id, or be shown in an error message.

    >>> normalized_path("Qwen/Qwen2.5-0.5B"), normalized_path("./"), normalized_path(".//")
    ('Qwen/Qwen2.5-0.5B', '.', '.')
    """
    try:
        short = os.path.normpath(path)
        # With a symbolic link, `a/link/../b` isn't `a/b`.
        if not path or not Path(path).samefile(short):
            return path
    except (OSError, ValueError):
        return path
    short = short.removeprefix(f"{Path.cwd()}{os.sep}")
    # Programs take a name that begins with a dash for an option.
    return f"./{short}" if short.startswith("-") else short


def files_at(path: str) -> list[str]:
    """The files of a folder, or those that a pattern matches, in the order of their names; a path of neither kind unchanged.

    Hidden files and those that begin with `_`, as finished jobs of other programs leave them, aren't data. ValueError: no file,
    or the program that writes a folder hasn't finished.
    """
    if is_remote(path):
        try:
            return listed(path) if is_several(path) else [path]
        except SnaketuneError as error:
            # For the message to name the key.
            raise ValueError(str(error)) from None
    place = Path(path)
    try:
        is_pattern = not place.exists() and any(character in path for character in "*?[")
        if not (place.is_dir() or is_pattern):
            return [path]
    except (OSError, ValueError):
        # A name that no file can have is reported where the file is read.
        return [path]
    if is_pattern:
        anchor = Path(place.anchor)
        found = anchor.glob(str(place.relative_to(anchor)))
        files = [str(file) for file in found if file.is_file() and not file.name.startswith((".", "_"))]
    else:
        names = (file.relative_to(place).as_posix() for file in place.rglob("*"))
        data = data_files(path, names, lambda name: (place / name).read_bytes(), _is_part_of_finished(place))
        files = [str(place / name) for name in data if (place / name).is_file()]
    if not files:
        raise ValueError(
            f"{path!r} {'matches' if is_pattern else 'has'} no file; paths are relative to the working directory"
        )
    return sorted(files)


def _is_part_of_finished(folder: Path) -> bool:
    """Whether a folder is a partition (`language=de`) of a table that Spark has finished."""
    return "=" in folder.name and ((folder.parent / SUCCESS).exists() or _is_part_of_finished(folder.parent))


LocalPath = Annotated[str, AfterValidator(normalized_path)]
# A local path or a URL.
DataPath = Annotated[str, AfterValidator(lambda path: check_url(path) if is_remote(path) else normalized_path(path))]
