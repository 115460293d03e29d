"""What the `corpus` stage makes: raw rows from every source, cleaned, without duplicates, split by prompt.

    scan      raw → canonical → cleaned → spool on disk, and 24 bytes per row in memory
    decide    duplicates, near duplicates, contamination, caps, split and weights, over these bytes
    write     spool → train.arrow and held_out.arrow

The order of the rows is kept, so that a source spelled in another way but with the same rows gives the same files byte
for byte. Nothing vanishes: read + extra + repeated = joined + quarantined + dropped + kept. Memory doesn't grow
with the text, but with the number of rows: 600 MB for ten million. Short rows go through at 60,000 a second on one core
when nothing optional is asked for, at 18,000 when near duplicates are looked for.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from snaketune.artifacts.manifest import Artifact
from snaketune.config.corpus_sources import Source
from snaketune.corpus.counts import counts_of
from snaketune.corpus.decisions import decide
from snaketune.corpus.first_pass import Scan
from snaketune.corpus.last_pass import write_duplicates, write_rows
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.rows import SCHEMAS
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.selecting.contamination import Contamination
from snaketune.corpus.selecting.evaluation_ngrams import load_evaluations
from snaketune.corpus.selecting.near_duplicates import NearDuplicates
from snaketune.corpus.selecting.spool import Spool
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CorpusSpec

QUARANTINE = "quarantine.jsonl"
DUPLICATES = "duplicates.jsonl"
CONTAMINATION = "contamination.jsonl"


def assemble(
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
        near_duplicates = contamination = None
        if near := spec.near_duplicates:
            near_duplicates = stack.enter_context(
                NearDuplicates(work.state, threshold=near.threshold, shingle=near.shingle)
            )
        if spec.decontamination:
            evaluations = load_evaluations(against, against_files, spec.decontamination.ngram)
            contamination = stack.enter_context(
                Contamination(work.state, evaluations, n=spec.decontamination.ngram, own_held_out=0 < spec.held_out < 1)
            )
        scan = Scan(
            spec,
            spool=spool,
            quarantine=quarantine,
            cleaner=cleaner,
            near_duplicates=near_duplicates,
            contamination=contamination,
        )
        sources = [scan.read(source, paths) for source, paths in _with_files(spec, files)]
        scan.finish()
    total_rows = sum(source.read + source.extra for source in sources)
    quarantine.check_limit(total_rows, len(scan.hashes), spec.max_quarantined_fraction, work.folder / QUARANTINE)
    decisions = decide(spec, scan, sources, contamination_record=work.payload / CONTAMINATION)
    counts = counts_of(spec, scan, sources, decisions, quarantine)
    if not sum(counts["kept"].values()):
        dropped = "".join(f"\n  {n} × {reason}" for reason, n in counts["dropped"].items() if n)
        raise SnaketuneError(
            f"none of the {total_rows} rows is left; dropped:{dropped}\n{_save_records(work)}Ask for less, or add rows"
        )
    hashes = np.frombuffer(scan.hashes, np.uint64)
    rows_of = [source.rows.stop - source.rows.start for source in sources]
    from_source = np.repeat(np.arange(len(sources), dtype=np.int16), rows_of)
    write_rows(spool, work.payload, SCHEMAS[spec.kind], hashes, from_source, decisions.copies, decisions.held_out)
    if decisions.group is not None:
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


def _save_records(work: WorkFolder) -> str:
    """Move the records that hold anything out of the payload, which the next attempt empties; say where they are."""
    message = ""
    for name in (QUARANTINE, CONTAMINATION):
        record = work.payload / name
        if record.is_file() and record.stat().st_size:
            message += f"See {record.replace(work.folder / name)}\n"
    return message


def _with_files(spec: CorpusSpec, files: list[Path]) -> Iterator[tuple[Source, list[Path]]]:
    """Each source with its files.

    Raises:
        SnaketuneError: not as many files as the sources name.
    """
    expected = sum(len(source.files) for source in spec.sources)
    if len(files) != expected:
        raise SnaketuneError(f"the corpus names {expected} files, --files gives {len(files)}; give the same, in order")
    paths = iter(files)
    for source in spec.sources:
        yield source, [next(paths) for _ in source.files]
