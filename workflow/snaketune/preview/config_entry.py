"""Lines for a config: an entry of `corpora:` that reads a file as the preview did.

What the user has to decide (which rows to leave out, what to mend) stands in it as a comment.
"""

import re
from pathlib import Path

import yaml

from snaketune.config.corpus_sources import CorpusContent, Source
from snaketune.preview.reading import Reading

NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
DATA_SUFFIXES = re.compile(
    r"(\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md|gz|xz|zst|zip|tar|tgz|txz))+$", re.IGNORECASE
)
# What a corpus may quarantine where its config doesn't say it.
MAX_QUARANTINED = CorpusContent.model_fields["max_quarantined_fraction"].default


def entry(file: str, source: Source, reading: Reading, rows_read: int, repairs: dict[str, int], repaired: int) -> str:
    """
    Args:
        looked_at: rows that were looked at.
        repairs: what would mend some of those that can't be read.
        repaired: how many more could be read then.
    """
    own = source.model_dump(mode="json", exclude_defaults=True)
    corpora = {name_for(file): {"kind": reading.kind, "sources": [own]}}
    lines = yaml.safe_dump(
        {"corpora": corpora}, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000
    ).splitlines()
    for where, count in conditions(reading):
        lines.append(f"      # where: {where}   # leaves out {count:,} of the {rows_read:,} rows looked at")
    if repaired:
        steps = ", ".join(repairs)
        lines.append(f"    # repair: [{steps}]   # mends {repaired:,} of the {rows_read:,} rows looked at")
    share = reading.quarantined.total() / max(1, rows_read)
    if share > MAX_QUARANTINED:
        lines.append(
            f"    # max_quarantined_fraction: {min(1.0, round(1.5 * share + 0.005, 2))}   # {share:.1%} of the rows looked at "
            f"can't be read, and more than {MAX_QUARANTINED:.0%} ends the corpus stage"
        )
    return "\n".join(lines)


def name_for(file: str) -> str:
    """The file's name as a corpus can have it.

    >>> name_for("data/Täglich Fragen.jsonl.gz")
    'T-glich-Fragen'
    """
    return NO_NAME.sub("-", DATA_SUFFIXES.sub("", Path(file).name)).strip("-._")[:80] or "corpus"


def conditions(reading: Reading) -> list[tuple[str, int]]:
    """For `where`, what leaves out rows that a column marks as bad ones, and how many, most first."""
    found = []
    for mark, count in reading.marked.most_common():
        column, _, value = mark.partition(": ")
        found.append((f"{column} != {value}", count))
    return found
