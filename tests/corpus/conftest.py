"""What the corpus tests share: build a corpus from rows or bytes, and read back what came of it."""

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from snaketune.artifacts.tables import read_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.corpora import Corpus
from snaketune.corpus.stage import build


@dataclass
class Built:
    """Counts, rows by split, and the quarantine of a corpus."""

    folder: Path
    counts: dict[str, Any]

    @property
    def train(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "train.arrow").to_pylist()

    @property
    def held_out(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "held_out.arrow").to_pylist()

    @property
    def quarantine(self) -> list[dict[str, Any]]:
        with (self.folder / "quarantine.jsonl").open("rb") as file:
            return [json.loads(line) for line in file]


@pytest.fixture
def make(tmp_path: Path):
    """Build a corpus: each content is one file, a list of rows (written as JSON lines) or bytes."""
    numbers = count()

    def make_(
        *contents: list[Any] | bytes,
        kind: str = "conversations",
        suffix: str = ".jsonl",
        source: dict[str, Any] | None = None,
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
        corpus = Corpus(**{"kind": kind, "sources": [{"files": names, **(source or {})}], "held_out": 0.0} | spec)
        return Built(work.payload, build(corpus, work, files=paths).counts)

    return make_


@pytest.fixture
def chat():
    """A row in the messages layout."""

    def chat_(prompt: str = "Hi", reply: str = "Hello", **columns: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        return {"messages": messages, **columns}

    return chat_
