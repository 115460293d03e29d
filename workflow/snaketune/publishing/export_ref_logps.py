"""`export-ref-logps`: export pairs with their reference log-probabilities in the columns of TRL's DPOTrainer.

    id, prompt, chosen, rejected, tools     as in the corpus, with template_variables if it has any
    prompt_ids, chosen_ids, rejected_ids    the tokens that the log-probabilities belong to, named as in TRL
    ref_chosen_logps, ref_rejected_logps    summed over the completion's tokens, in nats

To train on the file with TRL, subclass DPOTrainer so that `_prepare_dataset` and `_precompute_ref_logps` return their dataset
unchanged, and pass the SFT model with `precompute_ref_log_probs=True`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.engine.packing.segments import layout_of
from snaketune.engine.packing.shards import IGNORED
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import documents, open_rows
from snaketune.training.reference.logps_table import COMPLETIONS, read_ref_logps

TEXTS = ("prompt", *COMPLETIONS)
ROWS_PER_BATCH = 1024


def export_ref_logps(ref_logps: Artifact, pack: Artifact, corpus: Artifact, split: str, out: Path) -> int:
    """Write the pairs of a split to a .parquet or .jsonl file, and print how many are left out because TRL can't use them.

    Returns:
        The number of pairs written.
    Raises:
        SnaketuneError: log-probabilities, pack and corpus don't belong together; no pair can be exported; or `out` has another
            suffix.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise SnaketuneError(f"--out: found {out}; expected a file that ends in .parquet or .jsonl")
    if (kind := pack.manifest.get("kind")) != "preference":
        raise SnaketuneError(
            f"{pack.manifest_path} is of kind {kind}; expected preference, as TRL takes reference log-probabilities of pairs"
        )
    if pack.manifest.get("pairs") is None or ref_logps.manifest["inputs"].get("pack") != [pack.manifest["pairs"]]:
        raise SnaketuneError(
            f"{ref_logps.manifest_path} was computed for other pairs than those in {pack.manifest_path}"
        )
    known, tokens = read_ref_logps(ref_logps, split), dict(_tokens(pack, split))
    written, seen = 0, set()
    partial = out.with_name(f".{out.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _Writer(partial, out.suffix) as write:
        for batch in read_split(corpus, split).to_batches(ROWS_PER_BATCH):
            rows = []
            for row in batch.to_pylist():
                if row["id"] in seen or row["id"] not in tokens:
                    continue
                seen.add(row["id"])
                if (ids := tokens[row["id"]]) is None:
                    continue
                logps = {f"ref_{side}_logps": logp for side, logp in zip(COMPLETIONS, known[row["id"]].logps)}
                more = {name: row[name] for name in ("tools", "template_variables") if name in row}
                rows.append({"id": row["id"]} | {name: _text(row[name]) for name in TEXTS} | more | ids | logps)
            if rows:
                write(rows)
                written += len(rows)
    if missing := tokens.keys() - seen:
        partial.unlink(missing_ok=True)
        raise SnaketuneError(
            f"{corpus.manifest_path} lacks {len(missing)} of {len(tokens)} pairs in {pack.manifest_path}, for instance "
            f"{sorted(missing)[0]}; pass the corpus that the pairs were packed from"
        )
    if not written:
        raise SnaketuneError(f"{pack.manifest_path} has no {split} pairs that TRL can train on")
    partial.replace(out)
    if excluded := sum(ids is None for ids in tokens.values()):
        print(
            f"{excluded} of {len(tokens)} pairs are left out: TRL takes loss on every token of a completion, and their "
            "completions have tokens without loss"
        )
    return written


def _text(turns: Any) -> Any:
    """Reduce turns to the keys that TRL reads; texts stay as they are."""
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns] if isinstance(turns, list) else turns


def _tokens(pack: Artifact, split: str) -> Iterator[tuple[str, dict[str, list[int]] | None]]:
    """Yield each pair's id with the token ids of prompt and completions; None for a pair that TRL can't represent."""
    rows, ids = open_rows(pack, split), {}
    for document in documents(pack, split):
        ids.setdefault(document["row"], []).append(document["id"])
    for number in range(len(rows)):
        row = rows[number]
        layout = layout_of([row])
        completions = [_completion(row, layout, segment) for segment in layout.completions]
        for pair, chosen, rejected in zip(ids.get(number, ()), completions[::2], completions[1::2]):
            if chosen and rejected and chosen[0] == rejected[0]:
                yield pair, {"prompt_ids": chosen[0], "chosen_ids": chosen[1], "rejected_ids": rejected[1]}
            else:
                yield pair, None


def _completion(row: dict[str, Any], layout: Any, segment: int) -> tuple[list[int], list[int]] | None:
    """Token ids of prompt and completion, which is the contiguous run of supervised tokens; None if they aren't contiguous.

    Tokens after the completion have no loss and are dropped.
    """
    positions = layout.sequence_tokens(segment, np.arange(layout.sequence_lengths[segment]))
    supervised = np.flatnonzero(row["labels"][positions] != IGNORED)
    if not len(supervised) or supervised[-1] - supervised[0] + 1 != len(supervised):
        return None
    ids = row["input_ids"][positions]
    return ids[: supervised[0]].tolist(), ids[supervised].tolist()


class _Writer:
    """Context manager that returns a function to write lists of rows as Parquet or JSON lines."""

    def __init__(self, path: Path, suffix: str):
        self.path, self.suffix = path, suffix
        self.file: Any = None

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
