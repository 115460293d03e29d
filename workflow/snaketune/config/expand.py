"""Resolution of `extends:` and `grid:` in the raw config, before validation.

    dpo:
      short: {from: demo, corpus: pairs, beta: 0.1, training: {...}}
      soft: {extends: short, beta: 0.05}
      sweep: {extends: short, grid: {beta: [0.05, 0.3], training.learning_rate: [1e-5, 3e-5]}}

`sweep` becomes the four runs `sweep-beta0.05-learning_rate1e-5` and so on. A variant's name contains its values, so adding a
value to the grid doesn't change the names, and with them the results, of the other variants.
"""

from copy import deepcopy
from itertools import product
from typing import Any

from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError

RUN_SECTIONS = ("sft", "dpo")
# Alternative keys: a run's own key replaces the inherited alternative.
ALTERNATIVES = {"base": "use_base", "use_base": "base"}
# Mappings that a run's own value replaces as a whole, instead of being merged with the inherited one.
NOT_MERGED = ("loss",)


def expand_runs(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, tuple[str, ...]]]]:
    """Resolve `extends` and `grid` in the run sections.

    Returns:
        The config without either key, and per section, the names of the runs that each configured name expands to.
    Raises:
        SnaketuneError: an unknown or circular `extends`, a grid that isn't a mapping to lists, or two variants with one name.
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
            if taken := next((variant for variant in made if variant in expanded), None):
                raise SnaketuneError(
                    f"{section}.{name}: expands to the name {taken!r}, which another run has; rename one of them"
                )
            variants[section][str(name)] = tuple(made)
            expanded |= made
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
    given = {*run, *(str(dotted).split(".")[0] for dotted in grid)} if isinstance(grid, dict) else {*run}
    inherited = {k: v for k, v in inherited.items() if k != "grid" and ALTERNATIVES.get(k) not in given}
    return _merge(inherited, {k: v for k, v in run.items() if k != "extends"})


def _merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in NOT_MERGED
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _vary(key: str, name: str, run: Any) -> dict[str, Any]:
    """The runs of a grid by name; the run itself if it has none."""
    if not isinstance(run, dict) or "grid" not in run:
        return {name: run}
    grid = run["grid"]
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise SnaketuneError(f"{key}.grid: {grid!r}; expected a mapping from keys to lists of values")
    made: dict[str, Any] = {}
    for values in product(*grid.values()):
        variant, called = deepcopy({k: v for k, v in run.items() if k != "grid"}), name
        for dotted, value in zip(grid, values):
            _set(key, variant, str(dotted), value)
            # A list or a section is named by its index in the grid.
            shown = grid[dotted].index(value) if isinstance(value, list | dict) else str(value).removeprefix("sft:")
            called += f"-{str(dotted).rsplit('.', 1)[-1]}{shown}"
        if called in made:
            raise SnaketuneError(
                f"{key}.grid: a value is listed twice, so two runs would be named {called!r}; remove one of them"
            )
        made[called] = variant
    return made


def _set(key: str, run: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, leaf = dotted.split(".")
    for section in sections:
        run = run.setdefault(section, {})
        if not isinstance(run, dict):
            raise SnaketuneError(f"{key}.grid.{dotted}: {section!r} is {run!r}, which has no keys; expected a section")
    run[leaf] = value
