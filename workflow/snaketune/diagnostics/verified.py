"""The checks of finished trainings, printed: what `snakemake verify` ends with."""

import json
from collections.abc import Iterable
from pathlib import Path

from snaketune.artifacts.manifest import read_json
from snaketune.stages.job import result_at

FILE = "verify.json"


def print_verified(manifests: Iterable[Path]) -> int:
    """Print the checks of each training, and the time that they took; return the exit status, 1 if one failed."""
    from snaketune.diagnostics.checks.check import as_text

    failed = 0
    for manifest in manifests:
        checks = json.loads(result_at(manifest).file(FILE).read_text(encoding="utf-8"))["checks"]
        seconds = read_json(manifest.with_name("run.json"), {}).get("seconds")
        print(
            f"{manifest.parent.name}{f', checked in {seconds:.0f} s' if seconds else ''}", as_text(checks), "", sep="\n"
        )
        failed += sum(check["status"] == "failed" for check in checks)
    print(f"{failed} checks failed" if failed else "no check failed", flush=True)
    return int(failed > 0)
