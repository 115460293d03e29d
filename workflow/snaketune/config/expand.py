"""`extends:` and `grid:`, worked out on the raw mapping before anything is validated.

    dpo:
      short: {from: demo, corpus: pairs, beta: 0.1, training: {...}}
      soft: {extends: short, beta: 0.05}
      sweep: {extends: short, grid: {beta: [0.05, 0.3], training.learning_rate: [1e-5, 3e-5]}}

`sweep` becomes the four runs `sweep-beta0.05-learning_rate1e-5` and so on. A variant's name tells its values, so
adding one to the grid leaves the others' names, and with them their results, alone.
"""

from copy import deepcopy
from itertools import product
from typing import Any

from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError

RUN_SECTIONS = ("sft", "dpo")
# Of two keys that stand for each other, an heir's own replaces the inherited one.
INSTEAD = {"base": {"use_base"}, "use_base": {"base"}}
# Mappings that mean something as a whole: an heir's own isn't added to the inherited one.
WHOLE = ("loss",)


def expand_runs(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, tuple[str, ...]]]]:
    """Resolve `extends` and `grid` in the run sections.

    Returns:
        The config without either key, and per section the names that every written name stands for.
    Raises:
        SnaketuneError: an unknown or circular `extends`, a grid that isn't lists of values, two variants of one name.
    """
    config = deepcopy(raw)
    variants: dict[str, dict[str, tuple[str, ...]]] = {section: {} for section in RUN_SECTIONS}
    for section in RUN_SECTIONS:
        runs = config.get(section)
        if not isinstance(runs, dict):
            continue
        expanded: dict[str, Any] = {}
        for name in runs:
            made = _vary(f"{section}.{name}", str(name), _inherit(section, name, runs))
            variants[section][str(name)] = tuple(made)
            for variant, run in made.items():
                if variant in expanded:
                    raise SnaketuneError(f"{section}.{name}: the name {variant!r} is made twice; rename one of the two")
                expanded[variant] = run
        config[section] = expanded
    return config, variants


def _inherit(section: str, name: str, runs: dict[str, Any], heirs: tuple[str, ...] = ()) -> Any:
    run = runs[name]
    if not isinstance(run, dict) or "extends" not in run:
        return run
    parent = run["extends"]
    if not isinstance(parent, str) or parent not in runs:
        raise SnaketuneError(
            f"{section}.{name}.extends: there is no {parent!r} under `{section}:`{unknown(parent, runs)}"
        )
    if parent in (*heirs, name):
        raise SnaketuneError(f"{section}.{name}.extends: {' → '.join((*heirs, name, parent))} runs in a circle")
    inherited = _inherit(section, parent, runs, (*heirs, name))
    if not isinstance(inherited, dict):
        raise SnaketuneError(f"{section}.{parent}: found {inherited!r}; expected the keys of a run")
    grid = run.get("grid")
    given = {*run, *(str(dotted).split(".")[0] for dotted in grid)} if isinstance(grid, dict) else {*run}
    inherited = {k: v for k, v in inherited.items() if k != "grid" and not given & INSTEAD.get(k, set())}
    return _merge(inherited, {k: v for k, v in run.items() if k != "extends"})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in WHOLE
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _vary(key: str, name: str, run: Any) -> dict[str, Any]:
    if not isinstance(run, dict) or "grid" not in run:
        return {name: run}
    grid = run["grid"]
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise SnaketuneError(f"{key}.grid: {grid!r}; expected a mapping from keys to lists of values")
    made = {}
    for values in product(*grid.values()):
        variant = {k: v for k, v in deepcopy(run).items() if k != "grid"}
        parts = [name]
        for dotted, value in zip(grid, values):
            _set(key, variant, str(dotted), value)
            # A list or a section is named by its place in the grid.
            shown = grid[dotted].index(value) if isinstance(value, list | dict) else str(value).removeprefix("sft:")
            parts.append(f"{str(dotted).rsplit('.', 1)[-1]}{shown}")
        if (called := "-".join(parts)) in made:
            raise SnaketuneError(
                f"{key}.grid: a value stands there twice, so that {called!r} is made twice; take one out"
            )
        made[called] = variant
    return made


def _set(key: str, run: dict[str, Any], dotted: str, value: Any) -> None:
    *folders, leaf = dotted.split(".")
    for folder in folders:
        run = run.setdefault(folder, {})
        if not isinstance(run, dict):
            raise SnaketuneError(f"{key}.grid.{dotted}: {folder!r} holds {run!r}, which has no keys")
    run[leaf] = value
