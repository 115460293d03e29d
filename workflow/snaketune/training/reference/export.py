"""`export-ref-logps`: pairs with their reference log-probabilities, as TRL's DPOTrainer has them.

    id, prompt, chosen, rejected, tools     as the corpus has them
    prompt_ids, chosen_ids, rejected_ids    the tokens that the log-probabilities are of, named as TRL names them
    ref_chosen_logps, ref_rejected_logps    summed, in nats

A subclass of DPOTrainer whose `_prepare_dataset` and `_precompute_ref_logps` return the data set that they are given takes the
file as it is, with `precompute_ref_log_probs=True` and the SFT model as its start.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import PackedRows, documents
from snaketune.packing.segments import layout_of
from snaketune.packing.shards import IGNORED
from snaketune.tables import read_table
from snaketune.training.reference.logps_table import COMPLETIONS, read_ref_logps

TEXTS = ("prompt", *COMPLETIONS)
ROWS_PER_BATCH = 1024


def export_ref_logps(ref_logps: Artifact, pack: Artifact, corpus: Artifact, split: str, out: Path) -> int:
    """Write the pairs of a split to a .parquet or .jsonl file; says how many TRL can't have, and why.

    Returns:
        How many were written.
    Raises:
        SnaketuneError: the three don't belong together, or a file of another kind is asked for.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise SnaketuneError(f"--out: found {out}; expected a file that ends in .parquet or .jsonl")
    if (kind := pack.manifest.get("kind")) != "preference":
        raise SnaketuneError(
            f"{pack.manifest_path} is of kind {kind}; TRL takes reference log-probabilities of preferences"
        )
    if pack.manifest.get("pairs") is None or ref_logps.manifest["inputs"].get("pack") != [pack.manifest["pairs"]]:
        raise SnaketuneError(f"{ref_logps.manifest_path} isn't of the pairs in {pack.manifest_path}")
    known = read_ref_logps(ref_logps, split)
    tokens = dict(_tokens(pack, split))
    written, seen = 0, set()
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _Writer(partial, out.suffix) as write:
        for batch in read_table(corpus.file(f"{split}.arrow")).to_batches(ROWS_PER_BATCH):
            rows = []
            for row in batch.to_pylist():
                if row["id"] in seen or row["id"] not in tokens:
                    continue
                seen.add(row["id"])
                if (ids := tokens[row["id"]]) is None:
                    continue
                logps = {f"ref_{side}_logps": getattr(known[row["id"]], f"{side}_logp") for side in COMPLETIONS}
                tools = {"tools": row["tools"]} if "tools" in row else {}
                rows.append({"id": row["id"]} | {name: _text(row[name]) for name in TEXTS} | tools | ids | logps)
            if rows:
                write(rows)
                written += len(rows)
    if missing := tokens.keys() - seen:
        partial.unlink(missing_ok=True)
        raise SnaketuneError(
            f"{corpus.manifest_path} lacks {len(missing)} of {len(tokens)} pairs in {pack.manifest_path}, for instance "
            f"{sorted(missing)[0]}; name the corpus that they were packed from"
        )
    if not written:
        raise SnaketuneError(f"{pack.manifest_path} has no {split} pairs that TRL could take")
    partial.replace(out)
    if left := sum(ids is None for ids in tokens.values()):
        print(
            f"{left} of {len(tokens)} pairs are left out: TRL takes loss on every token of a completion, and these have others"
        )
    return written


def _text(turns: Any) -> Any:
    """Turns with nothing in them but what TRL reads."""
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns] if isinstance(turns, list) else turns


def _tokens(pack: Artifact, split: str) -> Iterator[tuple[str, dict[str, list[int]] | None]]:
    """By id, prompt and completions; None of a pair that can't be told so."""
    rows, ids = PackedRows(pack, split), {}
    for document in documents(pack, split):
        ids.setdefault(document["row"], []).append(document["id"])
    for number in range(len(rows)):
        row = rows[number]
        placed = layout_of([row])
        found = [_completion(row, placed, segment) for segment in placed.completions]
        for pair, chosen, rejected in zip(ids.get(number, ()), found[::2], found[1::2]):
            same = chosen and rejected and chosen[0] == rejected[0]
            yield (
                pair,
                {"prompt_ids": chosen[0], "chosen_ids": chosen[1], "rejected_ids": rejected[1]} if same else None,
            )


def _completion(row: dict[str, Any], placed: Any, segment: int) -> tuple[list[int], list[int]] | None:
    """Prompt and completion: the supervised tokens, where they stand together. What follows them has no loss."""
    where = placed.sequence_tokens(segment, np.arange(placed.sequence_lengths[segment]))
    learned = np.flatnonzero(row["labels"][where] != IGNORED)
    if not len(learned) or learned[-1] - learned[0] + 1 != len(learned):
        return None
    ids = row["input_ids"][where]
    return ids[: learned[0]].tolist(), ids[learned].tolist()


class _Writer:
    """Takes lists of rows."""

    def __init__(self, path: Path, suffix: str):
        self.path, self.suffix, self.file = path, suffix, None

    def __enter__(self):
        return self._parquet if self.suffix == ".parquet" else self._lines

    def _parquet(self, rows: list[dict[str, Any]]) -> None:
        table = pa.Table.from_pylist(rows, schema=self.file.schema if self.file else None)
        self.file = self.file or pq.ParquetWriter(self.path, table.schema)
        self.file.write_table(table)

    def _lines(self, rows: list[dict[str, Any]]) -> None:
        self.file = self.file or self.path.open("w", encoding="utf-8")
        self.file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def __exit__(self, *_: object) -> None:
        if self.file:
            self.file.close()
