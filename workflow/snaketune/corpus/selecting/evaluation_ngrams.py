"""N-grams of evaluation data that no train row may contain: held-out rows of corpora, and data files of tasks.

Takes 12 bytes of memory per word, and 40 bytes during sorting.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.corpus.excerpts import printable
from snaketune.corpus.reading.archives import open_decompressed
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Dropped, Malformed, leaves
from snaketune.corpus.selecting.words import windows, words_of
from snaketune.progress import progress

SHORTEST_WORDS = 5
TEXTS_PER_BATCH = 4096


class EvaluationText(NamedTuple):
    """A text of evaluation data.

    Attributes:
        row: the id or location of its row.
        whole: whether it is matched as a whole if it is too short for an n-gram.
        prompt: the hash of its prompt, where n-grams that several prompts share don't count.
    """

    row: str
    text: str
    whole: bool
    prompt: int = 0


def texts_of_corpus(corpus: Artifact) -> Iterator[EvaluationText]:
    """Yield the held-out prompts and answers of a corpus; of preferences, the prompts."""
    for batch in read_split(corpus, "held_out").to_batches():
        for row in batch.to_pylist():
            for turn in row.get("messages") or row["prompt"]:
                if turn["role"] != "system":
                    yield EvaluationText(row["id"], turn["content"], turn["role"] == "user")


def texts_of_file(path: Path) -> Iterator[EvaluationText]:
    """Yield all texts in a data file of a task, in whatever columns; of plain text, its lines."""
    if {".txt", ".tsv"} & {*path.suffixes[-2:]}:
        with open_decompressed(path) as file:
            for number, line in enumerate(file, start=1):
                yield EvaluationText(f"line {number}", line.decode("utf-8", errors="replace"), True)
        return
    for raw in read_file(path, str(path)):
        if isinstance(raw.value, Malformed | Dropped):
            print(printable(f"{path}, {raw.unit} {raw.number}, isn't compared: {raw.value}"), flush=True)
        else:
            texts = (leaf for leaf in leaves(raw.value) if isinstance(leaf, str))
            yield from (EvaluationText(f"{raw.unit} {raw.number}", text, True) for text in texts)


class EvaluationNgrams:
    """The sorted n-grams of one corpus or file of evaluation data, and the row of each."""

    def __init__(self, name: str, texts: Iterable[EvaluationText], n: int):
        self.name, self.n = name, n
        self.rows: list[str] = []
        grams, owners = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        prompts: list[np.ndarray] = [np.empty(0, np.uint64)]
        texts = progress(texts, f"reading {name}", "texts")
        while batch := list(islice(texts, TEXTS_PER_BATCH)):
            words = words_of([text.text for text in batch])
            shortest = np.array([min(n, SHORTEST_WORDS) if text.whole else n for text in batch])
            runs = windows(words, n)
            owner = np.repeat(np.arange(len(batch)), runs.lengths)
            compared = (words.lengths >= shortest)[owner]
            grams.append(runs.hashes[compared])
            owners.append((owner[compared] + len(self.rows)).astype(np.uint32))
            prompts.append(np.array([text.prompt for text in batch], np.uint64))
            self.rows += [text.row for text in batch]
        self.grams, first, same = np.unique(np.concatenate(grams), return_index=True, return_inverse=True)
        owner = np.concatenate(owners)
        self.owners = owner[first]
        prompt = np.concatenate(prompts)
        common = np.zeros(len(self.grams), bool)
        common[same[prompt[owner] != prompt[self.owners][same]]] = True
        self.grams, self.owners = self.grams[~common], self.owners[~common]

    def hits(self, grams: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Return the positions of the n-grams that are in the evaluation data, and the evaluation row of each."""
        if not len(self.grams):
            return np.empty(0, np.int64), []
        nearest = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        positions = np.flatnonzero(self.grams[nearest] == grams)
        return positions, [self.rows[owner] for owner in self.owners[nearest[positions]]]


def load_evaluations(corpora: list[Artifact], files: list[Path], n: int) -> list[EvaluationNgrams]:
    """Load held-out rows of corpora and task files; files are named with their folder, as many tasks use the same name."""
    return [
        *(EvaluationNgrams(corpus.manifest_path.parent.name, texts_of_corpus(corpus), n) for corpus in corpora),
        *(EvaluationNgrams(f"{path.parent.name}/{path.name}", texts_of_file(path), n) for path in files),
    ]
