"""The `pack` stage: a corpus and a tokenizer to shards, for both splits.

Tokenizes in batches (most of the time), plans over lengths, writes rows. Rows are kept in memory until they are written:
about 5 bytes per token.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.tables import read_table, write_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.specs import PackSpec
from snaketune.errors import SnaketuneError
from snaketune.packing.plan import PackingPlan, lower_bound_rows, plan_best_fit_decreasing
from snaketune.packing.shards import (
    FORMAT_VERSION,
    RAW_FORMAT_VERSION,
    ROWS_PER_SHARD,
    SPLITS,
    Sequence,
    write_rows,
)
from snaketune.progress import progress
from snaketune.tokenization.chat import ChatTokenizer

CONVERSATIONS_PER_BATCH = 1024


def build(spec: PackSpec, work: WorkFolder, *, corpus: Artifact, tokenizer: Artifact) -> Outcome:
    """Fill `work.payload` with `<split>-<number>.arrow` and `documents.arrow`.

    Raises:
        SnaketuneError: a conversation with nothing to learn; one longer than a row where `overflow` is `raise`; nothing
            left to train on in a corpus that has rows.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    if spec.strategy == "none":
        return _write_raw(spec, work, corpus, chat)
    counts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    places: list[pa.Table] = []
    for split in SPLITS:
        table = read_table(corpus.file(f"{split}.arrow"))
        kept, dropped = _fitting(spec, _sequences(spec, chat, table, f"packing {split}"))
        lengths = np.array([len(sequence.ids) for sequence in kept], dtype=np.int64)
        plan = plan_best_fit_decreasing(lengths, spec.length)
        _write_shards(work, split, kept, plan, spec.length, chat.pad_id)
        places.append(_places(split, kept, plan))
        supervised = int(sum(sequence.supervised.sum() for sequence in kept))
        counts[split] = {
            "read": table.num_rows,
            "kept": len(kept),
            "dropped": dict(dropped["rows"]),
            "tokens": int(lengths.sum()),
            "supervised_tokens": supervised,
            "dropped_tokens": dict(dropped["tokens"]),
        }
        metadata[split] = packing_metadata(lengths, plan.rows, spec, dropped)
        if table.num_rows and not kept:
            raise SnaketuneError(
                f"{corpus.manifest_path}: no {split} row of {table.num_rows} fits into {spec.length} tokens; "
                "raise packing.length"
            )
    write_table(work.payload / "documents.arrow", pa.concat_tables(places))
    return Outcome(
        counts=counts,
        about={
            "format_version": FORMAT_VERSION,
            "kind": spec.kind,
            "row_length": spec.length,
            "packing_metadata": metadata["train"],
            "packing_metadata_held_out": metadata["held_out"],
            "padding_id": chat.pad_id,
        },
        libraries=("tokenizers", "transformers", "jinja2", "pyarrow"),
    )


def packing_metadata(lengths: np.ndarray, rows: int, spec: PackSpec, dropped: dict[str, Counter]) -> dict[str, Any]:
    """How well it went.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` the rows that
    one conversation each would have taken, per row.
    """
    tokens = int(lengths.sum())
    return {
        "enabled": True,
        "strategy": spec.strategy,
        "rows": rows,
        "lower_bound_rows": lower_bound_rows(lengths, spec.length),
        "packing_efficiency": round(100 * tokens / (rows * spec.length), 3) if rows else 100.0,
        "avg_conversations_per_sequence": round(len(lengths) / rows, 3) if rows else 0.0,
        "compression_ratio": round(len(lengths) / rows, 3) if rows else 1.0,
        "dropped": {"rows": dropped["rows"].total(), "tokens": dropped["tokens"].total()},
        "truncated": {"rows": 0, "tokens": 0},
        "split": {"rows": 0, "tokens": 0},
    }


def _sequences(spec: PackSpec, chat: ChatTokenizer, table: pa.Table, what: str) -> Iterator[Sequence]:
    make = _conversation_sequences if spec.kind == "sft" else _pair_sequences
    batches = table.to_batches(CONVERSATIONS_PER_BATCH)
    for batch in progress(batches, what, f"batches of {CONVERSATIONS_PER_BATCH}", len(batches)):
        for sequence in make(chat, batch.to_pylist()):
            if not sequence.supervised.any():
                raise SnaketuneError(
                    f"conversation {sequence.id} has nothing to learn: no token of it is supervised. Check the chat "
                    "template's {% generation %} markers; if they are right, remove the row"
                )
            yield sequence


def _conversation_sequences(chat: ChatTokenizer, rows: list[dict[str, Any]]) -> Iterator[Sequence]:
    for row, encoded in zip(rows, chat.encode_conversations([row["messages"] for row in rows]), strict=True):
        supervised = encoded.supervised.copy()
        # The first token has nothing before it to be predicted from.
        supervised[:1] = False
        yield Sequence(
            id=row["id"],
            ids=encoded.ids,
            supervised=supervised,
            segment_lengths=(len(encoded.ids),),
            prefix_lengths=(0,),
        )


def _pair_sequences(chat: ChatTokenizer, rows: list[dict[str, Any]]) -> Iterator[Sequence]:
    pairs = chat.encode_pairs([(row["prompt"], row["chosen"], row["rejected"]) for row in rows])
    for row, pair in zip(rows, pairs, strict=True):
        if not (pair.chosen_supervised.any() and pair.rejected_supervised.any()):
            raise SnaketuneError(f"pair {row['id']} has nothing to learn: a completion without a supervised token")
        prompt = len(pair.prompt_ids)
        yield Sequence(
            id=row["id"],
            ids=np.concatenate([pair.prompt_ids, pair.chosen_ids, pair.rejected_ids]),
            supervised=np.concatenate([np.zeros(prompt, bool), pair.chosen_supervised, pair.rejected_supervised]),
            segment_lengths=(prompt + len(pair.chosen_ids), len(pair.rejected_ids)),
            prefix_lengths=(0, prompt),
        )


def _fitting(spec: PackSpec, sequences: Iterator[Sequence]) -> tuple[list[Sequence], dict[str, Counter]]:
    """Those that fit into a row, and the rows and tokens of those that don't."""
    kept = []
    dropped = {"rows": Counter(), "tokens": Counter()}
    for sequence in sequences:
        if len(sequence.ids) <= spec.length:
            kept.append(sequence)
        elif spec.overflow == "raise":
            raise _too_long(sequence.id, len(sequence.ids), spec.length)
        else:
            dropped["rows"]["longer_than_row"] += 1
            dropped["tokens"]["longer_than_row"] += len(sequence.ids)
    return kept, dropped


def _write_shards(
    work: WorkFolder, split: str, kept: list[Sequence], plan: PackingPlan, length: int, pad_id: int
) -> None:
    for shard in range(math.ceil(plan.rows / ROWS_PER_SHARD)):
        numbers = range(shard * ROWS_PER_SHARD, min((shard + 1) * ROWS_PER_SHARD, plan.rows))
        rows = [[kept[i] for i in plan.row(r)] for r in numbers]
        write_rows(work.payload / f"{split}-{shard:05d}.arrow", rows, length, pad_id)


def _places(split: str, kept: list[Sequence], plan: PackingPlan) -> pa.Table:
    ordered = [kept[i] for i in plan.order]
    return pa.table(
        {
            "split": pa.array([split] * len(ordered), pa.string()),
            "row": pa.array(np.repeat(np.arange(plan.rows, dtype=np.int32), np.diff(plan.starts)), pa.int32()),
            "id": pa.array([sequence.id for sequence in ordered], pa.string()),
            "tokens": pa.array([len(sequence.ids) for sequence in ordered], pa.int32()),
            "supervised": pa.array([int(sequence.supervised.sum()) for sequence in ordered], pa.int32()),
        }
    )


def _write_raw(spec: PackSpec, work: WorkFolder, corpus: Artifact, chat: ChatTokenizer) -> Outcome:
    """Format v2.0: the corpus' rows as they are, for TRL's trainer to tokenize.

    TRL would cut a long row silently, and take text that looks like a control token for one. Such rows are dropped here, and
    counted.
    """
    counts = {}
    for split in SPLITS:
        table = read_table(corpus.file(f"{split}.arrow"))
        kept, dropped = [], Counter()
        for number, row in enumerate(table.to_pylist()):
            if any(chat.control.written_in(message["content"]) for message in row["messages"]):
                dropped["control_token_in_text"] += 1
                continue
            tokens = len(chat.encode_conversations([row["messages"]])[0].ids)
            if tokens > spec.length and spec.overflow == "raise":
                raise _too_long(row["id"], tokens, spec.length)
            if tokens > spec.length:
                dropped["longer_than_row"] += 1
            else:
                kept.append(number)
        if kept:
            write_table(work.payload / f"{split}-00000.arrow", table.take(kept))
        counts[split] = {"read": table.num_rows, "kept": len(kept), "dropped": dict(dropped)}
    return Outcome(
        counts=counts,
        about={
            "format_version": RAW_FORMAT_VERSION,
            "kind": spec.kind,
            "row_length": spec.length,
            "packing_metadata": {"enabled": False, "strategy": spec.strategy},
        },
        libraries=("pyarrow", "tokenizers", "transformers"),
    )


def _too_long(name: str, tokens: int, length: int) -> SnaketuneError:
    return SnaketuneError(
        f"conversation {name} has {tokens} tokens, packing.length is {length}; "
        "raise the length, or set packing.overflow to drop"
    )
