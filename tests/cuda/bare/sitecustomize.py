"""On PYTHONPATH, a Python without packages of this project's environment, as a machine has it that brings its own torch."""

import importlib.metadata
from importlib.machinery import PathFinder

MISSING = {
    "bitsandbytes", "datafog", "datasets", "flash_attn", "ftfy", "lm_eval", "py3langid", "pydantic", "pydantic_core",
    "rensa", "snakemake", "tenacity", "tensorboard", "trl", "wandb",
}  # fmt: skip

find_spec, distribution = PathFinder.find_spec, importlib.metadata.Distribution.from_name


def find_spec_of_others(name, path=None, target=None):
    """None for what is missing."""
    return None if name.partition(".")[0] in MISSING else find_spec(name, path, target)


def distribution_of_others(name):
    """As for what isn't installed."""
    if name.replace("-", "_").lower() in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)


PathFinder.find_spec = staticmethod(find_spec_of_others)
importlib.metadata.Distribution.from_name = staticmethod(distribution_of_others)
