"""The `tokenize` stage: one part of a corpus to token ids, and what is learned of them.

Parts are cut by bytes between record batches, so that they can be made side by side; laid end to end they are the corpus,
however many there are. The fast way (see `columns`) is taken where it is proved to give what `ChatTokenizer` gives, and
compared with it on the way: the first COMPARED_FIRST conversations of each split, and COMPARED of every COMPARED_EVERY-th
group. One difference, and the whole part is made anew the slow way.

Measured on one core, with writing and comparing: 35 MB/s of text over 212 MB; the slow way 2.7.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.tables import read_table
from snaketune.stages.outcome import Outcome
from snaketune.stages.progress import progress
from snaketune.stages.specs import TokenizeSpec
from snaketune.stages.work import WorkFolder
from snaketune.tokenization.batched.encoder import Slow, either
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encoded import Sequences
from snaketune.tokenization.template import TEXT
from snaketune.tokenization.token_rows import TokenRows, of_conversations, of_pairs
from snaketune.tokenization.tokens import SPLITS, TokenWriter
from snaketune.tokenization.turns import Turns, conversations, pairs

# Text that is encoded at once: enough for numpy, little enough for the processor's cache.
GROUP_BYTES, GROUP_ROWS = 4_000_000, 4096
COMPARED_FIRST, COMPARED, COMPARED_EVERY = 256, 64, 8
SAMPLES, SAMPLE_TOKENS = 5, 256
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def build(spec: TokenizeSpec, work: WorkFolder, *, corpus: Artifact, tokenizer: Artifact) -> Outcome:
    """Fill the payload with the files of `tokens`.

    Raises:
        SnaketuneError: the template refuses a row.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    if spec.kind == TEXT:
        chat = chat.for_documents()
    tables = {split: read_table(corpus.file(f"{split}.arrow")) for split in SPLITS}
    encoder = _Encoder(spec, chat)
    try:
        counts, samples = _write(spec, work, tables, encoder)
    except _Differs as difference:
        print(f"the fast way differs, so that all is made anew by the slow one: {difference}", flush=True)
        encoder = _Encoder(spec, chat, slow_because=str(difference))
        counts, samples = _write(spec, work, tables, encoder)
    for sample in samples:
        shown = "".join(f"⟦{text}⟧" if learned else text for text, learned in sample)
        print("what is learned, in brackets: " + CONTROL_CHARACTER.sub(_escaped, shown), flush=True)
    return Outcome(
        counts=counts,
        about={
            "kind": spec.kind,
            "pad_id": chat.pad_id,
            "train_on": spec.train_on,
            "path": "fast" if encoder.fast else "reference",
            "why": encoder.why,
            "parity_rows": encoder.compared,
            "rows_by_reference": encoder.by_reference,
            "samples": samples,
        },
    )


def _write(
    spec: TokenizeSpec, work: WorkFolder, tables: dict[str, pa.Table], encoder: "_Encoder"
) -> tuple[dict[str, Any], list[list[tuple[str, bool]]]]:
    """Counts by split, and samples."""
    counts: dict[str, Any] = {}
    samples: list[list[tuple[str, bool]]] = []
    for split in SPLITS:
        own = Counter(dict.fromkeys(("rows", "tokens", "supervised_tokens", "control_text", "nothing_learned"), 0))
        groups = list(_groups(part_of(tables[split].to_batches(), spec.part, spec.parts), tables[split].schema))
        with TokenWriter(work.payload, split) as writer:
            for number, group in enumerate(progress(groups, f"tokenizing {split}", "groups of rows", len(groups))):
                rows = encoder.encode(group, number)
                writer.write(rows)
                supervised = rows.supervised
                own["rows"] += len(group)
                own["tokens"] += len(rows.sequences.ids)
                own["supervised_tokens"] += int(supervised.sum())
                own["control_text"] += int(rows.control_text.sum())
                own["nothing_learned"] += int((supervised == 0).sum())
                if split == "train" and spec.part == 1 and len(samples) < SAMPLES:
                    samples += encoder.samples(rows, SAMPLES - len(samples))
        counts[split] = dict(own)
    return counts, samples


def _escaped(match: re.Match[str]) -> str:
    """A character that a terminal might obey, as one would write it down."""
    return match[0].encode("unicode_escape").decode()


def part_of(batches: list[pa.RecordBatch], part: int, parts: int) -> list[pa.RecordBatch]:
    """The record batches that start in the part-th (from 1) of `parts` equal stretches of bytes."""
    sizes = np.array([batch.nbytes for batch in batches], np.int64)
    starts = np.cumsum(sizes) - sizes
    belongs = starts * parts // max(int(sizes.sum()), 1) == part - 1
    return [batch for batch, own in zip(batches, belongs) if own]


def _groups(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of about GROUP_BYTES, one row at least."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        size = rows = 0
        for one in waiting:
            size, rows = size + one.nbytes, rows + len(one)
        if waiting and (size + batch.nbytes > GROUP_BYTES or rows + len(batch) > GROUP_ROWS):
            yield from _halved(pa.Table.from_batches(waiting, schema))
            waiting = []
        if len(batch):
            waiting.append(batch)
    if waiting:
        yield from _halved(pa.Table.from_batches(waiting, schema))


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """The table, or its halves, or theirs, none of them far above GROUP_BYTES."""
    if len(table) > 1 and table.nbytes > 2 * GROUP_BYTES:
        half = len(table) // 2
        yield from _halved(table.slice(0, half))
        yield from _halved(table.slice(half))
    else:
        yield table


class _Differs(Exception):
    """The fast way and the slow one give different tokens; the message says where."""


class _Encoder:
    """Tables to rows of tokens.

    Attributes:
        fast: the fast way, where there is one.
        why: why there is none.
        compared: conversations that were encoded both ways.
        by_reference: conversations that the fast way left to the slow one.
    """

    def __init__(self, spec: TokenizeSpec, chat: ChatTokenizer, slow_because: str = ""):
        self._spec, self._chat, self._slow = spec, chat, Slow(chat)
        self.fast, self.why = (None, slow_because) if slow_because else either(chat)
        self.compared = self.by_reference = 0
        if self.fast is None:
            print(f"encoded row by row: {self.why}", flush=True)

    def encode(self, table: pa.Table, number: int) -> TokenRows:
        """
        Args:
            number: of the table among those of its split.
        Raises:
            _Differs: see there.
        """
        paired = self._spec.kind == "preference"
        turns = pairs(table) if paired else conversations(table, self._spec.train_on)
        control = np.zeros(len(turns), bool)
        if self.fast is None:
            sequences, slow = self._slow.encode(turns), np.arange(len(turns))
        else:
            sequences, slow = self.fast.encode(turns)
            self.by_reference += len(slow)
            self._compare(turns, sequences, number)
        control[slow] = self._slow.holds_control(turns.rows(slow))
        names = pa.concat_arrays([chunk.cast(pa.string()) for chunk in table.column("id").chunks])
        if paired:
            return of_pairs(names, sequences, control.reshape(-1, 2).any(1))
        return of_conversations(names, sequences, control)

    def _compare(self, turns: Turns, sequences: Sequences, number: int) -> None:
        if number % COMPARED_EVERY:
            return
        count = min(COMPARED if number else COMPARED_FIRST, len(turns))
        # The first ones of the split, later a sample of the group.
        rows = np.linspace(0, len(turns) - 1, count).astype(np.int64) if number else np.arange(count)
        expected, found = self._slow.encode(turns.rows(rows)), sequences.rows(rows)
        self.compared += count
        for at, row in enumerate(rows.tolist()):
            (a, b), (c, d) = expected.offsets[at : at + 2], found.offsets[at : at + 2]
            for what in ("ids", "learned", "turn_ends"):
                right, ours = getattr(expected, what)[a:b], getattr(found, what)[c:d]
                if not np.array_equal(right, ours):
                    least = min(len(right), len(ours))
                    token = int(np.append(right[:least] != ours[:least], True).argmax())
                    start = turns.rows(np.array([row])).messages()[0][0]["content"][:80]
                    raise _Differs(
                        f"{what} of the conversation that starts with {start!r}, from token {token}: "
                        f"{ours[token : token + 5].tolist()} instead of {right[token : token + 5].tolist()}"
                    )

    def samples(self, rows: TokenRows, count: int) -> list[list[tuple[str, bool]]]:
        """The first `count` short rows as texts, each with whether it is learned."""
        sequences = rows.sequences
        found = []
        for number in np.flatnonzero(sequences.lengths <= SAMPLE_TOKENS)[:count].tolist():
            start, end = sequences.offsets[number : number + 2]
            ids, learned = sequences.ids[start:end], sequences.learned[start:end]
            edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
            found.append([(self._chat.text(ids[a:b]), bool(learned[a])) for a, b in pairwise(edges) if a < b])
        return found
