"""Packed pairs, or single completions packed like pairs, with their reference log-probabilities, sources and labels."""

from functools import partial
from typing import Any, Literal

import numpy as np

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.engine.packing.rows import PackedRows
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import open_rows, sources_of
from snaketune.training.reference.logps_table import Reference, read_ref_logps


def pair_rows(
    pack: Artifact,
    ref_logps: Artifact | None,
    load_in_memory: Literal["auto"] | bool = "auto",
    ld_alpha: float | None = None,
    split: str = "train",
) -> PackedRows:
    """The rows of a split with the columns of pairs (`engine.packing.rows.DocumentColumns`).

    Args:
        ref_logps: None for a loss without a reference and for timed trials, which get zeros.
        ld_alpha: weight of the tokens beyond the length of the pair's other completion; None for no weighting.
    Raises:
        SnaketuneError: a packed pair has no reference log-probabilities, or none per token although `ld_alpha` is set.
    """
    known = read_ref_logps(ref_logps, split) if ref_logps else {}
    columns = partial(_columns, ref_logps, known, ld_alpha, pack.manifest.get("kind") == "unpaired")
    return open_rows(pack, split, load_in_memory, columns)


def _columns(
    ref_logps: Artifact | None,
    known: dict[str, Reference],
    ld_alpha: float | None,
    unpaired: bool,
    pairs: list[dict[str, Any]],
) -> dict[str, np.ndarray]:
    logps = [_logps(ref_logps, known.get(pair["id"]), pair["id"], ld_alpha) for pair in pairs] if ref_logps else []
    reference = np.array(logps, np.float32).reshape(-1, 2) if ref_logps else np.zeros((len(pairs), 2), np.float32)
    columns = {"reference": reference} | sources_of(pairs)
    return columns | ({"desirable": np.array([pair["label"] for pair in pairs], bool)} if unpaired else {})


def _logps(artifact: Artifact, reference: Reference | None, pair: str, ld_alpha: float | None) -> tuple[float, float]:
    per_token = reference is not None and reference.token_logps is None and ld_alpha is not None
    if reference is None or per_token:
        lacks = "per token, which dpo.ld_alpha needs" if per_token else f"for pair {pair}"
        raise SnaketuneError(
            f"{artifact.manifest_path} has no log-probabilities {lacks}; rebuild it with: "
            f"{rebuild_command(artifact.manifest_path)}"
        )
    return weighted_logps(reference, ld_alpha)


def weighted_logps(reference: Reference, ld_alpha: float | None) -> tuple[float, float]:
    """Reference log-probabilities of the chosen and the rejected completion, with the same `ld_alpha` weights as the policy's.

    >>> known = Reference(logps=(-6.0, -1.0), tokens=(3, 1),
    ...                   token_logps=(np.array([-1.0, -2.0, -3.0]), np.array([-1.0])))
    >>> weighted_logps(known, None), weighted_logps(known, 0.5)
    ((-6.0, -1.0), (-3.5, -1.0))
    """
    if ld_alpha is None:
        return reference.logps
    shared = min(reference.tokens)
    chosen, rejected = (
        float(logps[:shared].sum(dtype=np.float64) + ld_alpha * logps[shared:].sum(dtype=np.float64))
        for logps in reference.token_logps
    )
    return chosen, rejected
