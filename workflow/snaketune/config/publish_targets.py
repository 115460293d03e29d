"""What `push:` and `gguf:` may name."""

from snaketune.config.publishing import Gguf
from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError


def check_publish_targets(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Raise SnaketuneError if a model isn't there, is many, or is an adapter alone where weights are needed; or if two models
    are pushed to one place.

    Args:
        variants: as `config.load` gives them.
    """
    sections = {"push": config.push, "gguf": config.gguf}
    for key, entry in ((f"{section}.{name}", one) for section, some in sections.items() for name, one in some.items()):
        kind, name = entry.model.split(":")
        runs = config.sft if kind == "sft" else config.dpo
        if name not in runs:
            made = variants[kind].get(name, ())
            why = f", which is a grid; name one of its runs: {', '.join(made[:4])}" if made else ""
            raise SnaketuneError(f"{key}.model: there is no {name!r} under `{kind}:`{why or unknown(name, runs)}")
        if isinstance(entry, Gguf) and _is_adapter(kind, name, config):
            raise SnaketuneError(
                f"{key}.model: {entry.model} is an adapter alone (lora.merge: false), and a GGUF file holds whole weights; set "
                "lora.merge: true, or give the adapter to llama.cpp's convert_lora_to_gguf.py"
            )
    places: dict[tuple[str, str], str] = {}
    for name, push in config.push.items():
        first = places.setdefault((push.repository.lower(), push.branch), name)
        if first != name:
            raise SnaketuneError(
                f"push.{name}.repository: branch {push.branch!r} of {push.repository} has the model of push.{first}; name "
                "another repository, or another branch"
            )


def _is_adapter(kind: str, name: str, config: Workflow) -> bool:
    lora = config.sft[name].lora if kind == "sft" else config.dpo[name].lora
    if lora == "continued":
        lora = config.sft[config.dpo[name].from_].lora
    return lora is not None and not lora.merge
