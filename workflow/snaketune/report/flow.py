"""Where every row went: read = quarantined + duplicates + kept, kept = packed + dropped, and the tokens of what is left.

Each number is taken from the manifest of the stage that counted it; whether they add up is checked here, not assumed.
"""

from dataclasses import dataclass, field
from typing import Any

from snaketune.report.findings import Findings, Result

CSV_COLUMNS = ("stage", "name", "split", "what", "reason", "rows", "tokens", "supervised_tokens")


@dataclass(frozen=True, kw_only=True)
class CorpusFlow:
    """Rows of one corpus."""

    name: str
    kind: str
    read: int
    quarantined: dict[str, int]
    dropped: dict[str, int]
    kept: dict[str, int]
    notes: dict[str, int]

    @property
    def adds_up(self) -> bool:
        return self.read == sum(sum(part.values()) for part in (self.quarantined, self.dropped, self.kept))


@dataclass(frozen=True, kw_only=True)
class SplitFlow:
    """Rows and tokens of one split of one pack; tokens are None where they aren't counted (raw rows)."""

    split: str
    read: int
    kept: int
    dropped: dict[str, int]
    dropped_tokens: dict[str, int]
    tokens: int | None
    supervised: int | None
    capacity: int | None
    corpus_kept: int | None

    @property
    def adds_up(self) -> bool:
        """Also across stages: what the corpus kept is what packing read."""
        return self.read == self.kept + sum(self.dropped.values()) and self.corpus_kept in (None, self.read)


@dataclass(frozen=True, kw_only=True)
class PackFlow:
    """One pack: what it was made from, and how well the rows are filled."""

    name: str
    kind: str
    length: int
    corpus: str | None
    tokenizer: str | None
    splits: list[SplitFlow]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return bool(self.metadata.get("enabled"))

    @property
    def train(self) -> SplitFlow:
        return self.splits[0]

    @property
    def title(self) -> str:
        return self.corpus or self.name


@dataclass(frozen=True, kw_only=True)
class TrainingFlow:
    """What one training was fed."""

    label: str
    pack: str | None
    rows: int
    pairs: int | None
    steps: int
    epochs: float
    tokens_per_epoch: int | None

    @property
    def tokens(self) -> float | None:
        return None if self.tokens_per_epoch is None else self.tokens_per_epoch * self.epochs


def corpus_flows(findings: Findings) -> list[CorpusFlow]:
    """Of every corpus."""
    return [
        CorpusFlow(
            name=result.name,
            kind=result.spec["kind"],
            read=result.counts["read"],
            quarantined={reason: n for reason, n in result.counts["quarantined"].items() if reason != "total"},
            dropped=dict(result.counts["dropped"]),
            kept={split: result.counts["kept"][split] for split in ("train", "held_out")},
            notes={note: n for note, n in result.counts.get("notes", {}).items() if n},
        )
        for result in findings.of("corpus")
    ]


def pack_flows(findings: Findings) -> list[PackFlow]:
    """Of every pack."""
    return [pack_flow(findings, result) for result in findings.of("pack")]


def pack_flow(findings: Findings, result: Result) -> PackFlow:
    """Of one."""
    corpus = next(iter(findings.made_from(result, "corpus")), None)
    tokenizer = next(iter(findings.made_from(result, "tokenizer")), None)
    length = result.spec["length"]
    splits = []
    for split, metadata in (("train", "packing_metadata"), ("held_out", "packing_metadata_held_out")):
        counts = result.counts[split]
        rows = result.manifest.get(metadata, {}).get("rows")
        splits.append(
            SplitFlow(
                split=split,
                read=counts["read"],
                kept=counts["kept"],
                dropped=counts["dropped"],
                dropped_tokens=counts.get("dropped_tokens", {}),
                tokens=counts.get("tokens"),
                supervised=counts.get("supervised_tokens"),
                capacity=None if rows is None else rows * length,
                corpus_kept=corpus.counts["kept"][split] if corpus else None,
            )
        )
    return PackFlow(
        name=result.name,
        kind=result.manifest.get("kind", result.spec["kind"]),
        length=length,
        corpus=corpus and corpus.name,
        tokenizer=tokenizer and tokenizer.name,
        splits=splits,
        metadata=result.manifest.get("packing_metadata", {}),
    )


def training_flows(findings: Findings) -> list[TrainingFlow]:
    """Of every SFT and DPO run."""
    flows = []
    for result in findings.of("sft", "dpo"):
        pack = next(iter(findings.made_from(result, "pack")), None)
        per_epoch = pack.counts["train"].get("tokens") if pack else None
        flows.append(
            TrainingFlow(
                label=result.label,
                pack=pack and pack.name,
                rows=result.counts["rows"],
                pairs=result.counts.get("pairs"),
                steps=result.counts["steps"],
                epochs=result.spec["training"]["epochs"],
                tokens_per_epoch=result.counts.get("tokens_per_epoch", per_epoch),
            )
        )
    return flows


def csv_rows(findings: Findings) -> list[dict[str, Any]]:
    """All counts as one table, a count per line; what isn't counted is empty."""
    rows: list[dict[str, Any]] = []

    def add(stage: str, name: str, what: str, count: int | None, **others: Any) -> None:
        rows.append({"stage": stage, "name": name, "what": what, "rows": count, **others})

    for flow in corpus_flows(findings):
        add("corpus", flow.name, "read", flow.read)
        for reason, count in flow.quarantined.items():
            add("corpus", flow.name, "quarantined", count, reason=reason)
        for reason, count in flow.dropped.items():
            add("corpus", flow.name, "dropped", count, reason=reason)
        for split, count in flow.kept.items():
            add("corpus", flow.name, "kept", count, split=split)
    for flow in pack_flows(findings):
        for split in flow.splits:
            add("pack", flow.name, "read", split.read, split=split.split)
            for reason, count in split.dropped.items():
                tokens = split.dropped_tokens.get(reason)
                add("pack", flow.name, "dropped", count, split=split.split, reason=reason, tokens=tokens)
            add(
                "pack",
                flow.name,
                "kept",
                split.kept,
                split=split.split,
                tokens=split.tokens,
                supervised_tokens=split.supervised,
            )
    for flow in training_flows(findings):
        stage, _, name = flow.label.partition(":")
        add(stage, name, "trained per epoch", flow.rows, split="train", tokens=flow.tokens_per_epoch)
    return rows
