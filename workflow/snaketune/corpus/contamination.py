"""Rows that share an n-gram with what the same config evaluates on: to train on them is to train on the test.

As Brown et al. (2020, "Language Models are Few-Shot Learners", appendix C) did with 13-grams: a row is dropped if any
`n` words in a row of one of its turns are also in an evaluation text. An evaluation text of fewer than `n` words, and
at least five, counts as a whole: it is found where a turn says just these words. System texts say nothing about a row
and aren't compared, and short answers aren't looked for, because "Is there anything else I can do?" is no secret.

What is evaluated on is held in memory, 12 bytes per word; rows are compared as they are read.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import Malformed, id_of
from snaketune.corpus.sources import read_file
from snaketune.corpus.words import Runs, split_words, windows, words_of
from snaketune.progress import progress

SHORTEST_WORDS = 5
TEXTS_PER_BATCH = 4096


class Evaluated(NamedTuple):
    """A text that is evaluated on, the row that it is in, and whether it is an answer."""

    row: str
    text: str
    answer: bool


def evaluated_corpus(corpus: Artifact) -> Iterator[Evaluated]:
    """The prompts and answers of a corpus that are held out; of preferences, the prompts."""
    with pa.OSFile(str(corpus.file("held_out.arrow"))) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            for row in reader.get_batch(number).to_pylist():
                for turn in row.get("messages") or row["prompt"]:
                    if turn["role"] != "system":
                        yield Evaluated(row["id"], turn["content"], turn["role"] != "user")


def evaluated_file(path: Path) -> Iterator[Evaluated]:
    """All texts in a data file of a task, whatever its columns are called."""
    for raw in read_file(path, str(path)):
        if isinstance(raw.found, Malformed):
            print(f"{path}, {raw.unit} {raw.number}, isn't compared: {raw.found}", flush=True)
        else:
            for text in _texts(raw.found):
                yield Evaluated(f"{raw.unit} {raw.number}", text, False)


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for part in value.values():
                yield from _texts(part)
        case list():
            for part in value:
                yield from _texts(part)


class EvaluatedTexts:
    """The n-grams of one corpus or file that is evaluated on, sorted, and which row each is of."""

    def __init__(self, name: str, texts: Iterable[Evaluated], n: int):
        self.name, self.n = name, n
        self.rows: list[str] = []
        grams, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        texts = progress(texts, f"reading {name}", "texts")
        while batch := list(islice(texts, TEXTS_PER_BATCH)):
            words = words_of([evaluated.text for evaluated in batch])
            shortest = np.array([n if evaluated.answer else min(n, SHORTEST_WORDS) for evaluated in batch])
            runs = windows(words, n)
            owner = np.repeat(np.arange(len(batch)), runs.lengths)
            compared = (words.lengths >= shortest)[owner]
            grams.append(runs.hashes[compared])
            owners.append(owner[compared] + len(self.rows))
            self.rows += [evaluated.row for evaluated in batch]
        self.grams, first = np.unique(np.concatenate(grams), return_index=True)
        self.owners = np.concatenate(owners)[first].astype(np.uint32)

    def hits(self, grams: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Places of the n-grams that are evaluated on, and the row that each is of."""
        if not len(self.grams):
            return np.empty(0, np.int64), []
        nearest = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        found = np.flatnonzero(self.grams[nearest] == grams)
        return found, [self.rows[owner] for owner in self.owners[nearest[found]]]


class Contamination:
    """Hits: written down inside `with`, as rows are read; read again when it is known which rows are left to drop."""

    def __init__(self, path: Path, evaluated: list[EvaluatedTexts]):
        self.path, self.evaluated = path, evaluated

    def __enter__(self) -> Self:
        self.file = self.path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(
        self,
        words: Runs,
        texts: list[str],
        first: np.ndarray,
        places: list[dict[str, Any]],
        hashes: np.ndarray,
        row: int,
    ) -> None:
        """Compare one batch.

        Args:
            words: of all its turns, whose `texts` are given too.
            first: for each row, the number of its first turn.
            places: for each row, where it came from.
            hashes: for each row, what its id is made of.
            row: number of the first row of the batch.
        """
        for evaluated in self.evaluated:
            runs = windows(words, evaluated.n)
            found, hit_rows = evaluated.hits(runs.hashes)
            turns = np.searchsorted(runs.starts, found, side="right") - 1
            rows = np.searchsorted(first, turns, side="right") - 1
            # The first hit of each row is enough to show.
            for i in np.unique(rows, return_index=True)[1].tolist():
                begin = int(found[i] - runs.starts[turns[i]])
                record = {
                    "id": id_of(int(hashes[rows[i]])),
                    **places[rows[i]],
                    "evaluated": evaluated.name,
                    "evaluated_row": hit_rows[i],
                    "ngram": " ".join(split_words(texts[turns[i]])[begin : begin + evaluated.n]),
                }
                self.file.write(json.dumps([row + int(rows[i]), record], ensure_ascii=False) + "\n")

    def confirm(self, kept: np.ndarray, record: Path) -> tuple[np.ndarray, dict[str, int]]:
        """Write the hits of rows that are `kept` so far; these rows, and how many of them each evaluation hits."""
        contaminated = np.zeros(len(kept), bool)
        counts = {evaluated.name: 0 for evaluated in self.evaluated}
        with self.path.open(encoding="utf-8") as hits, record.open("w", encoding="utf-8") as out:
            for line in hits:
                row, hit = json.loads(line)
                if kept[row]:
                    contaminated[row] = True
                    counts[hit["evaluated"]] += 1
                    out.write(json.dumps(hit, ensure_ascii=False) + "\n")
        return contaminated, counts
