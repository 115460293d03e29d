"""Lines for a config: an entry of `corpora:` that reads a file as the preview did.

What the user has to decide (rows to drop, repairs) is in it as comments.
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
# The limit of a corpus whose config doesn't set one.
MAX_QUARANTINED = CorpusContent.model_fields["max_quarantined_fraction"].default


def entry(file: str, source: Source, reading: Reading, rows_read: int, repairs: dict[str, int], repaired: int) -> str:
    """Return the lines of the entry.

    Args:
        rows_read: number of raw rows read.
        repairs: repairs that help, with the number of rows that each changes.
        repaired: number of rows that could be read with these repairs, in addition.
    """
    source_keys = source.model_dump(mode="json", exclude_defaults=True)
    if reading.frame:
        source_keys |= {"frame": reading.frame.model_dump(exclude_defaults=True)}
    if reading.in_question:
        stated = {"layout": next(iter(reading.layouts))} if len(reading.layouts) == 1 else {}
        source_keys |= stated | {"ignore": [*source.ignore, *reading.in_question]}
    corpora = {name_for(file): {"kind": reading.kind, "sources": [source_keys]}}
    lines = yaml.safe_dump(
        {"corpora": corpora}, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000
    ).splitlines()
    for where, count in conditions(reading):
        lines.append(f"      # where: {where}   # drops {count:,} of the {rows_read:,} sampled rows")
    if repaired:
        steps = ", ".join(repairs)
        lines.append(f"    # repair: [{steps}]   # fixes {repaired:,} of the {rows_read:,} sampled rows")
    share = reading.quarantined.total() / max(1, rows_read)
    if share > MAX_QUARANTINED:
        lines.append(
            f"    # max_quarantined_fraction: {min(1.0, round(1.5 * share + 0.005, 2))}   # {share:.1%} of the sampled rows "
            f"can't be read, and more than {MAX_QUARANTINED:.0%} makes the corpus stage fail"
        )
    return "\n".join(lines)


def name_for(file: str) -> str:
    """Return the file's name as a valid name of a corpus.

    >>> name_for("data/Täglich Fragen.jsonl.gz")
    'T-glich-Fragen'
    """
    return NO_NAME.sub("-", DATA_SUFFIXES.sub("", Path(file).name)).strip("-._")[:80] or "corpus"


def conditions(reading: Reading) -> list[tuple[str, int]]:
    """Return conditions for `where` that drop rows marked as bad, and how many each drops, most first."""
    return [(mark.replace(": ", " != ", 1), count) for mark, count in reading.marked.most_common()]
