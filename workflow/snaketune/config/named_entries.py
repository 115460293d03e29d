"""Entries that other entries of a config name: whether they exist, and of what kind they are."""

from collections.abc import Iterable

from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown


def check_known(key: str, name: str, section: Iterable[str], section_name: str) -> None:
    if name not in section:
        raise SnaketuneError(f"{key}: there is no {name!r} under `{section_name}:`{unknown(name, section)}")


def check_known_model(key: str, model: str, config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a model's run isn't in the config."""
    kind, name = model.split(":")
    section = "sft" if kind == "base" else kind
    if name not in getattr(config, section):
        raise SnaketuneError(f"{key}: {no_such_run(section, name, config, variants)}")


def no_such_run(section: str, name: str, config: Workflow, variants: Variants) -> str:
    run_names = variants.get(section, {}).get(name, ())
    if run_names:
        why = f", which is a grid or rounds; name one of its runs: {', '.join(run_names[:4])}"
    else:
        why = unknown(name, getattr(config, section))
    return f"there is no {name!r} under `{section}:`{why}"


def check_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    check_known(key, name, config.corpora, "corpora")
    if config.corpora[name].kind not in kinds:
        raise SnaketuneError(f"{key}: {name!r} is of kind {config.corpora[name].kind}, expected {' or '.join(kinds)}")


def check_held_out_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    check_corpus(key, name, config, *kinds)
    if config.corpora[name].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{name}.held_out is 0, so it has no held-out rows; raise held_out, or name another corpus"
        )


def sft_of(config: Workflow, kind: str, name: str) -> str:
    """The SFT run that a model is, starts from or, if it is merged, of which its first model is."""
    if kind == "reward":
        return config.reward[name].from_
    if kind == "merge":
        kind, name = next(iter(config.merge[name].models)).split(":")
    return config.sft_below(config.dpo[name]) if kind == "dpo" else name
