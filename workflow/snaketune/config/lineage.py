"""What the entries of a config are made from: corpora may hold responses of models, which are trained on corpora.

wave 0    corpora.chat ── sft.start
wave 1    sample.tries (of sft.start) ── score.checked ── corpora.own ── dpo.own
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from snaketune.config.base import Model, Reference
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError

# By section of an entry that is made from itself, what to do. Entries of other sections are only by way of these.
REMEDIES = {
    "corpora": "train on another corpus, or sample other prompts",
    "sample": "name scores of earlier samples under `prompts.scored`",
    "teacher": "name another `model`",
    "score": "leave it out of a `sum`",
    "dpo": "start one of them `from` an SFT run",
    "sft": "set `base` in one of them, in place of `use_base`",
}
SECTIONS = (*REMEDIES, "tokenizers", "reward", "merge")


def references(key: str, value: Any) -> Iterator[tuple[str, Reference]]:
    """Yield the references in a value of the config, with their keys. Args: key: of the value."""
    match value:
        case Reference():
            yield key, value
        case Model():
            for name, field in type(value).model_fields.items():
                yield from references(f"{key}.{field.alias or name}", getattr(value, name))
        case dict():
            for name, entry in value.items():
                yield from references(key, name)
                yield from references(f"{key}.{name}", entry)
        case tuple():
            for number, entry in enumerate(value):
                yield from references(f"{key}.{number}" if isinstance(entry, Model) else key, entry)


def made_from(config: Workflow) -> dict[str, list[str]]:
    """By entry, as `section.name`, the entries that it is directly made from. `base.name` are the initial weights of an SFT
    run."""
    entries = {f"{section}.{name}": entry for section in SECTIONS for name, entry in getattr(config, section).items()}
    entries |= {f"base.{name}": (run.tokenizer, run.use_base) for name, run in config.sft.items()}
    return {
        name: [f"{named.section}.{named.name}" for _, named in references(name, entry)]
        for name, entry in entries.items()
    }


def check_cycles(config: Workflow) -> None:
    """Raise SnaketuneError if an entry is made from itself."""
    try:
        TopologicalSorter(made_from(config)).prepare()
    except CycleError as error:
        _, *cycle = reversed(error.args[1])
        entries = {section: [entry for entry in cycle if entry.startswith(f"{section}.")] for section in REMEDIES}
        section = next(section for section, found in entries.items() if found)
        start = cycle.index(min(entries[section]))
        path = " → ".join([*cycle[start:], *cycle[: start + 1]])
        raise SnaketuneError(f"{cycle[start]}: is made from itself: {path}; {REMEDIES[section]}") from None


def waves(config: Workflow) -> dict[str, int]:
    """By entry, how often models are sampled, one after the other, before it is made; teachers don't count."""
    graph = made_from(config)
    known: dict[str, int] = {}
    for entry in TopologicalSorter(graph).static_order():
        above = (known[before] for before in graph[entry] if not before.startswith("teacher."))
        known[entry] = max(above, default=0) + entry.startswith("sample.")
    return known
