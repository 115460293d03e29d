"""The counts in the corpus manifest: rows read, dropped and written, in all and by source, and notes on them."""

from collections import Counter
from typing import Any

import numpy as np

from snaketune.config.corpus_sources import Source
from snaketune.corpus.decisions import REASONS, Decisions
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.selecting.scanned_parts import ScannedParts
from snaketune.stages.specs import CorpusSpec


def counts_of(parts: ScannedParts, spec: CorpusSpec, quarantine: Quarantine, decisions: Decisions) -> dict[str, Any]:
    """Return all counts of the manifest: in all, by source, and a histogram of the lengths of the rows written."""
    used = _used_origins(parts, decisions.copies)
    by_source = [
        _of_source(parts, number, rows, decisions, used[number]) for number, rows in enumerate(parts.rows_of_sources)
    ]
    dropped: Counter[str] = Counter()
    for source in by_source:
        dropped.update(source["dropped"])
    copies, held_out = decisions.copies, decisions.held_out
    return {
        **{name: sum(source[name] for source in by_source) for name in ("read", "extra", "joined", "repeated")},
        "quarantined": {"total": quarantine.reasons.total(), **quarantine.reasons},
        "dropped": dict(dropped),
        "kept": {"train": int(copies[~held_out].sum()), "held_out": int(copies[held_out].sum())},
        "sources": [_origin(source) | source_counts for source, source_counts in zip(spec.sources, by_source)],
        "notes": _notes(parts, spec, copies > 0),
        "cleaned": dict(parts.cleaned),
        "characters": _histogram(parts, copies),
        **({} if decisions.group is None else {"near_duplicates": _groups(decisions.group)}),
    }


def _origin(source: Source) -> dict[str, Any]:
    if source.scores:
        return {"scores": source.scores}
    return {"hub": source.hub.model_dump(mode="json")} if source.hub else {"files": list(source.files)}


def _used_origins(parts: ScannedParts, weights: np.ndarray) -> np.ndarray:
    """By source and origin, the sum of the weights of their rows."""
    used = np.zeros((len(parts.sources), len(parts.origins)), np.int64)
    for part in parts:
        numbers = [parts.origins[layout, tuple(notes)] for layout, notes in part.facts["origins"]]
        origins, weights_of_part = part.column("origin"), weights[part.rows]
        for source, rows in part.rows_by_source:
            counted = np.bincount(origins[rows], weights_of_part[rows], len(numbers)).astype(np.int64)
            used[source, numbers] += counted
    return used


def _of_source(parts: ScannedParts, number: int, rows: slice, decisions: Decisions, used: np.ndarray) -> dict[str, Any]:
    source = parts.sources[number]
    dropped, copies = decisions.dropped[rows], decisions.copies[rows]
    by_reason = np.bincount(dropped, minlength=len(REASONS)).tolist()
    reasons = {reason: n for reason, n in zip(REASONS[1:], by_reason[1:]) if n or reason == "duplicate"}
    layouts: Counter[str] = Counter()
    for (layout, _), n in zip(parts.origins, used.tolist()):
        layouts[layout] += n
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


def _notes(parts: ScannedParts, spec: CorpusSpec, written: np.ndarray) -> dict[str, int]:
    """Count what happened to the rows written, and those whose prompt an earlier row has."""
    notes: Counter[str] = Counter()
    rows_by_origin = _used_origins(parts, written).sum(axis=0)
    for (_, origin_notes), rows in zip(parts.origins, rows_by_origin.tolist()):
        notes.update(dict.fromkeys(origin_notes, rows))
    if spec.kind == "conversations":
        for rows, hashes in parts.by_hash("prompt"):
            prompts = np.sort(hashes[written[rows]])
            notes["same_prompt"] += int((prompts[1:] == prompts[:-1]).sum())
    return {note: n for note, n in notes.items() if n}


def _histogram(parts: ScannedParts, copies: np.ndarray) -> dict[str, list[int]]:
    """Count rows by length: `rows[i]` rows have fewer than `bounds[i]` characters, and at least as many as the bound before."""
    rows = np.zeros(0, np.int64)
    for part in parts:
        counted = _by_digits(part.column("characters"), copies[part.rows])
        longest = max(len(rows), len(counted))
        rows = np.pad(rows, (0, longest - len(rows))) + np.pad(counted, (0, longest - len(counted)))
    return {"bounds": [2**k for k in range(len(rows))], "rows": rows.tolist()}


def _by_digits(characters: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Count rows by the binary digits of their length: a number below 2^k has k at most.

    >>> _by_digits(np.array([1, 2, 3, 9]), np.array([1, 1, 1, 1])).tolist()
    [0, 1, 2, 0, 1]
    """
    digits = np.frexp(characters.astype(np.float64))[1]
    return np.bincount(digits, copies).astype(np.int64)
