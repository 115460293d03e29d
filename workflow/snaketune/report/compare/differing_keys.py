"""What differs between runs: the keys of their specs, and what they were made from, as far as these aren't the same for all."""

from collections.abc import Iterator
from typing import Any

from snaketune.report.data.results import Findings, Result
from snaketune.report.text import NOTHING, clean

# What most sweeps are about.
FIRST = ("loss", "beta")
# What a run was watched for, which changes nothing unless it was ended.
WATCHED = ("stop_if",)
# Values that are no tree of keys of their own.
WHOLE = ("loss", *WATCHED)
# What a run is made from, and others may be made from too: role, and the column's name.
MADE_FROM = {"model": "from", "pack": "pairs"}


def differing(findings: Findings, runs: list[Result]) -> dict[str, dict[str, str]]:
    """By key, called by its last name where that is one key's alone: by label of the run, the value as text."""
    found = {}
    for role, name in MADE_FROM.items():
        made = {run.label: ", ".join(one.name for one in findings.made_from(run, role)) or NOTHING for run in runs}
        if len(set(made.values())) > 1:
            found[name] = made
    differ = dict(leaves({run.label: run.spec for run in runs}))
    keys = {key: differ[key] for key in (*FIRST, *differ) if key in differ}
    ends = [dotted.rpartition(".")[2] for dotted in keys]
    for dotted, values in keys.items():
        end = dotted.rpartition(".")[2]
        found[end if ends.count(end) == 1 and end not in found else dotted] = values
    return found


def called(label: str, keys: dict[str, dict[str, str]]) -> str:
    """A run by what differs; numbers need their key before them, words don't. What most runs have goes without saying.

    >>> keys = {"loss": {"dpo:a": "ipo", "dpo:b": "ipo"}, "beta": {"dpo:a": "0.1", "dpo:b": "0.2"}}
    >>> called("dpo:a", keys | {"seed": {"dpo:a": "0", "dpo:b": "1", "dpo:c": "0"}}), called("dpo:a", {})
    ('ipo, beta 0.1', 'a')
    """
    parts = []
    for key, values in keys.items():
        text, all_ = values[label], list(values.values())
        usual = key not in FIRST and 2 * all_.count(text) > len(all_)
        if text != NOTHING and key not in WATCHED and not usual:
            parts.append(f"{key} {text}" if _is_number(text) and key not in WHOLE else text)
    return ", ".join(parts) or label.partition(":")[2]


def loss_text(loss: Any) -> str:
    """A loss, or what several are weighted with, the heaviest first.

    >>> loss_text("sigmoid"), loss_text({"sft": 0.2, "sigmoid": 1.0})
    ('sigmoid', 'sigmoid + 0.2 sft')
    """
    if not isinstance(loss, dict):
        return value_text(loss)
    parts = sorted(loss.items(), key=lambda part: (-part[1], part[0]))
    return " + ".join(clean(name) if weight == 1 else f"{weight:g} {clean(name)}" for name, weight in parts)


def value_text(value: Any) -> str:
    """A value of the config on one line.

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
            said = {name: value_text(one) for name, one in value.items() if one is not None}
            return ", ".join(f"{clean(name)} {text}" for name, text in said.items()) or NOTHING
        case list() | tuple():
            return ", ".join(value_text(one) for one in value) or NOTHING
    return clean(value)


def leaves(specs: dict[str, Any], key: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """What differs, as deep as all runs have keys: dotted path, and by label the value as text."""
    if key not in WHOLE and all(isinstance(spec, dict) for spec in specs.values()):
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
