"""Entries that other entries of a config name: whether they exist, and of what kind they are."""

from snaketune.config.base import Reference
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown


def check_known(key: str, named: Reference, config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if what a key names isn't in the config."""
    section = "sft" if named.section == "base" else named.section
    if named.name not in getattr(config, section):
        if run_names := variants.get(section, {}).get(named.name, ()):
            why = f", which is a grid or rounds; name one of its runs: {', '.join(run_names[:4])}"
        else:
            why = unknown(named.name, getattr(config, section))
        raise SnaketuneError(f"{key}: there is no {named.name!r} under `{section}:`{why}")


def check_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    if config.corpora[name].kind not in kinds:
        raise SnaketuneError(f"{key}: {name!r} is of kind {config.corpora[name].kind}, expected {' or '.join(kinds)}")


def check_held_out_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    check_corpus(key, name, config, *kinds)
    if config.corpora[name].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{name}.held_out is 0, so it has no held-out rows; raise held_out, or name another corpus"
        )


def first_run(config: Workflow, sft: str) -> str:
    """The first SFT run of the chain of `use_base` that ends in this one; for a snapshot, that of its run."""
    previous = config.sft[sft].continues
    return first_run(config, previous) if previous else sft.partition("@")[0]


def sft_of(config: Workflow, kind: str, name: str) -> str:
    """The SFT run that a model is, starts from or, if it is merged, of which its first model is."""
    if kind == "reward":
        return config.reward[name].from_
    if kind == "merge":
        kind, name = next(iter(config.merge[name].models)).split(":")
    return config.sft_below(config.dpo[name]) if kind == "dpo" else name
