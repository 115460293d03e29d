"""Packing in memory, from rows with TRL's columns or from lists of token ids; by the planner that packs corpora on disk.

    conversations    messages, or prompt + completion, or text; or input_ids with labels
    pairs            prompt, chosen, rejected: texts or lists of messages; or prompt_ids, chosen_ids, rejected_ids

Texts are tokenized as TRL does it: the chat template for messages, an end-of-sequence token after a text, and a completion
begins where its tokens first differ from the prompt's.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.engine.packing.planner import plan_split
from snaketune.engine.packing.ragged import common_start, offsets_of
from snaketune.engine.packing.row_builder import RowBuilder
from snaketune.engine.packing.rows import DocumentColumns, PackedRows
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.shards import FORMAT_VERSIONS, IGNORED, TOKENS_PER_BATCH, list_columns
from snaketune.engine.packing.tokens import IdViews
from snaketune.errors import SnaketuneError, first_line

# A tokenizer of transformers: `apply_chat_template`, a call with a text, `eos_token`, `pad_token_id`.
Tokenizer = Any
Overflow = Literal["drop", "truncate", "split", "raise"]
SPLIT = "train"


def pack_conversations(
    dataset: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer = None,
    length: int = 2048,
    *,
    assistant_only_loss: bool = False,
    overflow: Overflow = "drop",
) -> PackedRows:
    """Pack conversations into rows of `length` tokens.

    Args:
        tokenizer: not needed for rows of input_ids.
        assistant_only_loss: whether only the assistant's turns are learned, which the chat template has to mark with
            `{% generation %}`. Of prompt and completion, only completions are learned in any case.
        overflow: what happens to conversations longer than a row; the numbers are printed.
    Raises:
        SnaketuneError: a row has none of the columns, or no row can be packed.
    """
    _check(length, overflow, ("drop", "truncate", "split", "raise"))
    sequences, runs = [], []
    for number, row in enumerate(dataset):
        with _named(number):
            ids, learned = _conversation(row, number, tokenizer, assistant_only_loss)
        # Nothing predicts the first token.
        learned[:1] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]]).astype(np.int8)))
        sequences.append(ids)
        runs.append(edges.astype(np.int32))
    supervised = [int((edges[1::2] - edges[::2]).sum()) for edges in runs]
    empty = [[] for _ in sequences]
    columns = {"supervised": supervised, "branches": empty, "turn_ends": empty}
    tokens = MemoryTokens.of(sequences, runs, columns)
    return _packed("sft", tokens, length, overflow, _padding_id(tokenizer))


def pack_pairs(
    dataset: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer = None,
    length: int = 2048,
    *,
    overflow: Literal["drop", "truncate", "raise"] = "drop",
) -> PackedRows:
    """Pack preference pairs into rows of `length` tokens; the prompt of pairs in one row is stored and computed once.

    Args:
        tokenizer: not needed for rows of prompt_ids, chosen_ids and rejected_ids.
        overflow: what happens to pairs longer than a row; the numbers are printed.
    Raises:
        SnaketuneError: a row lacks a column, or no row can be packed.
    """
    _check(length, overflow, ("drop", "truncate", "raise"))
    sequences, runs = [], []
    columns: dict[str, list[Any]] = {"prompt": [], "chosen": [], "common": [], "prompt_hash": [], "supervised": []}
    for number, row in enumerate(dataset):
        with _named(number):
            prompt, chosen, rejected = _pair(row, number, tokenizer)
        sequences.append(np.concatenate([prompt, chosen, rejected]))
        middle, end = len(prompt) + len(chosen), len(sequences[-1])
        first = max(len(prompt), 1)
        runs.append(np.array([first, middle, middle, end], np.int32))
        columns["prompt"].append(len(prompt))
        columns["chosen"].append(len(chosen))
        columns["common"].append(common_start(chosen, rejected))
        columns["prompt_hash"].append(xxhash.xxh3_64_intdigest(prompt.tobytes()))
        columns["supervised"].append(end - first)
    tokens = MemoryTokens.of(sequences, runs, columns)
    return _packed("preference", tokens, length, overflow, _padding_id(tokenizer))


@dataclass(frozen=True)
class MemoryTokens:
    """Tokenized sequences in memory, as `engine.packing.tokens.Tokens`."""

    table: pa.Table
    sequences: list[np.ndarray]

    @classmethod
    def of(
        cls, sequences: list[np.ndarray], runs: list[np.ndarray], columns: Mapping[str, Sequence[Any]]
    ) -> "MemoryTokens":
        """Args: columns: those of the index (`tokenization.token_store`) that are not of all sequences."""
        lists = {"branches", "turn_ends"}
        types = {name: pa.list_(pa.int32()) if name in lists else pa.int32() for name in columns}
        types |= {"prompt_hash": pa.uint64()} if "prompt_hash" in columns else {}
        table = {
            "id": pa.array([str(number) for number in range(len(sequences))]),
            "length": pa.array([len(sequence) for sequence in sequences], pa.int32()),
            "supervised_runs": pa.array(runs, pa.list_(pa.int32())),
        }
        table |= {name: pa.array(values, types[name]) for name, values in columns.items()}
        for name in ("prompt", "chosen", "common"):
            table.setdefault(name, pa.array(np.zeros(len(sequences), np.int32)))
        return cls(pa.table(table), sequences)

    def index(self, split: str, columns: list[str] | None = None) -> pa.Table:
        return self.table if columns is None else self.table.select(columns)

    def tables(self, split: str, columns: list[str]) -> Iterator[pa.Table]:
        yield self.index(split, columns)

    def weighted(self, split: str) -> bool:
        return False

    def lists(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        column = self.table[name].combine_chunks()
        return column.flatten().to_numpy(), offsets_of(np.diff(column.offsets.to_numpy()))

    def views(self, split: str) -> IdViews:
        offsets = offsets_of(np.array([len(sequence) for sequence in self.sequences], np.int64))
        values = np.concatenate([np.empty(0, np.int32), *self.sequences])
        return IdViews([values], [offsets], np.array([0, len(self.sequences)]))

    def release(self) -> None:
        """Nothing is mapped."""


def _packed(kind: str, tokens: MemoryTokens, length: int, overflow: Overflow, padding_id: int) -> PackedRows:
    settings = PackingSettings(kind=kind, lengths=(length,), overflow=overflow)
    read = {"rows": len(tokens.sequences), "tokens": sum(map(len, tokens.sequences))}
    if not read["rows"]:
        raise SnaketuneError("there is no row to pack")
    plan, counts, metadata = plan_split(settings, tokens, SPLIT, read)
    rows = plan.packed(0, plan.rows)
    lists = list_columns(kind, FORMAT_VERSIONS[kind][0])
    builder, step = RowBuilder(plan, tokens, SPLIT), max(1, TOKENS_PER_BATCH // length)
    batches = [
        builder.batch(first, min(first + step, rows.rows), length, padding_id, "prefix_segments" in lists)
        for first in range(0, rows.rows, step)
    ]
    if rows.pairs is None:
        offsets, values = np.searchsorted(rows.roots, rows.offsets), {}
    else:
        offsets, values = rows.pair_offsets, {"reference": np.zeros((len(rows.pairs), 2), np.float32)}
    values["source"] = np.zeros(rows.documents, np.int64)
    dropped = f", {counts['read'] - counts['kept']} dropped ({counts['dropped']})" if counts["dropped"] else ""
    print(
        f"packed: {counts['read']} sequences into {rows.rows} rows of {length} tokens, "
        f"{metadata['packing_efficiency']:.1f}% of them used{dropped}",
        flush=True,
    )
    return PackedRows(batches, lists, length, documents=DocumentColumns(offsets, values))


def _check(length: int, overflow: str, allowed: tuple[str, ...]) -> None:
    if length < 1:
        raise SnaketuneError(f"length: found {length}, expected a number of tokens above 0")
    if overflow not in allowed:
        raise SnaketuneError(f"overflow: found {overflow!r}, expected {', '.join(allowed[:-1])} or {allowed[-1]}")


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Name the row in errors of tokenizers and chat templates, which may be of any type."""
    try:
        yield
    except SnaketuneError:
        raise
    except Exception as error:
        raise SnaketuneError(f"row {number} can't be tokenized: {first_line(error)}") from error


def _padding_id(tokenizer: Tokenizer) -> int:
    return getattr(tokenizer, "pad_token_id", None) or 0


def _ids(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def _missing(number: int, row: Mapping[str, Any], expected: str) -> SnaketuneError:
    found = ", ".join(f"{name!r}" + " (null)" * (row[name] is None) for name in row)
    return SnaketuneError(f"row {number}: expected {expected}; found the columns {found}")


def _conversation(
    row: Mapping[str, Any], number: int, tokenizer: Tokenizer, assistant_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of a row, int32[n], and which of them are learned, bool[n]."""
    if "input_ids" in row:
        ids = _ids(row["input_ids"])
        labels = row.get("labels")
        return ids, np.ones(len(ids), bool) if labels is None else _ids(labels) != IGNORED
    if tokenizer is None:
        raise SnaketuneError(f"row {number}: its texts need a tokenizer; rows of input_ids don't")
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, whole = _continued(row["prompt"], row["completion"], tokenizer, row)
        return whole, np.arange(len(whole)) >= common_start(prompt, whole)
    if row.get("messages") is not None:
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=assistant_only, **_variables(row)
        )
        ids = _ids(encoded["input_ids"])
        learned = np.asarray(encoded["assistant_masks"], bool) if assistant_only else np.ones(len(ids), bool)
        return ids, learned
    if isinstance(row.get("text"), str):
        ids = _ids(tokenizer(_ended(row["text"], tokenizer))["input_ids"])
        return ids, np.ones(len(ids), bool)
    raise _missing(number, row, "messages, prompt and completion, text, or input_ids")


def _pair(row: Mapping[str, Any], number: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The token ids of prompt, chosen and rejected completion."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    if all(row.get(name) is not None for name in names):
        return tuple(_ids(row[name]) for name in names)
    if any(row.get(name) is None for name in ("prompt", "chosen", "rejected")):
        raise _missing(number, row, "prompt, chosen and rejected, or prompt_ids, chosen_ids and rejected_ids")
    if tokenizer is None:
        raise SnaketuneError(
            f"row {number}: its texts need a tokenizer; rows of prompt_ids, chosen_ids and rejected_ids don't"
        )
    prompt, chosen = _continued(row["prompt"], row["chosen"], tokenizer, row)
    _, rejected = _continued(row["prompt"], row["rejected"], tokenizer, row)
    shared = min(common_start(prompt, chosen), common_start(prompt, rejected))
    return prompt[:shared], chosen[shared:], rejected[shared:]


def _continued(
    prompt: Any, completion: Any, tokenizer: Tokenizer, row: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of a prompt, and of the prompt with its completion."""
    if isinstance(prompt, str):
        whole = tokenizer(prompt + _ended(completion, tokenizer))["input_ids"]
        return _ids(tokenizer(prompt)["input_ids"]), _ids(whole)
    variables = _variables(row)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **variables)["input_ids"]
    whole = tokenizer.apply_chat_template([*prompt, *completion], return_dict=True, **variables)["input_ids"]
    return _ids(ids), _ids(whole)


def _ended(text: str, tokenizer: Tokenizer) -> str:
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _variables(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
    return {"tools": tools, **(row.get("chat_template_kwargs") or {})}
