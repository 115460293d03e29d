"""`python -m snaketune verify`: print the checks of finished trainings; compare the checked files with their digests."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, read_json
from snaketune.diagnostics.verified import as_text, checks_in
from snaketune.errors import SnaketuneError
from snaketune.stages.job import result_at
from snaketune.stages.job_files import job_file_of, read_job_file

# Inputs of the checks whose files aren't read again: a corpus may take hours.
DATA = {"corpus", "prompted", "pack", "evaluated"}


def print_verified(manifests: Iterable[Path]) -> int:
    """Print the checks of each training, the time that they took, and files that have changed since; return the exit status, 1
    if a check failed or a file changed."""
    failed, intact = 0, set[Path]()
    for manifest in manifests:
        result = result_at(manifest)
        checks = checks_in(result)
        seconds = read_json(manifest.with_name("run.json"), {}).get("seconds")
        print(
            f"{manifest.parent.name}{f', checked in {seconds:.0f} s' if seconds else ''}", as_text(checks), "", sep="\n"
        )
        failed += sum(check["status"] == "failed" for check in checks)
        for checked in _checked_results(result):
            if checked not in intact:
                try:
                    result_at(checked).files()
                    intact.add(checked)
                except SnaketuneError as error:
                    print(f"! {error}", "", sep="\n")
                    failed += 1
    print(f"{failed} checks failed" if failed else "no check failed", flush=True)
    return int(failed > 0)


def _checked_results(result: Artifact) -> Iterator[Path]:
    """The manifests of the models, scores and log-probabilities that the checks are of, by the job file of the checks."""
    job_file = job_file_of(result.manifest["stage"], result.manifest_path.parent.name)
    if job_file.is_file():
        for role, inputs in read_job_file(job_file).inputs.items():
            if role not in DATA:
                yield from (path for path in map(Path, inputs) if path.name == "manifest.json")
