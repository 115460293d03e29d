"""The row counts of a corpus (read + extra + repeated = joined + quarantined + dropped + kept), and those of its tokenized
rows, from manifests."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

from snaketune.config.corpora import PersonalData
from snaketune.publishing.results import Result
from snaketune.report.data.results import ResultSet, by_whole
from snaketune.text import NOTHING, clean

SPLITS = ("train", "held_out")
REPAIRED = "repaired_"
PERSONAL_DATA = get_args(PersonalData)


@dataclass(frozen=True, kw_only=True)
class CorpusFlow:
    """One corpus. Its counts are described in `corpus.counts`."""

    result: Result

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def counts(self) -> dict[str, Any]:
        return self.result.counts

    @property
    def quarantined(self) -> dict[str, int]:
        return largest_first({reason: n for reason, n in self.counts["quarantined"].items() if reason != "total"})

    @property
    def dropped(self) -> dict[str, int]:
        return largest_first(self.counts["dropped"])

    @property
    def over_cap(self) -> int:
        """Rows that `max_rows` left out, which nothing is wrong with."""
        return self.counts["dropped"].get("over_cap", 0)

    @property
    def within_cap(self) -> int:
        """Rows that the bar shows."""
        return self.counts["read"] + self.counts["extra"] + self.counts["repeated"] - self.over_cap

    @property
    def changes(self) -> dict[str, dict[str, int]]:
        """By reason, the number of rows that were `noted`, `repaired` and `cleaned`, and of items of personal data that were
        `masked`."""
        cleaned = self.counts["cleaned"]
        notes = {note: n for note, n in self.counts["notes"].items() if n}
        return {
            "noted": {note: n for note, n in notes.items() if not note.startswith(REPAIRED)},
            "repaired": {note.removeprefix(REPAIRED): n for note, n in notes.items() if note.startswith(REPAIRED)},
            "cleaned": {step: n for step, n in cleaned.items() if step not in PERSONAL_DATA},
            "masked": {kind: n for kind, n in cleaned.items() if kind in PERSONAL_DATA},
        }

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The counts of each source, with its `name`, and the largest first of `ignored` and `dropped`."""
        return [
            source | {"name": _origin(source)} | {what: largest_first(source[what]) for what in ("ignored", "dropped")}
            for source in self.counts["sources"]
        ]


def corpus_flows(results: ResultSet) -> list[CorpusFlow]:
    return [CorpusFlow(result=result) for result in results.of("corpus")]


def largest_first(counts: dict[str, int]) -> dict[str, int]:
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
    """All parts of one tokenized corpus."""

    name: str
    parts: list[Result]

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """Sums over the parts, by split."""
        sums: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        for part in self.parts:
            for split in SPLITS:
                sums[split].update(part.counts[split])
        return sums

    @property
    def paths(self) -> Counter[tuple[str, str]]:
        """Number of parts by code path and reason, `("fast", "")` or `("reference", "the template ...")`."""
        return Counter((part.manifest["path"], part.manifest["why"]) for part in self.parts)

    def of_runs(self, count: str) -> int:
        """The sum of a count of run.json."""
        return sum(part.run.get(count, 0) for part in self.parts)


def tokenized_corpora(results: ResultSet) -> list[Tokenized]:
    return [Tokenized(name=name, parts=parts) for (_, name), parts in by_whole(results.of("tokenize")).items()]
