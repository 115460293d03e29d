"""Contamination: train rows that share an n-gram with evaluation data.

As in Brown et al. (2020, "Language Models are Few-Shot Learners", appendix C) with 13-grams, a row is dropped if any `n`
consecutive words of one of its turns are also in an evaluation text. An evaluation text of fewer words, and at least five, is
matched as a whole. System texts aren't compared, nor are short answers of evaluation data, because they are common.

Rows are compared with the evaluation data of the config as they are read, and with the corpus' own held-out rows once the
split is known. For these, n-grams that several prompts share don't count, and of short turns only the prompt does.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.corpus.excerpts import printable
from snaketune.corpus.rows import id_of
from snaketune.corpus.selecting.evaluation_ngrams import EvaluationNgrams, EvaluationText
from snaketune.corpus.selecting.row_store import ROWS_PER_BATCH, RowFormat
from snaketune.corpus.selecting.scanned_parts import ScannedPart, ScannedParts
from snaketune.corpus.selecting.words import compared_texts, split_words, windows, words_of
from snaketune.progress import progress

# Can't be the name of a corpus, or of a folder and a file.
OWN_HELD_OUT = "its own held-out rows"
HITS, LOCATIONS = "hits.jsonl", "places.jsonl"


class HitWriter(ExitStack):
    """Records hits and locations of the rows of a part, inside `with`."""

    def __init__(self, folder: Path, evaluations: list[EvaluationNgrams], own_held_out: bool):
        """Args: own_held_out: whether train rows are compared with the corpus' held-out rows later."""
        super().__init__()
        self.evaluations, self.rows, self.names = evaluations, 0, [evaluation.name for evaluation in evaluations]
        self.hits = self.enter_context((folder / HITS).open("w", encoding="utf-8"))
        self.locations = self.enter_context((folder / LOCATIONS).open("w", encoding="utf-8")) if own_held_out else None

    def append(self, turns: list[list[str]], locations: list[dict[str, Any]], hashes: Sequence[int]) -> None:
        """Compare one batch of rows.

        Args:
            turns: for each row, the texts that are compared.
            locations: for each row, file and line or row number.
            hashes: for each row, the hash that its id is made of.
        """
        if self.locations:
            self.locations.write(json.dumps(locations) + "\n")
        for row, hit in _compare(self.evaluations, turns):
            record = {"id": id_of(hashes[row]), **locations[row], **hit}
            self.hits.write(json.dumps([self.rows + row, record]) + "\n")
        self.rows += len(turns)


def contaminated_rows(
    parts: ScannedParts,
    format_: RowFormat,
    n: int,
    *,
    own_held_out: bool,
    remaining: np.ndarray,
    held_out: np.ndarray,
    record: Path,
) -> tuple[np.ndarray, dict[str, int]]:
    """Write the hits of the remaining train rows to `record`.

    Args:
        n: words per n-gram.
        own_held_out: whether train rows are compared with the corpus' held-out rows too.
        remaining, held_out: for each row, whether no earlier step dropped it, and whether it is held out.
    Returns:
        bool[rows], True for contaminated rows; and by evaluation, the number of train rows with a hit.
    """
    train = remaining & ~held_out
    contaminated = np.zeros(len(remaining), bool)
    names = [*parts.evaluations, *[OWN_HELD_OUT] * own_held_out]
    counts = dict.fromkeys(names, 0)
    hits = chain(
        _recorded_hits(parts), _own_hits(parts, format_, n, train, remaining & held_out) if own_held_out else ()
    )
    with record.open("w", encoding="utf-8") as out:
        for row, hit in hits:
            if train[row]:
                contaminated[row] = True
                counts[hit["evaluated"]] += 1
                out.write(printable(json.dumps(hit, ensure_ascii=False)) + "\n")
    return contaminated, counts


def _recorded_hits(parts: ScannedParts) -> Iterator[tuple[int, dict[str, Any]]]:
    for part in parts:
        with (part.folder / HITS).open(encoding="utf-8") as lines:
            for line in progress(lines, "reading hits", "hits"):
                row, hit = json.loads(line)
                yield part.first + row, part.located(hit)


def _own_hits(
    parts: ScannedParts, format_: RowFormat, n: int, train: np.ndarray, held_out: np.ndarray
) -> Iterator[tuple[int, dict[str, Any]]]:
    # Caps are applied later, so that rows beyond a cap can replace rows dropped here; a row may be dropped for a
    # held-out row that a cap drops.
    evaluation = EvaluationNgrams(OWN_HELD_OUT, _held_out_texts(parts, format_, held_out), n)
    batches = -(-len(train) // ROWS_PER_BATCH)
    for part, line, numbers, rows in progress(
        _rows_and_lines(parts, format_, train), "comparing with held-out rows", "batches", batches
    ):
        turns = [compared_texts([turn for column in row.values() for turn in column]) for row in rows]
        locations = None
        for position, hit in _compare([evaluation], turns):
            locations = locations or json.loads(line)
            row = int(numbers[position])
            location = part.located(locations[row % ROWS_PER_BATCH])
            yield part.first + row, {"id": id_of(int(part.column("content")[row])), **location, **hit}


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


def _held_out_texts(parts: ScannedParts, format_: RowFormat, held_out: np.ndarray) -> Iterator[EvaluationText]:
    """Yield prompts and answers of held-out rows; of preferences, the prompts."""
    for part in parts:
        content, prompts = part.column("content"), part.column("prompt")
        for numbers, rows in _rows(part, format_, held_out):
            for number, row in zip(numbers.tolist(), rows):
                row_id, prompt = id_of(int(content[number])), int(prompts[number])
                seen_prompt = False
                for turn in row[format_.columns[0]]:
                    if turn["role"] != "system":
                        is_prompt = turn["role"] == "user" and not seen_prompt
                        seen_prompt |= is_prompt
                        yield EvaluationText(row_id, turn["content"], is_prompt, prompt)


def _rows_and_lines(
    parts: ScannedParts, format_: RowFormat, wanted: np.ndarray
) -> Iterator[tuple[ScannedPart, str, np.ndarray, list[dict[str, Any]]]]:
    """Yield, for each batch, its part, the locations of its rows as JSON, and what `_rows` yields."""
    for part in parts:
        with (part.folder / LOCATIONS).open(encoding="utf-8") as lines:
            for line, (numbers, rows) in zip(lines, _rows(part, format_, wanted)):
                yield part, line, numbers, rows


def _rows(
    part: ScannedPart, format_: RowFormat, wanted: np.ndarray
) -> Iterator[tuple[np.ndarray, list[dict[str, Any]]]]:
    """Yield, for each batch of a part, the numbers in the part of the wanted rows, and these rows."""
    for start, batch in part.batches(format_):
        first = part.first + start
        in_batch = np.flatnonzero(wanted[first : first + batch.num_rows])
        yield in_batch + start, batch.select(format_.columns).take(pa.array(in_batch)).to_pylist()
