"""A corpus read in parts, through the stages that a run of the workflow has: read, decide, filter, corpus."""

from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.corpora import Corpus
from snaketune.corpus import assembly, decide, filter, read
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.corpus_parts import CorpusPart, cut
from snaketune.stages.specs import CorpusSpec, DecideSpec, FilterSpec, ReadSpec

Built = tuple[dict[str, str], Outcome]


def digests(folder: Path) -> dict[str, str]:
    return {name: entry["digest"] for name, entry in describe_files(folder).items()}


def built_whole(spec: dict[str, Any], folder: Path) -> Built:
    """The digests of a corpus' files, made in one job, and its outcome."""
    work, parsed = _work(folder / "whole"), CorpusSpec(**spec)
    outcome = assembly.build(parsed, work, files=_files(parsed.sources), against=[], against_files=[])
    return digests(work.payload), outcome


def read_part(spec: dict[str, Any], part: CorpusPart, folder: Path) -> Artifact:
    of_part = ReadSpec(**CorpusSpec(**spec).reading(part.sources), ranges=part.ranges)
    # As a job file has it.
    of_part = ReadSpec.model_validate_json(of_part.model_dump_json())
    work = _work(folder)
    inputs = {"files": _files(of_part.sources), "against": [], "against_files": [], "selected": []}
    return _artifact(work, read.build(of_part, work, **inputs))


def built_in_parts(spec: dict[str, Any], parts: int, folder: Path) -> Built:
    """The same of parts."""
    planned, parsed = cut(Corpus(**spec, parts=parts)), CorpusSpec(**spec)
    reads = [read_part(spec, part, folder / f"read{number}") for number, part in enumerate(planned)]
    numbers = tuple(part.numbers for part in planned)
    work = _work(folder / "decide")
    of_decide = DecideSpec(**spec, sources_of_parts=numbers)
    decided, filtered = _artifact(work, decide.build(of_decide, work, read=reads)), []
    for number in range(1, len(planned) + 1):
        work = _work(folder / f"filter{number}")
        of_part = FilterSpec(part=number, parts=len(planned))
        filtered.append(_artifact(work, filter.build(of_part, work, decided=decided, read=reads)))
    work = _work(folder / "corpus")
    outcome = assembly.build(parsed, work, files=[], against=[], against_files=[], decided=[decided], filtered=filtered)
    return digests(work.payload), outcome


def _files(sources: tuple[Any, ...]) -> list[Path]:
    return [Path(file) for source in sources for file in source.files]


def _work(folder: Path) -> WorkFolder:
    work = WorkFolder(folder)
    work.start()
    return work


def _artifact(work: WorkFolder, outcome: Outcome) -> Artifact:
    described = describe_files(work.payload)
    records = {name: described.pop(name) for name in outcome.records}
    manifest = {"payload": described, "records": records}
    return Artifact(work.folder / "manifest.json", manifest, work.payload).as_input(())
