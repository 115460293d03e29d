"""Scores on held-out rows: loss and perplexity; how often, and by how much, a model prefers the chosen completion."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.batches import Batch
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import all_pair_logprobs, losses_by_batch
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import PackedRows
from snaketune.evaluation.pair_scores import accuracy, by_source, margins, mean
from snaketune.evaluation.score_intervals import per_token_interval
from snaketune.packing.reader import documents
from snaketune.training.reference.logps_table import Reference, is_comparable, read_ref_logps

# `losses.arrow`. document: index in the packed rows, the same for all models that are evaluated on them; loss_nats: summed
# negative log-probabilities of its supervised tokens; tokens: their number. Documents without supervised tokens are excluded.
LOSSES = pa.schema(
    [("corpus", pa.string()), ("document", pa.int32()), ("loss_nats", pa.float64()), ("tokens", pa.int32())]
)


def choose_forward(
    model: PreTrainedModel,
    config: PretrainedConfig | None,
    packs: list[PackedRows],
    compute: Compute,
) -> tuple[Compute, dict[str, Any], dict[str, Any]]:
    """Device, data type and kernel for held-out rows, entries for the manifest, and entries for run.json."""
    if not any(len(rows) for rows in packs):
        return compute, compute.about(), {}
    longest, prefixes = max(rows.longest[0] for rows in packs), any(rows.has_prefixes for rows in packs)
    compute = choose_kernel(compute, config, longest, prefixes=prefixes, dropout=False)
    tested = self_test(model, packs, compute, training=False)
    return tested.compute, tested.about(), {"self_test_share": tested.share}


def document_of(batch: Batch) -> tuple[torch.Tensor, int]:
    """The document of each supervised token of a batch, int64[N], and the number of documents."""
    layout = batch["segments"].layout
    # The turns of a conversation may be several segments, which form a tree.
    tree_D = torch.from_numpy(layout.trees[layout.documents])
    return tree_D[batch["target_documents"].cpu()], int(layout.trees.max(initial=-1)) + 1


def by_document(losses_N: torch.Tensor, document_N: torch.Tensor, documents: int) -> tuple[list[float], list[int]]:
    """The summed losses and the tokens of a batch's documents; `document_N`: the document of each loss, int64[N]."""
    document_N = document_N.cpu()
    sums_D = torch.zeros(documents, dtype=torch.float64).index_add_(0, document_N, losses_N.double().cpu())
    return sums_D.tolist(), torch.bincount(document_N, minlength=documents).tolist()


def loss_table(corpus: str, sums: list[float], tokens: list[int]) -> pa.Table:
    rows = [(corpus, number, *both) for number, both in enumerate(zip(sums, tokens, strict=True)) if both[1]]
    return pa.Table.from_pylist([dict(zip(LOSSES.names, row)) for row in rows], schema=LOSSES)


def held_out_loss(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str
) -> tuple[dict[str, Any], pa.Table]:
    """The mean negative log-probability of the supervised tokens in nats with its 95% interval, and perplexity; and the
    losses of single documents (LOSSES)."""
    all_sums: list[float] = []
    all_tokens: list[int] = []
    for batch, losses_N in losses_by_batch(model, rows, compute, f"loss, {name}"):
        sums, tokens = by_document(losses_N, *document_of(batch))
        all_sums += sums
        all_tokens += tokens
    table = loss_table(name, all_sums, all_tokens)
    sums, tokens = table["loss_nats"].to_pylist(), table["tokens"].to_pylist()
    if not tokens:
        return {"held_out_loss": None, "perplexity": None, "supervised_tokens": 0}, table
    mean = math.fsum(sums) / sum(tokens)
    losses = {
        "held_out_loss": round(mean, 5),
        "held_out_loss_interval": per_token_interval(sums, tokens),
        "perplexity": round(math.exp(min(mean, 50.0)), 4),
        "supervised_tokens": sum(tokens),
    }
    return losses, table


# `pairs.arrow`. source: index of the pair's source in the corpus, from 0. logp: summed log-probabilities in nats, over so many
# tokens. The reference's are null where there is none, or none that can be compared.
_LOGPS, _COUNTS = pa.float64(), pa.int32()
PAIRS = pa.schema(
    {
        "corpus": pa.string(),
        "id": pa.string(),
        "source": pa.int16(),
        "chosen_logp": _LOGPS,
        "rejected_logp": _LOGPS,
        "chosen_tokens": _COUNTS,
        "rejected_tokens": _COUNTS,
        "reference_chosen_logp": _LOGPS,
        "reference_rejected_logp": _LOGPS,
    }
)


def comparable_references(ref_logps: list[Artifact], compute: Compute) -> dict[str, Reference]:
    """Held-out reference log-probabilities by pair id, where they were computed as `compute` does."""
    references: dict[str, Reference] = {}
    for artifact in ref_logps:
        if is_comparable(artifact, compute):
            references |= read_ref_logps(artifact, "held_out")
    return references


def held_out_preferences(
    model: torch.nn.Module,
    rows: PackedRows,
    pack: Artifact,
    compute: Compute,
    name: str,
    references: dict[str, Reference],
) -> tuple[dict[str, Any], pa.Table]:
    """Scores of the held-out rows of one pack, and a table of its pairs (PAIRS, in the order of the rows)."""
    sums_P2, counts_P2 = (both.numpy() for both in all_pair_logprobs(model, rows, compute, f"preferences, {name}"))
    held_out = list(documents(pack, "held_out"))
    ids, sources = ([document[what] for document in held_out] for what in ("id", "source"))
    pairs = pair_table(name, ids, sources, sums_P2, counts_P2, reference_logps(ids, counts_P2, references))
    scores = preference_scores(pairs) | by_source(sources, lambda own_P: preference_scores(pairs.filter(own_P)))
    return scores, pairs


def pair_table(
    corpus: str,
    ids: list[str],
    sources: list[int],
    sums_P2: np.ndarray,
    counts_P2: np.ndarray,
    reference_P2: np.ndarray,
) -> pa.Table:
    sides = [side_P.tolist() for of_pairs in (sums_P2, counts_P2, reference_P2) for side_P in of_pairs.T]
    columns = [[corpus] * len(ids), ids, sources, *sides]
    # NaN, of a pair without a reference, becomes null.
    arrays = [pa.array(column, field.type, from_pandas=True) for column, field in zip(columns, PAIRS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=PAIRS)


def reference_logps(ids: list[str], counts_P2: np.ndarray, references: dict[str, Reference]) -> np.ndarray:
    """Reference log-probabilities, float64[P, 2], NaN where there are none over exactly the evaluated tokens; print
    how many there are over others: training may truncate a pair elsewhere than the evaluation, and log-probabilities of
    different tokens give no reward."""
    logps, mismatched = [], 0
    for pair, counts in zip(ids, counts_P2.tolist(), strict=True):
        reference = references.get(pair)
        same = reference is not None and list(reference.tokens) == counts
        logps.append(reference.logps if same else (math.nan, math.nan))
        mismatched += reference is not None and not same
    if mismatched:
        print(f"{mismatched} pairs were truncated differently for the reference; they get no reward", flush=True)
    return np.array(logps, np.float64).reshape(-1, 2)


def preference_scores(pairs: pa.Table) -> dict[str, Any]:
    """Accuracies and margins of held-out pairs (PAIRS).

    `logp_accuracy`: share of pairs whose chosen completion has the higher log-probability; `reward_accuracy` and
    `reward_margin_nats`: the same for the log-ratio to the reference (DPO's implicit reward, not scaled by beta);
    log-probabilities and rewards of both completions, means over the pairs. A tie counts half in an accuracy. The names are
    listed in `config/score_names.py`; each has a 95% interval (`NAME_interval`).
    """
    referenced = pairs.filter(pairs["reference_chosen_logp"].is_valid())
    margin_of, reward_margin_K = margins(pairs), margins(referenced)["reward_accuracy"]
    logps, rewarded, references = (
        {side: table[f"{whose}{side}_logp"].to_numpy() for side in ("chosen", "rejected")}
        for table, whose in ((pairs, ""), (referenced, ""), (referenced, "reference_"))
    )
    return {
        "pairs": len(pairs),
        **mean("logp_margin_nats", margin_of["logp_accuracy"]),
        **mean("chosen_logp_nats", logps["chosen"]),
        **mean("rejected_logp_nats", logps["rejected"]),
        **accuracy("logp_accuracy", margin_of["logp_accuracy"]),
        **accuracy("logp_accuracy_per_token", margin_of["logp_accuracy_per_token"]),
        "pairs_with_reference": len(referenced),
        **mean("reward_margin_nats", reward_margin_K),
        **mean("chosen_reward_nats", rewarded["chosen"] - references["chosen"]),
        **mean("rejected_reward_nats", rewarded["rejected"] - references["rejected"]),
        **accuracy("reward_accuracy", reward_margin_K),
    }
