"""Validate a parsed config and convert it to a `Workflow`, with error messages that say what to change."""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from snaketune.config.base import check_plain, is_local_path
from snaketune.config.base_models import Pretrained
from snaketune.config.held_out import snapshot_name
from snaketune.config.invalid_values import lines_of
from snaketune.config.model_files import check_model_files
from snaketune.config.nested import merge_keys, put_key
from snaketune.config.overrides import apply_overrides
from snaketune.config.references import check_publish_targets, check_references
from snaketune.config.rounds import expand_rounds
from snaketune.config.score_names import check_sort_by
from snaketune.config.secrets import find_secret
from snaketune.config.training_runs import snapshots_of
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.locations import facts_of, is_local
from snaketune.suggestions import unknown

# What a value of a grid can be called in the names of runs; see `base.NAME_PATTERN`.
IN_A_NAME = re.compile(r"[A-Za-z0-9_.-]+")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
RUN_SECTIONS = ("sft", "dpo", "reward")
# Alternative keys: a run's own key replaces the inherited alternative.
ALTERNATIVES = {"base": "use_base", "use_base": "base"}
# Of a grid, each variant may have the same errors.
ERRORS_SHOWN = 30


def load(raw: dict[str, Any]) -> tuple[Workflow, Variants]:
    """Validate a config.

    Returns:
        The config with grids and rounds expanded, and per section, the names of the runs that each configured name expands to.
    Raises:
        SnaketuneError: the config is invalid; one line per error with key, value found and what was expected.
    """
    config, variants = written_out(raw)
    expanded = {name: _with_snapshots(name, getattr(config, name), variants[name]) for name in RUN_SECTIONS}
    config = config.model_copy(update=expanded)
    _check_files(config)
    check_references(config, variants)
    check_sort_by(config, variants)
    check_publish_targets(config)
    return config, variants


def written_out(raw: dict[str, Any]) -> tuple[Workflow, Variants]:
    """The config with an entry for each run of a grid and each step of a round, before references are checked; returned and
    raised is the same as by `load`."""
    # These two before checks that would quote a secret.
    raw = apply_overrides(raw)
    # `tracking` has stricter rules of its own.
    key = find_secret({name: value for name, value in raw.items() if name != "tracking"})
    if key is not None:
        raise SnaketuneError(
            f"the config is wrong:\n  {key}: contains what looks like a key, a token or a password, which doesn't belong in a "
            "config; put it into the environment (HF_TOKEN, WANDB_API_KEY, ...)"
        )
    expanded, variants = _expand_runs(raw)
    try:
        config = Workflow.model_validate(expanded)
    except ValidationError as error:
        lines = lines_of(error)
        more = [f"… and {len(lines) - ERRORS_SHOWN:,} more"] * (len(lines) > ERRORS_SHOWN)
        shown = "\n".join(f"  {line}" for line in (*lines[:ERRORS_SHOWN], *more))
        raise SnaketuneError(f"the config is wrong:\n{shown}") from None
    return expand_rounds(config, variants)


def _expand_runs(raw: dict[str, Any]) -> tuple[dict[str, Any], Variants]:
    """Resolve `extends` and `grid` in the run sections of a raw config.

        dpo:
          short: {from: demo, corpus: pairs, beta: 0.1, training: {...}}
          soft: {extends: short, beta: 0.05}
          sweep: {extends: short, grid: {beta: [0.05, 0.3], training.learning_rate: [1e-5, 3e-5]}}

    `sweep` becomes the four runs `sweep-beta0.05-learning_rate1e-5` and so on. A variant's name contains its values, so adding
    a value to the grid doesn't change the names, and with them the results, of the other variants.

    Returns:
        The config without either key, and per section, the names of the runs that each configured name expands to.
    """
    config = deepcopy(raw)
    variants: Variants = {section: {} for section in RUN_SECTIONS}
    for section in RUN_SECTIONS:
        runs = config.get(section)
        if not isinstance(runs, dict):
            continue
        expanded: dict[str, Any] = {}
        for name in runs:
            grid_runs = _vary(f"{section}.{name}", str(name), _inherit(section, name, runs))
            if duplicate := next((variant for variant in grid_runs if variant in expanded), None):
                raise SnaketuneError(
                    f"{section}.{name}: expands to the name {duplicate!r}, which another run has; rename one of them"
                )
            variants[section][str(name)] = tuple(grid_runs)
            expanded |= grid_runs
        config[section] = expanded
    return config, variants


def _inherit(section: str, name: str, runs: dict[str, Any], children: tuple[str, ...] = ()) -> Any:
    run, key = runs[name], f"{section}.{name}.extends"
    if not isinstance(run, dict) or "extends" not in run:
        return run
    parent, children = run["extends"], (*children, name)
    if not isinstance(parent, str) or parent not in runs:
        raise SnaketuneError(f"{key}: there is no {parent!r} under `{section}:`{unknown(parent, runs)}")
    if parent in children:
        raise SnaketuneError(f"{key}: {' → '.join((*children, parent))} is circular; remove one of these `extends`")
    inherited = _inherit(section, parent, runs, children)
    if not isinstance(inherited, dict):
        raise SnaketuneError(f"{section}.{parent}: found {inherited!r}; expected the keys of a run")
    grid = run.get("grid")
    keys = {*run, *(str(dotted).split(".")[0] for dotted in grid)} if isinstance(grid, dict) else {*run}
    inherited = {k: v for k, v in inherited.items() if k not in ("grid", "race") and ALTERNATIVES.get(k) not in keys}
    return merge_keys(inherited, {k: v for k, v in run.items() if k != "extends"})


def _vary(key: str, name: str, run: Any) -> dict[str, Any]:
    """The runs of a grid by name; the run itself if it has none."""
    if not isinstance(run, dict) or "grid" not in run:
        return {name: run}
    grid = run["grid"]
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise SnaketuneError(f"{key}.grid: {grid!r}; expected a mapping from keys to lists of values")
    runs: dict[str, Any] = {}
    for values in product(*grid.values()):
        variant, called = deepcopy({k: v for k, v in run.items() if k != "grid"}), name
        for dotted, value in zip(grid, values):
            put_key(f"{key}.grid", variant, str(dotted), value)
            shown = str(value).removeprefix("sft:")
            # A list, a section, or a text that can't be in a name, is named by its index in the grid.
            if isinstance(value, (list, dict)) or not IN_A_NAME.fullmatch(shown):
                shown = str(grid[dotted].index(value))
            called += f"-{str(dotted).rsplit('.', 1)[-1]}{shown}"
        if called in runs:
            raise SnaketuneError(
                f"{key}.grid: a value is listed twice, so two runs would be named {called!r}; remove one of them"
            )
        runs[called] = variant
    return runs


def _with_snapshots(section: str, runs: dict[str, Any], variants: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Runs with their snapshots, which are runs that end earlier.

    They precede their runs, which resume from them; those of a grid are sorted by share, since a race compares them.
    """
    expanded: dict[str, Any] = {}
    for names in variants.values():
        ends = [(share, snapshot_name(name, share), runs[name]) for name in names for share in snapshots_of(runs[name])]
        for share, name, run in sorted(ends, key=lambda end: end[0]):
            if name in runs:
                raise SnaketuneError(f"{section}.{name}: a snapshot of another run has this name; rename one of them")
            training = run.training.model_copy(update={"snapshots": (), "until": share})
            expanded[name] = run.model_copy(update={"training": training, "race": None})
        expanded |= {name: runs[name] for name in names}
    return expanded


def _check_files(config: Workflow) -> None:
    """Check now that every local file that the config names exists, so that no job fails for it hours later."""
    for name, corpus in config.corpora.items():
        for number, source in enumerate(corpus.sources):
            key = f"corpora.{name}.sources.{number}"
            _check_remote(f"{key}.files", source.files)
            for file in filter(is_local, source.files):
                _check_local(f"{key}.files", file, Path.is_file, "a file")
            if source.hub:
                _check_dataset(f"{key}.hub.path", source.hub.path)
    for name, run in config.sft.items():
        if isinstance(run.base, Pretrained):
            _check_model(f"sft.{name}.base.path", run.base.path)
    for name, run in config.dpo.items():
        if isinstance(run.reference, Pretrained):
            _check_model(f"dpo.{name}.reference.path", run.reference.path)
    for name, tokenizer in config.tokenizers.items():
        if tokenizer.adopt:
            _check_model(f"tokenizers.{name}.adopt", tokenizer.adopt, weights=False)
        if tokenizer.chat_template:
            _check_local(f"tokenizers.{name}.chat_template", tokenizer.chat_template, Path.is_file, "a file")
    for name, score in config.score.items():
        if score.by.python:
            _check_local(f"score.{name}.by.python", score.by.python, Path.is_file, "a Python file")
    for name, evaluation in config.eval.items():
        if evaluation.tasks and (folder := evaluation.tasks.folder) is not None:
            _check_local(f"eval.{name}.tasks.folder", folder, _has_tasks, "a folder with task files (*.yaml)")


def _check_remote(key: str, files: Iterable[str]) -> None:
    try:
        facts_of(files)
    except SnaketuneError as error:
        raise SnaketuneError(f"{key}: {error}") from None


def _check_model(key: str, path: str, weights: bool = True) -> None:
    if not path or not (is_local_path(path) or Path(path).exists()):
        if HUB_ID.fullmatch(path) and "/" not in path:
            # The few ids without an owner are other names of ids with one: gpt2 is openai-community/gpt2.
            folders = get_close_matches(path, (entry.name for entry in Path().iterdir() if entry.is_dir()), n=1)
            meant = f"; did you mean the folder {folders[0]!r}?" if folders else ""
            raise SnaketuneError(
                f"{key}: {path!r} is neither a folder (in {Path.cwd()}) nor a model of the Hub, `owner/name`{meant}"
            )
        _check_hub_id(key, path, "a folder, or a model")
        owner, name = Path(path).parent, Path(path).name
        beside = [entry.name for entry in owner.iterdir() if entry.is_dir()] if owner.is_dir() else []
        if folders := get_close_matches(name, beside, n=1):
            # The Hub would be asked for minutes, and have no such model.
            meant = f"did you mean {str(owner / folders[0])!r}? For a model of the Hub, rename the folder {owner}"
            raise SnaketuneError(f"{key}: there is no folder {path!r} (in {Path.cwd()}); {meant}")
        return
    _check_local(key, path, Path.is_dir, "a folder")
    if weights:
        _check_local(key, path, _has_model, "a folder with a model (config.json and *.safetensors)")
    check_model_files(path)


def _check_dataset(key: str, path: str) -> None:
    _check_hub_id(key, path, "a dataset")
    if Path(path).exists():
        raise SnaketuneError(
            f"{key}: {path!r} also exists locally (in {Path.cwd()}), and `datasets` would read that instead of the Hub's "
            "dataset, without noticing changes; name its files under `files`, or move it away"
        )


def _check_hub_id(key: str, path: str, expected: str) -> None:
    if not HUB_ID.fullmatch(path):
        raise SnaketuneError(f"{key}: found {path!r}; expected {expected} of the Hub as `owner/name`")


def _check_local(key: str, path: str, is_expected: Callable[[Path], bool], expected: str) -> None:
    check_plain(key, path)
    if path.startswith("-"):
        raise SnaketuneError(f"{key}: programs would take {path!r} for an option; write ./{path}")
    try:
        fits = is_expected(Path(path))
    except OSError as error:
        raise SnaketuneError(f"{key}: {path[:80]!r}: {error.strerror}") from None
    if not fits:
        raise SnaketuneError(f"{key}: {path!r} is not {expected} (looked in {Path.cwd()})")


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _has_tasks(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.yaml"))
