"""The corpus stage: raw rows from every source, cleaned, without duplicates, split by prompt.

    scan      raw → canonical → cleaned → spool on disk, and 24 bytes per row in memory
    decide    duplicates, near duplicates, contamination, caps, split and weights, over these bytes
    write     spool → train.arrow and held_out.arrow

The order of the rows is kept, so that a source spelled in another way but with the same rows gives the same files byte
for byte. Nothing vanishes: read + extra + repeated = joined + quarantined + dropped + kept. Memory doesn't grow
with the text, but with the number of rows: 600 MB for ten million. Short rows go through at 60,000 a second on one core
when nothing optional is asked for, at 18,000 when near duplicates are looked for.
"""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from snaketune.artifacts.manifest import Artifact
from snaketune.config.corpora import Source
from snaketune.corpus.decisions import Decisions, decide, near_duplicate_counts, summary
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.scan import Scan, SourceCounts, sources_with_files
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.selecting.contamination import Contamination, EvaluatedTexts, evaluated_corpus, evaluated_file
from snaketune.corpus.selecting.near_duplicates import Signatures
from snaketune.corpus.selecting.spool import Spool
from snaketune.corpus.writing import write_duplicates, write_rows
from snaketune.errors import SnaketuneError
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CorpusSpec
from snaketune.stages.work import WorkFolder

QUARANTINE = "quarantine.jsonl"
DUPLICATES = "duplicates.jsonl"
CONTAMINATION = "contamination.jsonl"


def build(
    spec: CorpusSpec, work: WorkFolder, *, files: list[Path], against: list[Artifact], against_files: list[Path]
) -> Outcome:
    """Fill the payload with train.arrow and held_out.arrow, and the records of what was left out.

    Args:
        files: the local files of all sources, in order.
        against: corpora whose held-out rows no row may hold an n-gram of, where `decontamination` is asked for.
        against_files: task data of which the same is true.
    Raises:
        SnaketuneError: a file that can't be read, too many malformed rows, or none that is left.
    """
    # An earlier attempt's.
    for name in (QUARANTINE, CONTAMINATION):
        (work.folder / name).unlink(missing_ok=True)
    with ExitStack() as stack:
        cleaner = Cleaner(spec.cleaning)
        quarantine = Quarantine(
            stack.enter_context((work.payload / QUARANTINE).open("w", encoding="utf-8")), mask=cleaner.mask
        )
        spool = stack.enter_context(Spool(work.state / "rows.arrow", spec.kind))
        texts = prompts = contamination = None
        if near := spec.near_duplicates:
            texts, prompts = (
                stack.enter_context(Signatures(work.state / name, threshold=near.threshold, shingle=near.shingle))
                for name in ("texts", "prompts")
            )
        if spec.decontamination:
            evaluated = _evaluated(against, against_files, spec.decontamination.ngram)
            contamination = stack.enter_context(
                Contamination(work.state, evaluated, n=spec.decontamination.ngram, own=0 < spec.held_out < 1)
            )
        scan = Scan(
            spec,
            spool=spool,
            quarantine=quarantine,
            cleaner=cleaner,
            texts=texts,
            prompts=prompts,
            contamination=contamination,
        )
        sources = [scan.read(source, paths) for source, paths in sources_with_files(spec, files)]
        scan.finish()
    found = sum(source.read + source.extra for source in sources)
    quarantine.judge(found, len(scan.hashes), spec.max_quarantined_fraction, work.folder / QUARANTINE)
    decisions = decide(spec, scan, sources, contamination_record=work.payload / CONTAMINATION)
    counts = _counts(spec, scan, sources, decisions, quarantine)
    if not sum(counts["kept"].values()):
        dropped = "".join(f"\n  {n} × {reason}" for reason, n in counts["dropped"].items() if n)
        raise SnaketuneError(
            f"none of the {found} rows is left; dropped:{dropped}\n{_put_aside(work)}Ask for less, or add rows"
        )
    hashes = np.frombuffer(scan.hashes, np.uint64)
    write_rows(spool, work.payload, hashes, decisions.times, decisions.held_out)
    if decisions.group is not None:
        counts["near_duplicates"] = near_duplicate_counts(decisions.group)
        write_duplicates(spool, work.payload / DUPLICATES, hashes, decisions.group)
    about = {}
    if spec.decontamination:
        about["contamination"] = {"ngram": spec.decontamination.ngram, "hits": decisions.evaluations}
    return Outcome(
        counts=counts,
        about=about,
        records=(
            QUARANTINE,
            *((DUPLICATES,) if spec.near_duplicates else ()),
            *((CONTAMINATION,) if spec.decontamination else ()),
        ),
    )


def _put_aside(work: WorkFolder) -> str:
    """Move the records that hold anything out of the payload, which the next attempt empties; say where they are."""
    said = ""
    for name in (QUARANTINE, CONTAMINATION):
        record = work.payload / name
        if record.is_file() and record.stat().st_size:
            said += f"See {record.replace(work.folder / name)}\n"
    return said


def _evaluated(corpora: list[Artifact], files: list[Path], n: int) -> list[EvaluatedTexts]:
    """What no row may share an n-gram with; files by folder and name, since tasks call theirs alike."""
    return [
        *(EvaluatedTexts(corpus.manifest_path.parent.name, evaluated_corpus(corpus), n) for corpus in corpora),
        *(EvaluatedTexts(f"{path.parent.name}/{path.name}", evaluated_file(path), n) for path in files),
    ]


def _counts(
    spec: CorpusSpec, scan: Scan, sources: list[SourceCounts], decisions: Decisions, quarantine: Quarantine
) -> dict[str, Any]:
    by_source = [summary(decisions, scan, source) for source in sources]
    dropped: Counter[str] = Counter()
    for source in by_source:
        dropped.update(source["dropped"])
    times, held_out = decisions.times, decisions.held_out
    return {
        **{name: sum(source[name] for source in by_source) for name in ("read", "extra", "joined", "repeated")},
        "quarantined": {"total": quarantine.reasons.total(), **quarantine.reasons},
        "dropped": dict(dropped),
        "kept": {"train": int(times[~held_out].sum()), "held_out": int(times[held_out].sum())},
        "sources": [_origin(source) | found for source, found in zip(spec.sources, by_source)],
        "notes": _notes(spec, scan, times > 0),
        "cleaned": {step: n for step, n in scan.cleaner.counts.items() if n},
        "characters": _histogram(np.frombuffer(scan.characters, np.uint32), times),
    }


def _notes(spec: CorpusSpec, scan: Scan, kept: np.ndarray) -> dict[str, int]:
    """What happened to kept rows on the way, and how many of them have a prompt that another has before them."""
    notes: Counter[str] = Counter()
    rows_by_origin = np.bincount(np.frombuffer(scan.origins, np.uint32)[kept], minlength=len(scan.known_origins))
    for (_, found), rows in zip(scan.known_origins, rows_by_origin.tolist()):
        notes.update(dict.fromkeys(found, rows))
    if spec.kind == "conversations":
        prompts = np.sort(np.frombuffer(scan.drawn, np.uint64)[kept])
        notes["same_prompt"] = int((prompts[1:] == prompts[:-1]).sum())
    return {note: n for note, n in notes.items() if n}


def _histogram(characters: np.ndarray, times: np.ndarray) -> dict[str, list[int]]:
    """Rows kept, by length: `rows[i]` of them have fewer characters than `bounds[i]`, and no fewer than the bound before.

    >>> _histogram(np.array([1, 2, 3, 9]), np.array([1, 1, 1, 1]))
    {'bounds': [1, 2, 4, 8, 16], 'rows': [0, 1, 2, 0, 1]}
    """
    # A number below 2^k has k binary digits at most.
    digits = np.frexp(characters.astype(np.float64))[1]
    rows = np.bincount(digits, times).astype(np.int64).tolist()
    return {"bounds": [2**k for k in range(len(rows))], "rows": rows}


def _origin(source: Source) -> dict[str, Any]:
    return {"hub": source.hub.model_dump(mode="json")} if source.hub else {"files": list(source.files)}
