"""Contamination: train rows that share an n-gram with evaluation data.

As in Brown et al. (2020, "Language Models are Few-Shot Learners", appendix C) with 13-grams, a row is dropped if any `n`
consecutive words of one of its turns are also in an evaluation text. An evaluation text of fewer words, and at least five, is
matched as a whole. System texts aren't compared, nor are short answers of evaluation data, because they are common.

Rows are compared with the evaluation data of the config as they are read, and with the corpus' own held-out rows once the
split is known. For these, n-grams that several prompts share don't count, and of short turns only the prompt does.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.corpus.excerpts import printable
from snaketune.corpus.rows import id_of
from snaketune.corpus.selecting.evaluation_ngrams import EvaluationNgrams, EvaluationText
from snaketune.corpus.selecting.spool import ROWS_PER_BATCH, Spool
from snaketune.corpus.selecting.words import compared_texts, split_words, windows, words_of
from snaketune.progress import progress

# Can't be the name of a corpus, or of a folder and a file.
OWN_HELD_OUT = "its own held-out rows"


class Contamination(ExitStack):
    """Hits and locations of rows: recorded inside `with`, as rows are read; read again after the split."""

    def __init__(self, folder: Path, evaluations: list[EvaluationNgrams], spool: Spool, *, n: int, own_held_out: bool):
        """Args:
        folder: where hits and locations are recorded.
        spool: where the rows are.
        own_held_out: whether train rows are compared with the corpus' held-out rows too.
        """
        super().__init__()
        self.evaluations, self.spool, self.n, self.own_held_out = evaluations, spool, n, own_held_out
        self.paths = folder / "hits.jsonl", folder / "places.jsonl"
        self.hits, self.locations = (self.enter_context(path.open("w", encoding="utf-8")) for path in self.paths)

    def append(self, turns: list[list[str]], locations: list[dict[str, Any]], hashes: np.ndarray, row: int) -> None:
        """Compare one batch of rows.

        Args:
            turns: for each row, the texts that are compared.
            locations: for each row, file and line or row number.
            hashes: uint64, for each row the hash that its id is made of.
            row: number of the first row of the batch.
        """
        if self.own_held_out:
            self.locations.write(json.dumps(locations) + "\n")
        for i, hit in _compare(self.evaluations, turns):
            record = {"id": id_of(int(hashes[i])), **locations[i], **hit}
            self.hits.write(json.dumps([row + i, record]) + "\n")

    def confirm(
        self, remaining: np.ndarray, held_out: np.ndarray, hashes: np.ndarray, prompt_hashes: np.ndarray, record: Path
    ) -> tuple[np.ndarray, dict[str, int]]:
        """Write the hits of the remaining train rows to `record`.

        Args:
            remaining, held_out, hashes, prompt_hashes: for each row, whether no earlier step dropped it, whether it is held
                out, the hash that its id is made of, and the hash of its prompt.
        Returns:
            bool[rows], True for contaminated rows; and by evaluation, the number of train rows with a hit.
        """
        train = remaining & ~held_out
        contaminated = np.zeros(len(remaining), bool)
        names = [evaluation.name for evaluation in self.evaluations] + [OWN_HELD_OUT] * self.own_held_out
        counts = dict.fromkeys(names, 0)
        own_hits = self._hits_in_own_held_out(train, remaining & held_out, hashes, prompt_hashes)
        with self.paths[0].open(encoding="utf-8") as lines, record.open("w", encoding="utf-8") as out:
            for row, hit in chain(map(json.loads, progress(lines, "reading hits", "hits")), own_hits):
                if train[row]:
                    contaminated[row] = True
                    counts[hit["evaluated"]] += 1
                    out.write(printable(json.dumps(hit, ensure_ascii=False)) + "\n")
        return contaminated, counts

    def _hits_in_own_held_out(
        self, train: np.ndarray, held_out: np.ndarray, hashes: np.ndarray, prompt_hashes: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if not self.own_held_out:
            return
        # Caps are applied later, so that rows beyond a cap can replace rows dropped here; a row may be dropped for a
        # held-out row that a cap drops.
        evaluation = EvaluationNgrams(
            OWN_HELD_OUT, _held_out_texts(self.spool, held_out, hashes, prompt_hashes), self.n
        )
        batches = -(-len(train) // ROWS_PER_BATCH)
        with self.paths[1].open(encoding="utf-8") as locations:
            rows_of_batches = progress(_rows(self.spool, train), "comparing with held-out rows", "batches", batches)
            for line, (numbers, rows) in zip(locations, rows_of_batches):
                turns = [compared_texts([turn for column in row.values() for turn in column]) for row in rows]
                batch_locations = None
                for i, hit in _compare([evaluation], turns):
                    batch_locations = batch_locations or json.loads(line)
                    row = int(numbers[i])
                    yield row, {"id": id_of(int(hashes[row])), **batch_locations[row % ROWS_PER_BATCH], **hit}


def _compare(evaluations: list[EvaluationNgrams], turns: list[list[str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first hit of each row per evaluation: the index of the row, and the n-gram with its evaluation row."""
    texts = [text for row in turns for text in row]
    first = np.fromiter(accumulate(map(len, turns), initial=0), np.int64, len(turns) + 1)[:-1]
    words = words_of(texts) if evaluations else None
    for evaluation in evaluations:
        runs = windows(words, evaluation.n)
        positions, hit_rows = evaluation.hits(runs.hashes)
        text = np.searchsorted(runs.offsets, positions, side="right") - 1
        rows = np.searchsorted(first, text, side="right") - 1
        for i in np.unique(rows, return_index=True)[1].tolist():
            word = int(positions[i] - runs.offsets[text[i]])
            ngram = " ".join(split_words(texts[text[i]])[word : word + evaluation.n])
            hit = {"evaluated": evaluation.name, "evaluated_row": hit_rows[i], "ngram": ngram}
            yield int(rows[i]), hit


def _held_out_texts(
    spool: Spool, held_out: np.ndarray, hashes: np.ndarray, prompt_hashes: np.ndarray
) -> Iterator[EvaluationText]:
    """Yield prompts and answers of held-out rows; of preferences, the prompts."""
    for numbers, rows in _rows(spool, held_out):
        for number, row in zip(numbers.tolist(), rows):
            row_id, prompt = id_of(int(hashes[number])), int(prompt_hashes[number])
            seen_prompt = False
            for turn in row[spool.columns[0]]:
                if turn["role"] != "system":
                    is_prompt = turn["role"] == "user" and not seen_prompt
                    seen_prompt |= is_prompt
                    yield EvaluationText(row_id, turn["content"], is_prompt, prompt)


def _rows(spool: Spool, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, list[dict[str, Any]]]]:
    """Yield, for each batch, the numbers of the wanted rows in it, and these rows."""
    for start, batch in spool.batches():
        in_batch = np.flatnonzero(wanted[start : start + batch.num_rows])
        yield in_batch + start, batch.select(spool.columns).take(pa.array(in_batch)).to_pylist()
