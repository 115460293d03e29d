"""Checks that compute stored results anew, each text alone, with the model's own attention: reference and evaluation."""

from collections.abc import Sequence
from typing import Any

import torch

from snaketune.diagnostics.checks import sequences
from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.engine.packing.rows import PackedRows

REFERENCE, EVALUATION = "reference log-probs = anew", "evaluation = transformers"
OF_REFERENCE = "nats per token by which the stored log-probabilities of a completion differ"
OF_EVALUATION = "nats per token by which stored held-out losses and log-probabilities differ"
# In nats per token of a whole text, by the data type of the stored computation.
NATS = {"float32": 1e-3, "bfloat16": 5e-2}


@torch.no_grad()
def reference_equals_recomputed(
    model: torch.nn.Module,
    rows: PackedRows,
    numbers: list[int],
    ids: list[list[str]],
    stored: dict[str, Any],
    dtype: str,
    cast: Any,
) -> Check:
    """Compare stored log-probabilities of completions with those of the reference, each sequence alone.

    Args:
        model: the reference, with its own attention.
        numbers, ids: some rows, and the pairs of each.
        stored: `training.reference.logps_table.Reference` by pair.
        dtype: of the stored computation; cast: its autocast.
    """
    model.eval()
    worst, where, pairs = 0.0, "", 0
    for number, of_row in zip(numbers, ids, strict=True):
        completions = sequences.completions_of(rows[number])
        for at, pair in enumerate(of_row):
            pairs += 1
            for side, sequence in enumerate(completions[2 * at : 2 * at + 2]):
                tokens = len(sequence.targets)
                anew = -sequences.token_losses(model, sequence, cast).double().sum().item()
                difference = abs(anew - stored[pair].logps[side]) / max(tokens, 1)
                if stored[pair].tokens[side] != tokens:
                    difference = float("inf")
                # Negated, so that NaN counts.
                if not difference <= worst:
                    worst, where = difference, pair
    if not pairs:
        return not_checked(REFERENCE, OF_REFERENCE, "there is no pair")
    return judged(REFERENCE, f"{OF_REFERENCE}, {pairs} pairs", worst, NATS[dtype], reason=f"most in pair {where}")


@torch.no_grad()
def evaluation_equals_recomputed(
    model: torch.nn.Module,
    evaluated: Sequence[tuple[PackedRows, list[dict[str, Any]], list[dict[str, Any]]]],
    count: int,
    dtype: str,
    cast: Any,
) -> Check:
    """Compare an evaluation's losses of held-out texts, and log-probabilities of pairs, with a plain forward of each.

    Args:
        model: loaded by transformers alone.
        evaluated: the rows of each corpus; their documents, in order; and the stored rows of losses.arrow or pairs.arrow.
        count: of stored rows of each corpus that are computed anew.
        dtype: of the evaluation; cast: its autocast.
    """
    model.eval()
    worst, where, texts = 0.0, "", 0
    for rows, documents, stored in evaluated:
        first = _first_of_rows(documents)
        for number in sequences.random_rows(stored, count):
            entry = stored[number]
            index = entry.get("document", number)
            document = documents[index]
            row, at = rows[document["row"]], index - first[document["row"]]
            if "document" in entry:
                pairs = [(sequences.documents_of(row)[at], -entry["loss_nats"])]
            else:
                completions = sequences.completions_of(row)[2 * at : 2 * at + 2]
                pairs = [([one], entry[f"{side}_logp"]) for one, side in zip(completions, ("chosen", "rejected"))]
            for own, logp in pairs:
                losses = [sequences.token_losses(model, sequence, cast).double() for sequence in own]
                tokens, texts = sum(map(len, losses)), texts + 1
                difference = abs(-sum(loss.sum().item() for loss in losses) - logp) / max(tokens, 1)
                if not difference <= worst:
                    worst, where = difference, document["id"]
    if not texts:
        return not_checked(EVALUATION, OF_EVALUATION, "the evaluation has no held-out row")
    return judged(EVALUATION, f"{OF_EVALUATION}, {texts} texts", worst, NATS[dtype], reason=f"most in {where}")


def _first_of_rows(documents: list[dict[str, Any]]) -> dict[int, int]:
    """By row, the number of its first document."""
    first: dict[int, int] = {}
    for number, document in enumerate(documents):
        first.setdefault(document["row"], number)
    return first
