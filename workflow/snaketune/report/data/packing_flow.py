"""Sequence and token counts from the corpus to training: corpus → tokenize → plan → write → pack → training.

    read = kept + dropped                                                       in sequences
    tokens read + mismatched = tokens packed + dropped + truncated + shared     in tokens

All counts are from the manifest of the stage that counted them, by the names that they have there.
"""

from dataclasses import dataclass
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.data.corpus_flow import SPLITS
from snaketune.report.data.results import ResultSet

UNITS = {"preference": "pairs", "unpaired": "completions"}


@dataclass(frozen=True, kw_only=True)
class SplitFlow:
    """One split of one pack: its counts (`packing.row_plan`), and the metadata of its rows."""

    split: str
    counts: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def reasons(self) -> list[str]:
        """All reasons for which sequences or tokens were dropped; tokens may have one for which no whole sequence was."""
        return sorted({*self.counts["dropped"], *self.counts["dropped_tokens"]})

    @property
    def padding(self) -> int | None:
        """None for raw rows."""
        return self.metadata["row_tokens"] - self.counts["tokens"] if "row_tokens" in self.metadata else None


@dataclass(frozen=True, kw_only=True)
class PackFlow:
    """One pack, and the names of the corpus and the tokenizer that it was made from. `unit`: the word for its sequences."""

    result: Result
    corpus: str | None
    tokenizer: str | None
    unit: str

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def title(self) -> str:
        return self.corpus or self.name

    @property
    def length(self) -> int:
        """Tokens of a row; of the longest rows if there are several lengths."""
        return self.result.manifest["row_length"]

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the train rows."""
        return self.result.manifest["packing_metadata"]

    @property
    def packed(self) -> bool:
        return bool(self.metadata.get("enabled"))

    @property
    def lengths(self) -> dict[int, int]:
        """Number of train rows by length; empty if there is only one length."""
        return dict(sorted((int(length), n) for length, n in self.metadata.get("rows_by_length", {}).items()))

    @property
    def splits(self) -> list[SplitFlow]:
        metadata = (self.metadata, self.result.manifest["packing_metadata_held_out"])
        return [
            SplitFlow(split=split, counts=self.result.counts[split], metadata=of_split)
            for split, of_split in zip(SPLITS, metadata)
        ]

    @property
    def train(self) -> SplitFlow:
        return self.splits[0]


def pack_flows(results: ResultSet) -> list[PackFlow]:
    return [pack_flow(results, result) for result in results.of("pack")]


def pack_flow(results: ResultSet, result: Result) -> PackFlow:
    plan = results.first(result, "plan")
    parts = results.made_from(plan, "tokens") if plan else []
    corpus, tokenizer = (results.first(parts[0], role) if parts else None for role in ("corpus", "tokenizer"))
    is_text = bool(parts) and parts[0].spec["kind"] == "text"
    return PackFlow(
        result=result,
        corpus=corpus and corpus.name,
        tokenizer=tokenizer and tokenizer.name,
        unit="documents" if is_text else UNITS.get(result.manifest["kind"], "conversations"),
    )


def epochs(training: Result) -> float | None:
    """The epochs of the steps that ran, which may be fewer than configured; None for raw rows without a log."""
    # TRL tokenizes raw rows itself, so the tokens of an epoch of raw rows aren't known.
    if per_epoch := training.counts.get("tokens_per_epoch"):
        return training.counts["tokens"] / per_epoch
    return next((entry["epoch"] for entry in reversed(training.history) if "epoch" in entry), None)
