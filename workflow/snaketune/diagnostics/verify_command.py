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
    failed, problems = 0, dict[Path, str]()
    for manifest in manifests:
        result = result_at(manifest)
        checks = checks_in(result)
        seconds = read_json(manifest.with_name("run.json"), {}).get("seconds")
        print(
            f"{manifest.parent.name}{f', checked in {seconds:.0f} s' if seconds else ''}", as_text(checks), "", sep="\n"
        )
        failed += sum(check["status"] == "failed" for check in checks)
        for checked in _checked_results(result):
            if checked not in problems:
                problems[checked] = _problem(checked)
                if problems[checked]:
                    print(f"! {problems[checked]}", "", sep="\n")
    damaged = sum(map(bool, problems.values()))
    print(f"{failed} checks failed" if failed else "no check failed", end="")
    print(f", {damaged} results are damaged" if damaged else "", flush=True)
    return int(failed + damaged > 0)


def _problem(manifest: Path) -> str:
    """What is wrong with the files of a result; "" if nothing."""
    try:
        result_at(manifest).files()
    except SnaketuneError as error:
        return str(error)
    return ""


def _checked_results(result: Artifact) -> Iterator[Path]:
    """The manifests of the models, scores and log-probabilities that the checks are of, by the job file of the checks. Prints
    if that can't be read."""
    try:
        job = read_job_file(job_file_of(result.manifest["stage"], result.manifest_path.parent.name))
    except SnaketuneError as error:
        print(f"the files that were checked aren't compared with their digests: {error}", "", sep="\n")
        return
    for role, inputs in job.inputs.items():
        if role not in DATA:
            yield from (path for path in map(Path, inputs) if path.name == "manifest.json")
