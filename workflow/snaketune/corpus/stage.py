"""The corpus stage: raw rows from every source, checked, without duplicates, split by prompt.

Reads each source once, in order, and keeps that order, so that a source spelled in another way but with the same rows
gives the same files byte for byte. Nothing vanishes: each row read is kept, a duplicate, or quarantined with its file,
place and reason. Some 25,000 rows a second on one core; all kept rows are in memory until they are written, about 2 KB
each besides the text.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.tables import write_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.corpora import Corpus, Source
from snaketune.corpus.layouts import canonical
from snaketune.corpus.rows import Malformed, Row, excerpt, row_id, to_table
from snaketune.corpus.sources import RawRow, hub_name, read_file, read_hub
from snaketune.corpus.splits import is_held_out, split_key
from snaketune.errors import SnaketuneError
from snaketune.progress import progress

QUARANTINE = "quarantine.jsonl"
QUARANTINED_ROWS_SHOWN = 10
COMMONEST_REASONS_SHOWN = 3


@dataclass
class Quarantine:
    """Where bad rows go: into the file, and what of them a message needs."""

    file: TextIO
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def add(self, source: str, raw: RawRow, error: Malformed) -> None:
        found = error.excerpt if isinstance(raw.found, Malformed) else excerpt(raw.found)
        record = {
            "file": source,
            raw.unit: raw.number,
            "reason": error.reason,
            "detail": error.detail,
            "excerpt": found,
        }
        line = json.dumps(record, ensure_ascii=False)
        self.file.write(line + "\n")
        self.reasons[error.reason] += 1
        place = f"{source}:{raw.number}" if raw.unit == "line" else f"{source}, row {raw.number}"
        self.examples.setdefault(error.reason, f"{place}: {error.detail}")
        if len(self.first) < QUARANTINED_ROWS_SHOWN:
            self.first.append(line)


def build(spec: Corpus, work: WorkFolder, *, files: list[Path]) -> Outcome:
    """Fill the payload with train.arrow, held_out.arrow and quarantine.jsonl.

    Args:
        files: the local files of all sources, in order.
    Raises:
        SnaketuneError: a file that can't be read, too many malformed rows, or none that is sound.
    """
    splits: dict[str, list[tuple[str, Row]]] = {"train": [], "held_out": []}
    seen_ids: set[str] = set()
    seen_prompts: set[str] = set()
    notes: Counter[str] = Counter()
    per_source = []
    # Half characters, which only damaged rows hold, are written as the escapes that JSON has for them.
    with (work.payload / QUARANTINE).open("w", encoding="utf-8", errors="backslashreplace") as file:
        quarantine = Quarantine(file)
        for source, rows in _sources(spec, files):
            counts = {"read": 0, "quarantined": 0, "duplicate": 0, "kept": 0}
            layouts: Counter[str] = Counter()
            for name, raw in rows:
                counts["read"] += 1
                try:
                    layout, row, id_ = _sound_row(spec, source, raw)
                except Malformed as error:
                    quarantine.add(name, raw, error)
                    counts["quarantined"] += 1
                    continue
                if id_ in seen_ids:
                    counts["duplicate"] += 1
                    continue
                seen_ids.add(id_)
                key = split_key(row.opening)
                if spec.kind == "conversations" and key in seen_prompts:
                    notes["same_prompt"] += 1
                seen_prompts.add(key)
                notes.update(row.notes)
                split = "held_out" if is_held_out(key, seed=spec.split_seed, share=spec.held_out) else "train"
                splits[split].append((id_, row))
                counts["kept"] += 1
                layouts[layout] += 1
            per_source.append(_origin(source) | counts | {"layouts": dict(layouts)})
    read = sum(source["read"] for source in per_source)
    _judge(spec, quarantine, read, seen_ids)
    for split, kept in splits.items():
        write_table(work.payload / f"{split}.arrow", to_table(spec.kind, kept))
    return Outcome(
        counts={
            "read": read,
            "quarantined": {"total": quarantine.reasons.total(), **quarantine.reasons},
            "dropped": {"duplicate": sum(source["duplicate"] for source in per_source)},
            "kept": {split: len(kept) for split, kept in splits.items()},
            "sources": per_source,
            "notes": dict(notes),
        },
        records=(QUARANTINE,),
        libraries=("pyarrow", "datasets") if any(source.hub for source in spec.sources) else ("pyarrow",),
    )


def _sources(spec: Corpus, files: list[Path]) -> Iterator[tuple[Source, Iterator[tuple[str, RawRow]]]]:
    """Each source with its rows, each row with the name that its file has in the config."""
    expected = sum(len(source.files) for source in spec.sources)
    if len(files) != expected:
        raise SnaketuneError(f"the corpus names {expected} files, --files gives {len(files)}; give the same, in order")
    paths = iter(files)
    for source in spec.sources:
        yield source, _rows(source, [next(paths) for _ in source.files])


def _rows(source: Source, paths: list[Path]) -> Iterator[tuple[str, RawRow]]:
    if source.hub:
        name = hub_name(source.hub)
        yield from ((name, row) for row in progress(read_hub(source.hub), name, "rows"))
    for name, path in zip(source.files, paths):
        yield from ((name, row) for row in progress(read_file(path, name), name, "rows"))


def _sound_row(spec: Corpus, source: Source, raw: RawRow) -> tuple[str, Row, str]:
    """Layout, canonical row and id; Malformed if there is none."""
    if isinstance(raw.found, Malformed):
        raise raw.found
    layout, row = canonical(raw.found, kind=spec.kind, layout=source.layout, fields=source.fields)
    if row.answer is None and spec.answer_pattern:
        match = re.search(spec.answer_pattern, row.reply)
        row.answer = ((match and match[1]) or "").strip() or None
        if row.answer is None:
            row.notes += ("no_answer",)
    return layout, row, row_id(row)


def _origin(source: Source) -> dict[str, Any]:
    return {"hub": source.hub.model_dump(mode="json")} if source.hub else {"files": list(source.files)}


def _judge(spec: Corpus, quarantine: Quarantine, read: int, kept: set[str]) -> None:
    """End the stage if too much was thrown away."""
    bad = quarantine.reasons.total()
    if kept and bad / read <= spec.max_quarantined_fraction:
        return
    # The payload, and the quarantine with it, is gone when the stage fails; the log stays.
    encoding = sys.stdout.encoding or "utf-8"
    for line in quarantine.first:
        print(f"quarantined: {line}".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
    reasons = "".join(
        f"\n  {count} × {reason}, for instance {quarantine.examples[reason]}"
        for reason, count in quarantine.reasons.most_common(COMMONEST_REASONS_SHOWN)
    )
    if not kept:
        raise SnaketuneError(
            f"none of the {read} rows can be used:{reasons}\nCheck `layout` and `fields` of the source"
        )
    raise SnaketuneError(
        f"{bad} of {read} rows ({bad / read:.2%}) are malformed, more than the {spec.max_quarantined_fraction:.2%} "
        f"allowed:{reasons}\nFix these rows, or raise corpora.<name>.max_quarantined_fraction"
    )
