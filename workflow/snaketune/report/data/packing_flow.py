"""Sequence and token counts from the corpus to training: corpus → tokenize → plan → write → pack → training.

    read = kept + dropped                                                       in sequences
    tokens read + mismatched = tokens packed + dropped + truncated + shared     in tokens

All counts are from the manifest of the stage that counted them. Whether they add up is checked here, not assumed.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from snaketune.packing.truncation import warning
from snaketune.report.data.results import Result, ResultSet
from snaketune.report.data.sums import count_error

SPLITS = ("train", "held_out")
TOKEN_COUNTS = ("rows", "tokens", "supervised_tokens", "control_text", "nothing_supervised")


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """All parts of one tokenized corpus.

    Attributes:
        counts: Sums over the parts, by split.
        paths: Number of parts by code path and reason, `("fast", "")` or `("reference", "the template ...")`.
    """

    name: str
    kind: str
    train_on: str
    counts: dict[str, Counter[str]]
    paths: dict[tuple[str, str], int]
    parity_rows: int
    rows_by_reference: int
    parts: int
    expected_parts: int


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
        upstream: Counts of the stages before packing, as (unit, count, stage in words).
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
    upstream: tuple[tuple[str, int, str], ...] = ()
    lost_to_length: dict[str, Any] | None = None

    @property
    def reasons(self) -> list[str]:
        """All reasons for which sequences or tokens were dropped."""
        return sorted({*self.dropped, *self.dropped_tokens})

    @property
    def padding(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.tokens

    @property
    def count_errors(self) -> list[str]:
        """Messages about counts that don't add up, within packing and between stages."""
        read = {"rows": self.read, "tokens": self.read_tokens}
        errors = [
            error
            for what, n, who in self.upstream
            for error in count_error(what, n, who, read[what], "read by packing")
        ]
        errors += count_error("rows", self.read, "read", self.kept + sum(self.dropped.values()), "packed and dropped")
        removed = sum(self.dropped_tokens.values()) + self.truncated["tokens"] + sum(self.shared.values())
        incoming = self.read_tokens + self.mismatched
        errors += count_error("tokens", incoming, "read", self.tokens + removed, "packed, dropped, cut off and shared")
        if self.capacity is not None and self.capacity < self.tokens:
            errors.append(f"{self.tokens:,} tokens in rows with a capacity of {self.capacity:,}")
        return [f"{self.split.replace('_', ' ')}: {error}" for error in errors]


@dataclass(frozen=True, kw_only=True)
class PackFlow:
    """One pack: its inputs, and the counts of its splits.

    Attributes:
        length: Tokens of a row; of the longest rows if there are several lengths.
        written: Rows in all shards, and the planned number.
    """

    name: str
    kind: str
    length: int
    overflow: str
    corpus: str | None
    tokenizer: str | None
    tokenized: Tokenized | None
    splits: list[SplitFlow]
    written: tuple[int, int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return bool(self.metadata.get("enabled"))

    @property
    def lengths(self) -> dict[int, int]:
        """Number of train rows by length; empty if there is only one length."""
        return {int(length): n for length, n in sorted(self.metadata.get("rows_by_length", {}).items(), key=_by_length)}

    @property
    def train(self) -> SplitFlow:
        return self.splits[0]

    @property
    def title(self) -> str:
        return self.corpus or self.name

    @property
    def unit(self) -> str:
        """The word for its sequences."""
        documents = self.tokenized is not None and self.tokenized.kind == "text"
        return (
            "documents"
            if documents
            else {"preference": "pairs", "unpaired": "completions"}.get(self.kind, "conversations")
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings about sequences and tokens lost because they are longer than a row."""
        messages = (
            warning(
                split.split,
                self.unit,
                self.length,
                self.overflow,
                split.lost_to_length,
                {"rows": split.read, "tokens": split.read_tokens},
            )
            for split in self.splits
            if split.lost_to_length
        )
        return [one for one in messages if one]

    @property
    def count_errors(self) -> list[str]:
        """Messages about counts that don't add up."""
        errors = [error for split in self.splits for error in split.count_errors]
        if self.written:
            errors += count_error("rows", self.written[1], "planned", self.written[0], "written")
        if (tokens := self.tokenized) and tokens.parts != tokens.expected_parts:
            errors.append(f"{tokens.parts} of {tokens.expected_parts} tokenized parts are known")
        return errors


@dataclass(frozen=True, kw_only=True)
class TrainingFlow:
    """Rows, steps and tokens of one training.

    Attributes:
        epochs, tokens: Of the steps that ran, which may be fewer than configured; None if neither manifest nor log has them.
    """

    label: str
    pack: str | None
    rows: int
    pairs: int | None
    steps: int
    epochs: float | None
    tokens: float | None
    tokens_per_epoch: int | None


def pack_flows(results: ResultSet) -> list[PackFlow]:
    """The counts of every pack."""
    return [pack_flow(results, result) for result in results.of("pack")]


def pack_flow(results: ResultSet, result: Result) -> PackFlow:
    """The counts of one pack."""
    plan = _first(results, result, "plan")
    parts = results.made_from(plan, "tokens") if plan else []
    corpus = _first(results, parts[0], "corpus") if parts else None
    tokenizer = _first(results, parts[0], "tokenizer") if parts else None
    tokens = tokenized(parts) if parts else None
    shards = results.made_from(result, "shards")
    splits = [_split_flow(result, split, corpus, tokens) for split in SPLITS]
    planned = sum(split.documents if split.rows is None else split.rows for split in splits)
    return PackFlow(
        name=result.name,
        kind=result.manifest["kind"],
        length=result.manifest["row_length"],
        overflow=result.spec["overflow"],
        corpus=corpus and corpus.name,
        tokenizer=tokenizer and tokenizer.name,
        tokenized=tokens,
        splits=splits,
        written=(sum(part.counts["rows"] for part in shards), planned) if shards else None,
        metadata=result.manifest["packing_metadata"],
    )


def tokenized(parts: list[Result]) -> Tokenized:
    """Merge the parts of one tokenized corpus."""
    counts: dict[str, Counter[str]] = {split: Counter(dict.fromkeys(TOKEN_COUNTS, 0)) for split in SPLITS}
    for part in parts:
        for split in SPLITS:
            counts[split].update({name: part.counts[split][name] for name in TOKEN_COUNTS})
    return Tokenized(
        name=parts[0].name_without_part,
        kind=parts[0].spec["kind"],
        train_on=parts[0].manifest["train_on"],
        counts=counts,
        paths=dict(Counter((part.manifest["path"], part.manifest["why"]) for part in parts)),
        parity_rows=sum(part.manifest["parity_rows"] for part in parts),
        rows_by_reference=sum(part.manifest.get("rows_by_reference", 0) for part in parts),
        parts=len(parts),
        expected_parts=parts[0].spec["parts"],
    )


def tokenized_corpora(results: ResultSet) -> list[tuple[Tokenized, list[Result]]]:
    """Every tokenized corpus with its parts."""
    by_name: dict[str, list[Result]] = {}
    for result in results.of("tokenize"):
        by_name.setdefault(result.name_without_part, []).append(result)
    return [(tokenized(parts), parts) for parts in by_name.values()]


def _split_flow(result: Result, split: str, corpus: Result | None, tokens: Tokenized | None) -> SplitFlow:
    counts = result.counts[split]
    metadata = result.manifest["packing_metadata" if split == "train" else "packing_metadata_held_out"]
    upstream = [("rows", corpus.counts["kept"][split], "kept by the corpus")] if corpus else []
    if tokens:
        upstream += [(what, tokens.counts[split][what], "tokenized") for what in ("rows", "tokens")]
    return SplitFlow(
        split=split,
        read=counts["read"],
        read_tokens=counts["read_tokens"],
        kept=counts["kept"],
        documents=counts["pieces"],
        tokens=counts["tokens"],
        supervised=counts["supervised_tokens"],
        dropped=counts["dropped"],
        dropped_tokens=counts["dropped_tokens"],
        truncated=counts["truncated"],
        split_up=counts["split"],
        mismatched=counts["mismatched_tokens"],
        shared={what: counts[f"shared_{what[:-1]}_tokens"] for what in ("prompts", "answers")},
        rows=metadata.get("rows"),
        capacity=metadata.get("row_tokens"),
        lost_to_length=metadata.get("lost_to_length"),
        upstream=tuple(upstream),
    )


def training_flows(results: ResultSet) -> list[TrainingFlow]:
    """The counts of every SFT and DPO run."""
    return [training_flow(results, result) for result in results.of("sft", "dpo")]


def training_flow(results: ResultSet, result: Result) -> TrainingFlow:
    """The counts of one SFT or DPO run."""
    pack, counts = _first(results, result, "pack"), result.counts
    # TRL tokenizes raw rows itself, so the tokens of an epoch of raw rows aren't known.
    packed = pack and pack.manifest["packing_metadata"]["enabled"]
    per_epoch = counts.get("tokens_per_epoch", pack.counts["train"]["tokens"] if packed else None)
    tokens = counts.get("tokens")
    if tokens is not None and per_epoch:
        epochs = tokens / per_epoch
    else:
        epochs = next((entry["epoch"] for entry in reversed(result.history) if "epoch" in entry), None)
    if tokens is None and per_epoch is not None and epochs is not None:
        # Older results have no token count.
        tokens = per_epoch * epochs
    return TrainingFlow(
        label=result.label,
        pack=pack and pack.name,
        rows=counts["rows"],
        pairs=counts.get("pairs"),
        steps=counts["steps"],
        epochs=epochs,
        tokens=tokens,
        tokens_per_epoch=per_epoch,
    )


def _first(results: ResultSet, result: Result, role: str) -> Result | None:
    return next(iter(results.made_from(result, role)), None)


def _by_length(entry: tuple[str, int]) -> int:
    return int(entry[0])
