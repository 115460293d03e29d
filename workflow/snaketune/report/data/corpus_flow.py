"""Where every raw row of a corpus went: read + further + repeated = joined + quarantined + dropped + kept.

Each number is taken from the corpus' manifest; whether they add up is checked here, not assumed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

from snaketune.config.corpus_sources import PersonalData
from snaketune.report.data.results import Result, ResultSet
from snaketune.report.data.sums import count_error
from snaketune.report.text import clean

REPAIRED = "repaired_"
PERSONAL_DATA = get_args(PersonalData)


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Of a corpus, or of one of its sources.

    Attributes:
        extra: rows that raw rows made besides their first.
        repeated: copies that a weight above 1 made.
        joined: raw rows that became part of another, as messages of a tree do.
    """

    read: int
    extra: int
    repeated: int
    joined: int
    quarantined: int
    dropped: dict[str, int]
    kept: int

    @property
    def incoming(self) -> int:
        return self.read + self.extra + self.repeated

    @property
    def outgoing(self) -> int:
        return self.joined + self.quarantined + sum(self.dropped.values()) + self.kept


@dataclass(frozen=True, kw_only=True)
class SourceFlow:
    """Rows of one source; its name is that of its files or of the Hub dataset.

    Attributes:
        ignored: columns and keys that weren't read, and how many rows have them.
    """

    name: str
    layouts: dict[str, int]
    ignored: dict[str, int]
    rows: RowCounts

    @property
    def count_errors(self) -> list[str]:
        """What doesn't add up."""
        return count_error("rows", self.rows.incoming, f"came in from {self.name}", self.rows.outgoing, "went out")


@dataclass(frozen=True, kw_only=True)
class CorpusFlow:
    """Rows of one corpus.

    Attributes:
        repairs: rows changed, by repair.
        cleaned: rows changed, by step of the cleaning.
        masked: pieces of personal data replaced, by kind.
        near_duplicates, contamination: what was found, where it was looked for.
        characters: rows by length, if the manifest has them.
    """

    name: str
    kind: str
    rows: RowCounts
    quarantined: dict[str, int]
    kept: dict[str, int]
    notes: dict[str, int]
    repairs: dict[str, int]
    cleaned: dict[str, int]
    masked: dict[str, int]
    sources: list[SourceFlow]
    near_duplicates: dict[str, int] | None
    contamination: dict[str, Any] | None
    characters: dict[str, list[int]] | None

    @property
    def count_errors(self) -> list[str]:
        """What doesn't add up, of the whole, of its reasons, and of its sources."""
        rows = self.rows
        errors = count_error("rows", rows.incoming, "came in", rows.outgoing, "went out")
        errors += count_error("rows", rows.quarantined, "quarantined", sum(self.quarantined.values()), "have a reason")
        if self.sources:
            for what in ("read", "kept"):
                parts = sum(getattr(source.rows, what) for source in self.sources)
                errors += count_error("rows", getattr(rows, what), what, parts, "counted by source")
        return errors + [error for source in self.sources for error in source.count_errors]


def corpus_flows(results: ResultSet) -> list[CorpusFlow]:
    """Of every corpus."""
    return [_corpus_flow(result) for result in results.of("corpus")]


def _corpus_flow(result: Result) -> CorpusFlow:
    counts = result.counts
    quarantined = dict(counts["quarantined"])
    total = quarantined.pop("total")
    kept = {split: counts["kept"][split] for split in ("train", "held_out")}
    cleaned = counts.get("cleaned", {})
    notes = {note: n for note, n in counts.get("notes", {}).items() if n}
    return CorpusFlow(
        name=result.name,
        kind=result.spec["kind"],
        rows=_rows(counts, total, sum(kept.values())),
        quarantined=_largest_first(quarantined),
        kept=kept,
        notes={note: n for note, n in notes.items() if not note.startswith(REPAIRED)},
        repairs={note.removeprefix(REPAIRED): n for note, n in notes.items() if note.startswith(REPAIRED)},
        cleaned={step: n for step, n in cleaned.items() if step not in PERSONAL_DATA},
        masked={kind: n for kind, n in cleaned.items() if kind in PERSONAL_DATA},
        sources=[
            SourceFlow(
                name=_origin(source),
                layouts=source.get("layouts", {}),
                ignored=_largest_first(source.get("ignored", {})),
                rows=_rows(source, source["quarantined"], source["kept"]),
            )
            for source in counts.get("sources", [])
        ],
        near_duplicates=counts.get("near_duplicates"),
        contamination=result.manifest.get("contamination"),
        characters=counts.get("characters"),
    )


def _rows(counts: dict[str, Any], quarantined: int, kept: int) -> RowCounts:
    return RowCounts(
        **{name: counts.get(name, 0) for name in ("read", "extra", "repeated", "joined")},
        quarantined=quarantined,
        dropped=_largest_first(counts["dropped"]),
        kept=kept,
    )


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    # Looked for and not found is worth knowing of duplicates only.
    return {reason: n for reason, n in Counter(counts).most_common() if n or reason == "duplicate"}


def _origin(source: dict[str, Any]) -> str:
    if hub := source.get("hub"):
        parts = [hub["path"], hub.get("name"), hub.get("split")]
        return clean("/".join(part for part in parts if part))
    files = source.get("files", [])
    return clean(files[0] + (f" and {len(files) - 1:,} more files" if len(files) > 1 else "")) if files else "–"
