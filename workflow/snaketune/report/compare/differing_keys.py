"""The spec keys and inputs in which runs differ."""

from collections.abc import Iterator
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.data.results import ResultSet
from snaketune.report.text import NOTHING, clean

# Keys to list first: most sweeps vary them.
FIRST = ("loss", "beta")
# Keys that only decide whether a run is stopped early.
MONITORED = ("stop_if",)
# Keys whose value is compared as a whole, though it is a mapping.
ATOMIC = ("loss", *MONITORED)
# Role of an input that may differ between runs, and the name of its column.
MADE_FROM = {"model": "from", "pack": "pairs"}


def differing(results: ResultSet, runs: list[Result]) -> dict[str, dict[str, str]]:
    """The keys that differ between runs: key → run label → value as text. A key has its last name only, if that is unique."""
    columns = {}
    for role, name in MADE_FROM.items():
        made = {run.label: ", ".join(one.name for one in results.made_from(run, role)) or NOTHING for run in runs}
        if len(set(made.values())) > 1:
            columns[name] = made
    differ = dict(leaves({run.label: run.spec for run in runs}))
    ends = [dotted.rpartition(".")[2] for dotted in differ]
    for dotted in sorted(differ, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST)):
        end = dotted.rpartition(".")[2]
        columns[end if ends.count(end) == 1 and end not in columns else dotted] = differ[dotted]
    return columns


def run_name(label: str, keys: dict[str, dict[str, str]]) -> str:
    """A name for a run from its values of the differing keys: numbers with their key, and no values that most runs have.

    >>> keys = {"loss": {"dpo:a": "ipo", "dpo:b": "ipo"}, "beta": {"dpo:a": "0.1", "dpo:b": "0.2"}}
    >>> run_name("dpo:a", keys | {"seed": {"dpo:a": "0", "dpo:b": "1", "dpo:c": "0"}}), run_name("dpo:a", {})
    ('ipo, beta 0.1', 'a')
    """
    parts = []
    for key, values in keys.items():
        text, all_ = values[label], list(values.values())
        usual = key not in FIRST and 2 * all_.count(text) > len(all_)
        if text != NOTHING and key not in MONITORED and not usual:
            parts.append(f"{key} {text}" if _is_number(text) and key not in ATOMIC else text)
    return ", ".join(parts) or label.partition(":")[2]


def loss_text(loss: Any) -> str:
    """A loss, or a weighted sum of losses with the largest weight first.

    >>> loss_text("sigmoid"), loss_text({"sft": 0.2, "sigmoid": 1.0})
    ('sigmoid', 'sigmoid + 0.2 sft')
    """
    if not isinstance(loss, dict):
        return value_text(loss)
    parts = sorted(loss.items(), key=lambda part: (-part[1], part[0]))
    return " + ".join(clean(name) if weight == 1 else f"{weight:g} {clean(name)}" for name, weight in parts)


def value_text(value: Any) -> str:
    """A config value on one line.

    >>> value_text(5e-05), value_text(True), value_text({"rank": 4, "dropout": 0.0, "alpha": None}), value_text(None)
    ('5e-05', 'true', 'rank 4, dropout 0', '–')
    """
    match value:
        case None:
            return NOTHING
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case dict():
            texts = (f"{clean(name)} {value_text(one)}" for name, one in value.items() if one is not None)
            return ", ".join(texts) or NOTHING
        case list() | tuple():
            return ", ".join(map(value_text, value)) or NOTHING
    return clean(value)


def leaves(specs: dict[str, Any], key: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """The leaf keys that differ: dotted path, and the value as text by run label. Descends where every run has a mapping."""
    if key not in ATOMIC and all(isinstance(spec, dict) for spec in specs.values()):
        for name in dict.fromkeys(name for spec in specs.values() for name in spec):
            inside = {label: spec.get(name) for label, spec in specs.items()}
            yield from leaves(inside, f"{key}.{name}" if key else str(name))
        return
    shown = {label: loss_text(value) if key == "loss" else value_text(value) for label, value in specs.items()}
    if len(set(shown.values())) > 1:
        yield key, shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("true", "false")
    return True
