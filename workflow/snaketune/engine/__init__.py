"""Packed training of language models, usable from Python alone: conversations and preference pairs packed into rows, attention
over their segments, trainers, checkpoints. Nothing here knows Snakemake, the config or the results on disk.

    from snaketune.engine import PackedDPOTrainer, PackedSFTTrainer, pack_conversations, pack_pairs

docs/python.md describes these. `packing/` needs numpy and Arrow alone; `model/` and the trainers need torch.
"""

from typing import Any

__all__ = ["Options", "PackedDPOTrainer", "PackedSFTTrainer", "pack_conversations", "pack_pairs"]

MODULES = {
    "Options": "features",
    "PackedDPOTrainer": "api",
    "PackedSFTTrainer": "api",
    "pack_conversations": "packing.in_memory",
    "pack_pairs": "packing.in_memory",
}


def __getattr__(name: str) -> Any:
    # Imported when used: stages that pack rows import no torch.
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
