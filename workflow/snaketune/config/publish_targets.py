"""Checks of the models that `push:` and `gguf:` name."""

from snaketune.config.publishing import Gguf
from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError


def check_publish_targets(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Raise SnaketuneError if a model doesn't exist, is a grid, or has only an adapter although a GGUF file needs weights; or
    if two models are pushed to the same branch.

    Args:
        variants: as `config.load` returns them.
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
                f"{key}.model: {entry.model} is an adapter alone (lora.merge: false), and a GGUF file needs full weights; set "
                "lora.merge: true, or convert the adapter with llama.cpp's convert_lora_to_gguf.py"
            )
    targets: dict[tuple[str, str], str] = {}
    for name, push in config.push.items():
        first = targets.setdefault((push.repository.lower(), push.branch), name)
        if first != name:
            raise SnaketuneError(
                f"push.{name}.repository: push.{first} already pushes to branch {push.branch!r} of {push.repository}; choose "
                "another repository or branch"
            )


def _is_adapter(kind: str, name: str, config: Workflow) -> bool:
    lora = config.sft[name].lora if kind == "sft" else config.dpo[name].lora
    if lora == "continued":
        lora = config.sft[config.dpo[name].from_].lora
    return lora is not None and not lora.merge
