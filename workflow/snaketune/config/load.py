"""Validate a parsed config and convert it to a `Workflow`, with error messages that say what to change."""

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from snaketune.config.expand import expand_runs
from snaketune.config.paths import check_plain
from snaketune.config.publish_targets import check_publish_targets
from snaketune.config.score_names import check_sort_by
from snaketune.config.secrets import find_secret
from snaketune.config.suggestions import unknown
from snaketune.config.training_runs import Pretrained
from snaketune.config.workflow import Workflow, check_references
from snaketune.errors import SnaketuneError

# pydantic puts the names of union members into the location of an error, between the keys.
MEMBER_OF_UNION = re.compile(r"Pretrained|Scratch|(literal|tuple|constrained)\b.*|bool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load(raw: dict[str, Any]) -> tuple[Workflow, dict[str, dict[str, tuple[str, ...]]]]:
    """Validate a config.

    Returns:
        The config with grids expanded, and per section, the names of the runs that each configured name expands to.
    Raises:
        SnaketuneError: the config is invalid; one line per error with key, value found and what was expected.
    """
    # First, as messages of other checks would quote the secret. `tracking` has stricter rules of its own.
    if key := find_secret({name: value for name, value in raw.items() if name != "tracking"}):
        raise SnaketuneError(
            f"the config is wrong:\n  {key}: contains what looks like a key, a token or a password, which doesn't belong in a "
            "config; put it into the environment (HF_TOKEN, WANDB_API_KEY, ...)"
        )
    expanded, variants = expand_runs(raw)
    try:
        config = Workflow.model_validate(expanded)
    except ValidationError as error:
        lines = sorted({_line(issue) for issue in error.errors() if not _is_echo(issue)})
        raise SnaketuneError("the config is wrong:\n" + "\n".join(f"  {line}" for line in lines)) from None
    _check_files(config)
    check_references(config, variants)
    check_sort_by(config, variants)
    check_publish_targets(config, variants)
    return config, variants


def _is_echo(issue: Any) -> bool:
    """Whether an error repeats another one of the same value."""
    # Of a union of a value and a list of values, only the matching member's error is meaningful.
    member = str(issue["loc"][-1])
    if (
        isinstance(issue["input"], list)
        if member.startswith(("constrained", "literal"))
        else issue["type"] == "tuple_type"
    ):
        return "constrained" in member or member.startswith("tuple[constrained")
    # A list is also reported as too short if its items are invalid.
    return issue["type"] == "too_short" and len(issue["input"]) >= issue["ctx"]["min_length"]


def _line(issue: Any) -> str:
    location = [str(part) for part in issue["loc"] if not MEMBER_OF_UNION.fullmatch(str(part))]
    key = ".".join(location) or "(top level)"
    match issue["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{unknown(location[-1], _keys_beside(issue['loc']))}"
        case "missing":
            return f"{key}: is missing"
        case "value_error":
            return f"{key}: {issue['ctx']['error']}"
        case _:
            return f"{key}: found {repr(issue['input'])[:120]}; {issue['msg'][:1].lower()}{issue['msg'][1:]}"


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """The keys that are allowed at the level of the last part of `location`."""
    model: Any = Workflow
    for part in location[:-1]:
        if isinstance(model, type) and issubclass(model, BaseModel):
            fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
            model = fields.get(part, model)
        models = _models_in(model)
        named = [kind for kind in models if kind.__name__ == part]
        if len(models) == 1 or named:
            model = (named or models)[0]
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return sorted({name for kind in _models_in(model) for name in kind.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _check_files(config: Workflow) -> None:
    """Check now that every local file that the config names exists, so that no job fails for it hours later."""
    for name, corpus in config.corpora.items():
        for number, source in enumerate(corpus.sources):
            for file in source.files:
                _exists(f"corpora.{name}.sources.{number}.files", file, Path.is_file, "a file")
            if source.hub:
                _check_dataset(f"corpora.{name}.sources.{number}.hub.path", source.hub.path)
    for name, run in config.sft.items():
        if isinstance(run.base, Pretrained):
            _check_model(f"sft.{name}.base.path", run.base.path)
    for name, run in config.dpo.items():
        if run.reference:
            _check_model(f"dpo.{name}.reference.path", run.reference.path)
    for name, tokenizer in config.tokenizers.items():
        if tokenizer.adopt and (_is_local(tokenizer.adopt) or Path(tokenizer.adopt).exists()):
            _exists(f"tokenizers.{name}.adopt", tokenizer.adopt, Path.is_dir, "a folder")
        elif tokenizer.adopt:
            _check_hub_id(f"tokenizers.{name}.adopt", tokenizer.adopt, "a folder, or a model")
        if tokenizer.chat_template:
            _exists(f"tokenizers.{name}.chat_template", tokenizer.chat_template, Path.is_file, "a file")
    for name, evaluation in config.eval.items():
        if evaluation.tasks and evaluation.tasks.folder is not None:
            _exists(
                f"eval.{name}.tasks.folder", evaluation.tasks.folder, _has_tasks, "a folder with task files (*.yaml)"
            )


def _check_model(key: str, path: str) -> None:
    if path and (_is_local(path) or Path(path).exists()):
        _exists(key, path, Path.is_dir, "a folder")
        _exists(key, path, _has_model, "a folder with a model (config.json and *.safetensors)")
    else:
        _check_hub_id(key, path, "a folder, or a model")


def _check_hub_id(key: str, path: str, expected: str) -> None:
    if not HUB_ID.fullmatch(path):
        raise SnaketuneError(f"{key}: found {path!r}; expected {expected} of the Hub as `owner/name`")


def _check_dataset(key: str, path: str) -> None:
    _check_hub_id(key, path, "a dataset")
    if Path(path).exists():
        raise SnaketuneError(
            f"{key}: {path!r} also exists locally (in {Path.cwd()}), and `datasets` would read that instead of the Hub's "
            "dataset, without noticing changes; name its files under `files`, or move it away"
        )


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _has_tasks(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.yaml"))


def _is_local(path: str) -> bool:
    """Whether a model's path can't be a Hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _exists(key: str, path: str, test: Any, expected: str) -> None:
    check_plain(key, path)
    if path.startswith("-"):
        raise SnaketuneError(f"{key}: programs would take {path!r} for an option; write ./{path}")
    try:
        matches = test(Path(path))
    except OSError as error:
        raise SnaketuneError(f"{key}: {path[:80]!r}: {error.strerror}") from None
    if not matches:
        raise SnaketuneError(f"{key}: {path!r} is not {expected} (looked in {Path.cwd()})")
