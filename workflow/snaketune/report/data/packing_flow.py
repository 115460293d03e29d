"""Sequence and token counts from the corpus to training: corpus → tokenize → plan → write → pack → training.

    read = kept + dropped                                                       in sequences
    tokens read + mismatched = tokens packed + dropped + truncated + shared     in tokens

All counts are from the manifest of the stage that counted them.
"""

from dataclasses import dataclass, field
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.data.corpus_flow import SPLITS, Tokenized, merge_parts
from snaketune.report.data.results import ResultSet

UNITS = {"preference": "pairs", "unpaired": "completions"}


@dataclass(frozen=True, kw_only=True)
class SplitFlow:
    """Sequences (conversations or pairs) and tokens of one split of one pack.

    Attributes:
        documents: Documents packed: sequences, or the parts of those that were split.
        dropped, dropped_tokens: By reason. Tokens may have a reason for which no whole sequence was dropped.
        split_up: Sequences that were split over several rows, and into how many parts.
        shared: Tokens of common prefixes, which are written once: of prompts, and of completions.
        mismatched: Tokens of completions that are also packed after the prompts of other rows.
        rows, capacity: Packed rows, and the tokens that they can hold; None for raw rows.
        lost_to_length: What rows are too short for (`engine.packing.truncation`).
    """

    split: str
    read: int
    read_tokens: int
    kept: int
    documents: int
    tokens: int
    supervised: int
    dropped: dict[str, int]
    dropped_tokens: dict[str, int]
    truncated: dict[str, int]
    split_up: dict[str, int]
    shared: dict[str, int]
    mismatched: int
    rows: int | None
    capacity: int | None
    lost_to_length: dict[str, Any] | None = None

    @property
    def reasons(self) -> list[str]:
        """All reasons for which sequences or tokens were dropped."""
        return sorted({*self.dropped, *self.dropped_tokens})

    @property
    def padding(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.tokens


@dataclass(frozen=True, kw_only=True)
class PackFlow:
    """One pack: its inputs, and the counts of its splits.

    Attributes:
        length: Tokens of a row; of the longest rows if there are several lengths.
    """

    name: str
    kind: str
    length: int
    overflow: str
    corpus: str | None
    tokenizer: str | None
    tokenized: Tokenized | None
    splits: list[SplitFlow]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return bool(self.metadata.get("enabled"))

    @property
    def lengths(self) -> dict[int, int]:
        """Number of train rows by length; empty if there is only one length."""
        return dict(sorted((int(length), n) for length, n in self.metadata.get("rows_by_length", {}).items()))

    @property
    def train(self) -> SplitFlow:
        return self.splits[0]

    @property
    def title(self) -> str:
        return self.corpus or self.name

    @property
    def unit(self) -> str:
        """The word for its sequences."""
        is_text = self.tokenized is not None and self.tokenized.kind == "text"
        return "documents" if is_text else UNITS.get(self.kind, "conversations")


@dataclass(frozen=True, kw_only=True)
class TrainingFlow:
    """Rows, steps and tokens of one training.

    Attributes:
        epochs, tokens: Of the steps that ran, which may be fewer than configured; of raw rows, epochs are None without a log.
    """

    label: str
    pack: str | None
    rows: int
    pairs: int | None
    steps: int
    epochs: float | None
    tokens: int
    tokens_per_epoch: int | None


def pack_flows(results: ResultSet) -> list[PackFlow]:
    return [pack_flow(results, result) for result in results.of("pack")]


def pack_flow(results: ResultSet, result: Result) -> PackFlow:
    plan = results.first(result, "plan")
    parts = results.made_from(plan, "tokens") if plan else []
    corpus, tokenizer = (results.first(parts[0], role) if parts else None for role in ("corpus", "tokenizer"))
    tokens = merge_parts("", parts) if parts else None
    return PackFlow(
        name=result.name,
        kind=result.manifest["kind"],
        length=result.manifest["row_length"],
        overflow=result.spec["overflow"],
        corpus=corpus and corpus.name,
        tokenizer=tokenizer and tokenizer.name,
        tokenized=tokens,
        splits=[_split_flow(result, split) for split in SPLITS],
        metadata=result.manifest["packing_metadata"],
    )


def _split_flow(result: Result, split: str) -> SplitFlow:
    counts = result.counts[split]
    metadata = result.manifest["packing_metadata" if split == "train" else "packing_metadata_held_out"]
    same = ("read", "read_tokens", "kept", "tokens", "dropped", "dropped_tokens", "truncated")
    return SplitFlow(
        split=split,
        **{name: counts[name] for name in same},
        documents=counts["pieces"],
        supervised=counts["supervised_tokens"],
        split_up=counts["split"],
        mismatched=counts["mismatched_tokens"],
        shared={what: counts[f"shared_{what[:-1]}_tokens"] for what in ("prompts", "answers")},
        rows=metadata.get("rows"),
        capacity=metadata.get("row_tokens"),
        lost_to_length=metadata.get("lost_to_length"),
    )


def training_flows(results: ResultSet) -> list[TrainingFlow]:
    return [training_flow(results, result) for result in results.of("sft", "dpo", "reward")]


def training_flow(results: ResultSet, result: Result) -> TrainingFlow:
    pack, counts = results.first(result, "pack"), result.counts
    # TRL tokenizes raw rows itself, so the tokens of an epoch of raw rows aren't known.
    tokens, per_epoch = counts["tokens"], counts.get("tokens_per_epoch")
    logged = next((entry["epoch"] for entry in reversed(result.history) if "epoch" in entry), None)
    return TrainingFlow(
        label=result.label,
        pack=pack and pack.name,
        rows=counts["rows"],
        pairs=counts.get("pairs"),
        steps=counts["steps"],
        epochs=tokens / per_epoch if per_epoch else logged,
        tokens=tokens,
        tokens_per_epoch=per_epoch,
    )
