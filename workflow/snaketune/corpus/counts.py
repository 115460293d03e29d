"""The counts in the corpus manifest: rows read, dropped and written, in all and by source, and notes on them."""

from collections import Counter
from typing import Any

import numpy as np

from snaketune.config.corpus_sources import Source
from snaketune.corpus.decisions import REASONS, Decisions
from snaketune.corpus.first_pass import Scan, SourceCounts


def counts_of(scan: Scan, sources: list[SourceCounts], decisions: Decisions) -> dict[str, Any]:
    """Return all counts of the manifest: in all, by source, and a histogram of the lengths of the rows written."""
    by_source = [_of_source(decisions, scan, source) for source in sources]
    dropped: Counter[str] = Counter()
    for source in by_source:
        dropped.update(source["dropped"])
    copies, held_out = decisions.copies, decisions.held_out
    return {
        **{name: sum(source[name] for source in by_source) for name in ("read", "extra", "joined", "repeated")},
        "quarantined": {"total": scan.quarantine.reasons.total(), **scan.quarantine.reasons},
        "dropped": dict(dropped),
        "kept": {"train": int(copies[~held_out].sum()), "held_out": int(copies[held_out].sum())},
        "sources": [_origin(source) | source_counts for source, source_counts in zip(scan.spec.sources, by_source)],
        "notes": _notes(scan, copies > 0),
        "cleaned": {step: n for step, n in scan.cleaner.counts.items() if n},
        "characters": _histogram(np.asarray(scan.characters), copies),
        **({} if decisions.group is None else {"near_duplicates": _groups(decisions.group)}),
    }


def _origin(source: Source) -> dict[str, Any]:
    if source.scores:
        return {"scores": source.scores}
    return {"hub": source.hub.model_dump(mode="json")} if source.hub else {"files": list(source.files)}


def _of_source(decisions: Decisions, scan: Scan, source: SourceCounts) -> dict[str, Any]:
    rows = source.rows
    dropped, copies = decisions.dropped[rows], decisions.copies[rows]
    by_reason = np.bincount(dropped, minlength=len(REASONS)).tolist()
    reasons = {reason: n for reason, n in zip(REASONS[1:], by_reason[1:]) if n or reason == "duplicate"}
    used = np.bincount(np.asarray(scan.origins)[rows], copies, len(scan.known_origins))
    layouts: Counter[str] = Counter()
    for (layout, _), n in zip(scan.known_origins, used.tolist()):
        layouts[layout] += int(n)
    return {
        "read": source.read,
        "extra": source.extra,
        "joined": source.joined,
        "quarantined": source.quarantined,
        "dropped": reasons | source.dropped,
        "repeated": int((copies - (copies > 0)).sum()),
        "kept": int(copies.sum()),
        "layouts": dict(+layouts),
        "ignored": dict(source.ignored),
        "marked": dict(source.marked),
    }


def _groups(group: np.ndarray) -> dict[str, int]:
    """Count the groups of at least two rows, and the rows of the largest."""
    sizes = np.bincount(group)
    sizes = sizes[sizes > 1]
    return {"groups": len(sizes), "largest": int(sizes.max(initial=0))}


def _notes(scan: Scan, written: np.ndarray) -> dict[str, int]:
    """Count what happened to the rows written, and those whose prompt an earlier row has."""
    notes: Counter[str] = Counter()
    rows_by_origin = np.bincount(np.asarray(scan.origins)[written], minlength=len(scan.known_origins))
    for (_, origin_notes), rows in zip(scan.known_origins, rows_by_origin.tolist()):
        notes.update(dict.fromkeys(origin_notes, rows))
    if scan.spec.kind == "conversations":
        prompts = np.sort(np.asarray(scan.prompt_hashes)[written])
        notes["same_prompt"] = int((prompts[1:] == prompts[:-1]).sum())
    return {note: n for note, n in notes.items() if n}


def _histogram(characters: np.ndarray, copies: np.ndarray) -> dict[str, list[int]]:
    """Count rows by length: `rows[i]` rows have fewer than `bounds[i]` characters, and at least as many as the bound before.

    >>> _histogram(np.array([1, 2, 3, 9]), np.array([1, 1, 1, 1]))
    {'bounds': [1, 2, 4, 8, 16], 'rows': [0, 1, 2, 0, 1]}
    """
    # A number below 2^k has k binary digits at most.
    digits = np.frexp(characters.astype(np.float64))[1]
    rows = np.bincount(digits, copies).astype(np.int64).tolist()
    return {"bounds": [2**k for k in range(len(rows))], "rows": rows}
