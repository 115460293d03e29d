"""From kept rows to packed ones: corpus → tokenize → plan → write → pack → training.

    read = kept + dropped                                                       in sequences
    tokens read + mismatched = tokens packed + dropped + truncated + shared     in tokens

Each number is taken from the manifest of the stage that counted it; whether they add up is checked here, not assumed.
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
        counts: by split, what the parts counted together.
        paths: how many parts went which way and why, `("fast", "")` or `("reference", "the template ...")`.
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
        dropped, dropped_tokens: by reason; tokens may have a reason that no whole sequence was dropped for.
        shared: tokens that several completions begin with, and that are written once: of prompts, and of answers.
        mismatched: tokens of completions that stand under the prompts of others too.
        rows, capacity: rows written, and the tokens that they have room for; None of raw rows.
        before: what the stages before this one handed on, as (rows or tokens, count, by whom).
        written: rows of the shards, where they are there to be counted.
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
        """All that something was dropped for."""
        return sorted({*self.dropped, *self.dropped_tokens})

    @property
    def padding(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.tokens

    @property
    def count_errors(self) -> list[str]:
        """What doesn't add up, also across stages: what one hands on is what the next one reads."""
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
            errors.append(f"{self.tokens:,} tokens in rows that have room for {self.capacity:,}")
        return [f"{self.split.replace('_', ' ')}: {error}" for error in errors]


@dataclass(frozen=True, kw_only=True)
class PackFlow:
    """One pack: what it was made from, and how well the rows are filled.

    Attributes:
        length: tokens of a row, of the longest where there are several lengths.
        written: rows of all shards, and how many there should be.
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
        """Train rows by length, where there are several."""
        return {int(length): n for length, n in sorted(self.metadata.get("rows_by_length", {}).items(), key=_by_length)}

    @property
    def train(self) -> SplitFlow:
        return self.splits[0]

    @property
    def title(self) -> str:
        return self.corpus or self.name

    @property
    def unit(self) -> str:
        """What its sequences are called."""
        documents = self.tokenized is not None and self.tokenized.kind == "text"
        return (
            "documents"
            if documents
            else {"preference": "pairs", "unpaired": "completions"}.get(self.kind, "conversations")
        )

    @property
    def warnings(self) -> list[str]:
        """What is lost because rows are short, where it is much."""
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
        """What doesn't add up."""
        errors = [error for split in self.splits for error in split.count_errors]
        if self.written:
            errors += count_error("rows", self.written[1], "planned", self.written[0], "written")
        if (tokens := self.tokenized) and tokens.parts != tokens.expected_parts:
            errors.append(f"{tokens.parts} of {tokens.expected_parts} tokenized parts are known")
        return errors


@dataclass(frozen=True, kw_only=True)
class TrainingFlow:
    """What one training was fed.

    Attributes:
        epochs, tokens: of the steps that were done, however many were asked for; None where no manifest and no log has them.
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
    """Of every pack."""
    return [pack_flow(results, result) for result in results.of("pack")]


def pack_flow(results: ResultSet, result: Result) -> PackFlow:
    """Of one."""
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
    """The parts of one corpus together."""
    counts: dict[str, Counter[str]] = {split: Counter(dict.fromkeys(TOKEN_COUNTS, 0)) for split in SPLITS}
    for part in parts:
        for split in SPLITS:
            counts[split].update({name: part.counts[split][name] for name in TOKEN_COUNTS})
    return Tokenized(
        name=parts[0].whole,
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
    """Every tokenized corpus, with its parts."""
    by_name: dict[str, list[Result]] = {}
    for result in results.of("tokenize"):
        by_name.setdefault(result.whole, []).append(result)
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
    """Of every SFT and DPO run."""
    return [training_flow(results, result) for result in results.of("sft", "dpo")]


def training_flow(results: ResultSet, result: Result) -> TrainingFlow:
    """Of one."""
    pack, counts = _first(results, result, "pack"), result.counts
    # TRL tokenizes raw rows itself, so what an epoch of them holds is counted by nobody.
    packed = pack and pack.manifest["packing_metadata"]["enabled"]
    per_epoch = counts.get("tokens_per_epoch", pack.counts["train"]["tokens"] if packed else None)
    tokens = counts.get("tokens")
    if tokens is not None and per_epoch:
        epochs = tokens / per_epoch
    else:
        epochs = next((entry["epoch"] for entry in reversed(result.history) if "epoch" in entry), None)
    if tokens is None and per_epoch is not None and epochs is not None:
        # A result of before they were counted.
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
