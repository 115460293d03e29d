"""Shared by the corpus tests: build a corpus from rows or bytes, and read its results."""

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.corpus.assembly import build
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CorpusSpec
from snaketune.tables import read_table
from tests.corpus.flow_of_rows import balances


@dataclass
class Built:
    """A corpus: the counts of its manifest, its rows by split, and its records."""

    folder: Path
    outcome: Outcome

    @property
    def counts(self) -> dict[str, Any]:
        return self.outcome.counts

    @property
    def train(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "train-00000.arrow").to_pylist()

    @property
    def held_out(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "held_out-00000.arrow").to_pylist()

    @property
    def quarantine(self) -> list[dict[str, Any]]:
        return self.record("quarantine")

    def record(self, name: str) -> list[dict[str, Any]]:
        with (self.folder / f"{name}.jsonl").open("rb") as file:
            return [json.loads(line) for line in file]

    def prompts(self, split: str = "train") -> list[str]:
        """Return the first turn of each row."""
        return [(row.get("messages") or row["prompt"])[0]["content"] for row in getattr(self, split)]

    def artifact(self, name: str) -> Artifact:
        """Return the corpus as an input of other stages, named `name`."""
        manifest = {"payload": describe_files(self.folder), "records": {}}
        return Artifact(Path(f"results/corpus/{name}/manifest.json"), manifest, self.folder)


@pytest.fixture
def make(tmp_path: Path):
    """Build a corpus: each content is one file, a list of rows (written as JSON lines) or bytes."""
    numbers = count()

    def make_(
        *contents: list[Any] | bytes,
        kind: str = "conversations",
        suffix: str = ".jsonl",
        source: dict[str, Any] | None = None,
        against: list[Artifact] = (),
        against_files: list[Path] = (),
        **spec: Any,
    ) -> Built:
        folder = tmp_path / str(next(numbers))
        work = WorkFolder(folder / "work")
        work.start()
        names, paths = [], []
        for number, content in enumerate(contents):
            if not isinstance(content, bytes):
                content = "".join(json.dumps(row) + "\n" for row in content).encode()
            # The config's name and the path differ, so that a test sees which of the two is shown.
            names.append(f"data/{number}{suffix}")
            paths.append(folder / f"{number}{suffix}")
            paths[-1].write_bytes(content)
        corpus = CorpusSpec(**{"kind": kind, "sources": [{"files": names, **(source or {})}], "held_out": 0.0} | spec)
        outcome = build(corpus, work, files=paths, against=list(against), against_files=list(against_files))
        assert balances(outcome.counts)
        return Built(work.payload, outcome)

    return make_


@pytest.fixture
def chat():
    """A row in the messages layout."""

    def chat_(prompt: str = "Hi", reply: str = "Hello", **columns: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        return {"messages": messages, **columns}

    return chat_
