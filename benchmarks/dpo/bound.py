"""The share of an epoch's computed tokens that any method must compute."""

from contextlib import chdir
from pathlib import Path
from typing import Any

from benchmarks.dpo.material import Material, pack_of
from benchmarks.dpo.pairs import fewest_tokens, pairs_of

from snaketune.stages.job import result_at


def bound(material: Material, name: str) -> dict[str, Any]:
    """Return trie nodes over all prompts of the data set divided by the tokens that an epoch runs through the layers.

    What rows hold besides (a line break after the end of a turn, and free tokens where a kernel runs them) the tries lack.
    """
    run = f"{name}-whole"
    with chdir(material.folder):
        pairs = pairs_of(material, run)
        needed, computed = fewest_tokens(pairs), computed_tokens(material, run)
    return {
        f"share_of_bound_{name}": needed / computed,
        "pairs": len(pairs),
        "tokens_needed": needed,
        "tokens_computed": computed,
    }


def computed_tokens(material: Material, run: str) -> int:
    """Return the tokens of batches as they are collated for a CPU."""
    from snaketune.models.batches import collate
    from snaketune.packing.reader import EqualTokens, PackedRows

    items = EqualTokens(PackedRows(result_at(Path(pack_of(material.graph, run).manifest)), "train"))
    return sum(collate(items[item], "sdpa")["input_ids"].numel() for item in range(len(items)))
