"""How many of the tokens that an epoch computes had to be computed."""

import os
from typing import Any

from benchmarks.dpo.material import Material
from benchmarks.dpo.pairs import fewest_tokens, pairs_of


def bound(material: Material, name: str) -> dict[str, Any]:
    """Of the whole data set: the nodes of a trie for each prompt, to all tokens that an epoch's batches run through the layers.

    Free tokens at the ends of rows are computed too, and so are line breaks after the end of a turn; the tries know neither.
    """
    os.chdir(material.folder)
    run = f"{name}-whole"
    needed, computed = fewest_tokens(pairs_of(material, run)), computed_tokens(material, run)
    return {
        f"share_of_bound_{name}": needed / computed,
        "pairs": len(pairs_of(material, run)),
        "tokens_needed": needed,
        "tokens_computed": computed,
    }


def computed_tokens(material: Material, run: str) -> int:
    """As the trainer's own batches have them."""
    from pathlib import Path

    from benchmarks.dpo.material import pack_of

    from snaketune.packing.reader import EqualTokens
    from snaketune.stages.jobs import result_at
    from snaketune.training.dpo import DpoTrainer
    from snaketune.training.pairs import PairRows

    pack = pack_of(material.graph, run)
    items = EqualTokens(PairRows(result_at(Path(pack.manifest)), None))
    batches = (DpoTrainer.collate(items[item], "sdpa") for item in range(len(items)))
    return sum(batch["input_ids"].numel() for batch in batches)
