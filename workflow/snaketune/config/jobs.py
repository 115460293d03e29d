"""A job of the plan: one run of one stage, where its result lies, and what it reads."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from snaketune.config.base import Model
from snaketune.config.runs import Operation
from snaketune.config.specs import canonical

# Where each stage's payload lies beside its manifest.
PAYLOADS = {
    "corpus": "rows",
    "tokenizer": "tokenizer",
    "tokenize": "tokens",
    "plan": "plan",
    "write": "shards",
    "pack": "shards",
    "sft": "model",
    "ref_logps": "logps",
    "dpo": "model",
    "eval": "scores",
    "report": "pages",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one stage.

    Attributes:
        artifacts: by role, the jobs whose results this one reads.
        files: by role, the files from outside that it reads.
    """

    stage: str
    name: str
    spec: Model
    artifacts: dict[str, tuple["Job", ...]] = field(default_factory=dict)
    files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    operation: Operation = Operation()

    @property
    def folder(self) -> str:
        return f"results/{self.stage}/{self.name}" if self.stage != "report" else "results/report"

    @property
    def manifest(self) -> str:
        return f"{self.folder}/manifest.json"

    @property
    def payload(self) -> str:
        return f"{self.folder}/{PAYLOADS[self.stage]}"

    @property
    def run(self) -> str:
        return f"{self.folder}/run.json"


def short_digest(spec: Model, *made_of: str) -> str:
    """Eight hex digits over a spec and names, so that `a` with `b-c` isn't taken for `a-b` with `c`."""
    return hashlib.sha256(json.dumps([canonical(spec), *made_of]).encode()).hexdigest()[:8]


def files_in(folder: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The files below `folder` that fit one of the patterns, in order."""
    found = {path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}
    return tuple(sorted(str(path) for path in found))
