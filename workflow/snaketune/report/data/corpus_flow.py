"""The row counts of a corpus (read + extra + repeated = joined + quarantined + dropped + kept), and those of its tokenized
rows, from manifests."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

from snaketune.config.corpus_sources import PersonalData
from snaketune.publishing.results import Result
from snaketune.report.data.results import ResultSet, by_whole
from snaketune.report.text import NOTHING, clean

SPLITS = ("train", "held_out")
TOKEN_COUNTS = ("rows", "tokens", "supervised_tokens", "control_text", "nothing_supervised")

REPAIRED = "repaired_"
PERSONAL_DATA = get_args(PersonalData)


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Row counts of a corpus or of one of its sources.

    Attributes:
        extra: Rows made from a raw row besides its first.
        repeated: Copies made for a weight above 1.
        joined: Raw rows that became part of another row, such as the messages of a tree.
    """

    read: int
    extra: int
    repeated: int
    joined: int
    quarantined: int
    dropped: dict[str, int]
    kept: int

    @property
    def over_cap(self) -> int:
        """Rows that `max_rows` left out, which nothing is wrong with."""
        return self.dropped.get("over_cap", 0)

    @property
    def within_cap(self) -> int:
        return self.joined + self.quarantined + sum(self.dropped.values()) + self.kept - self.over_cap


@dataclass(frozen=True, kw_only=True)
class SourceFlow:
    """Rows of one source. `ignored` has the columns and keys that weren't read, and the number of rows that have them."""

    name: str
    layouts: dict[str, int]
    ignored: dict[str, int]
    rows: RowCounts


@dataclass(frozen=True, kw_only=True)
class CorpusFlow:
    """Rows of one corpus.

    Attributes:
        changes: By reason, the number of rows that were `noted`, `repaired` and `cleaned`, and of items of personal data that
            were `masked`.
        near_duplicates, contamination: Results of these checks; None if they were off.
        characters: Rows by length, if the manifest has them.
    """

    name: str
    kind: str
    rows: RowCounts
    quarantined: dict[str, int]
    kept: dict[str, int]
    changes: dict[str, dict[str, int]]
    sources: list[SourceFlow]
    near_duplicates: dict[str, int] | None
    contamination: dict[str, Any] | None
    characters: dict[str, list[int]] | None


def corpus_flows(results: ResultSet) -> list[CorpusFlow]:
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
        changes={
            "noted": {note: n for note, n in notes.items() if not note.startswith(REPAIRED)},
            "repaired": {note.removeprefix(REPAIRED): n for note, n in notes.items() if note.startswith(REPAIRED)},
            "cleaned": {step: n for step, n in cleaned.items() if step not in PERSONAL_DATA},
            "masked": {kind: n for kind, n in cleaned.items() if kind in PERSONAL_DATA},
        },
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
    flows = {name: counts.get(name, 0) for name in ("read", "extra", "repeated", "joined")}
    return RowCounts(**flows, quarantined=quarantined, dropped=_largest_first(counts["dropped"]), kept=kept)


def _largest_first(counts: dict[str, int]) -> dict[str, int]:
    # A count of zero is informative for duplicates only: it says that they were looked for.
    return {reason: n for reason, n in Counter(counts).most_common() if n or reason == "duplicate"}


def _origin(source: dict[str, Any]) -> str:
    if hub := source.get("hub"):
        return clean("/".join(part for part in (hub["path"], hub.get("name"), hub.get("split")) if part))
    if scores := source.get("scores"):
        return f"scored responses: {clean(scores)}"
    first, *more = source.get("files") or [NOTHING]
    return clean(first + (f" and {len(more):,} more files" if more else ""))


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


def merge_parts(name: str, parts: list[Result]) -> Tokenized:
    counts: dict[str, Counter[str]] = {split: Counter(dict.fromkeys(TOKEN_COUNTS, 0)) for split in SPLITS}
    for part in parts:
        for split in SPLITS:
            counts[split].update({count: part.counts[split][count] for count in TOKEN_COUNTS})
    spec, manifests = parts[0].spec, [part.manifest for part in parts]
    return Tokenized(
        name=name,
        kind=spec["kind"],
        train_on=manifests[0]["train_on"],
        counts=counts,
        paths=dict(Counter((manifest["path"], manifest["why"]) for manifest in manifests)),
        parity_rows=sum(part.run.get("parity_rows", 0) for part in parts),
        rows_by_reference=sum(part.run.get("rows_by_reference", 0) for part in parts),
        parts=len(parts),
    )


def tokenized_corpora(results: ResultSet) -> list[tuple[Tokenized, list[Result]]]:
    return [(merge_parts(name, parts), parts) for (_, name), parts in by_whole(results.of("tokenize")).items()]
