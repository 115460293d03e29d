"""Work of the `tokenize` stage: encode one part of a corpus to token ids and loss masks.

Parts are cut by bytes between record batches, so that they can be encoded in parallel; concatenated they are the corpus,
however many there are. Rows are encoded in batches (see `batched`) if that is proved to equal the reference path
(`encode_rows`), and compared with it on samples: the first COMPARED_FIRST conversations of each split, and COMPARED of every
COMPARED_EVERY-th group. If a sample differs, the whole part is encoded again row by row.

Measured on one core, including writing and comparing: 35 MB/s of text over 212 MB; row by row 2.7.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.corpus.quarantine import Quarantine, Recorder
from snaketune.corpus.rows import MARGIN, Malformed, RawRow
from snaketune.engine.packing.ragged import common_start, offsets_of
from snaketune.errors import SnaketuneError
from snaketune.progress import progress
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TokenizeSpec
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.control_frames import OmittedTurn
from snaketune.tokenization.encode_rows import encode_turns, holds_control
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.template import TEXT, Refused
from snaketune.tokenization.token_rows import TokenRows, insert_empty_rows, names_of, rows_of
from snaketune.tokenization.token_store import SPLITS, TokenWriter
from snaketune.tokenization.turn_columns import Turns, has_weights, turns_of

# Rows are encoded in groups, large enough for numpy to be efficient, small enough for the CPU's cache.
GROUP_BYTES, GROUP_ROWS = 4_000_000, 4096
COMPARED_FIRST, COMPARED, COMPARED_EVERY = 256, 64, 8
SAMPLES, SAMPLE_TOKENS = 5, 256
COUNTED = ("rows", "refused", "tokens", "supervised_tokens", "control_text", "nothing_supervised")
QUARANTINE = "quarantine.jsonl"
# In samples too long to be shown whole: the tokens shown on both sides of the ends of supervised spans.
AROUND = 32
# A row as (text, is supervised).
Sample = list[tuple[str, bool]]


def build(spec: TokenizeSpec, work: WorkFolder, *, corpus: Artifact, tokenizer: Artifact) -> Outcome:
    """Write the token files to the payload.

    Raises:
        SnaketuneError: the template refuses a row, or omits a turn; or, if such rows are quarantined, too many of them.
    """
    # It may be from an earlier attempt.
    (work.folder / QUARANTINE).unlink(missing_ok=True)
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder, spec.empty_reasoning)
    if spec.kind == TEXT:
        chat = chat.for_documents()
    corpus = corpus.for_part(spec.part)
    tables = {split: read_split(corpus, split) for split in SPLITS}
    encoder = _Encoder(spec, chat)
    try:
        try:
            counts, samples = _write(spec, work, tables, encoder)
        except _Mismatch as mismatch:
            print(f"batched encoding differs, so all rows are encoded again row by row: {mismatch}", flush=True)
            encoder = _Encoder(spec, chat, unbatched_because=str(mismatch))
            counts, samples = _write(spec, work, tables, encoder)
    except Refused as first:
        if isinstance(first, OmittedTurn):
            template = f"the chat template {tokenizer.folder}/chat_template.jinja"
            first = OmittedTurn(first.turn, template, _count_omitted(spec, tables, chat))
        raise SnaketuneError(
            f"{first}. Or list and drop such rows: tokenizers.NAME.on_template_error: quarantine"
        ) from None
    return Outcome(
        counts=counts,
        about={
            "kind": spec.kind,
            "pad_id": chat.pad_id,
            "train_on": spec.train_on,
            "path": "fast" if encoder.batched else "reference",
            "why": encoder.reason,
            "samples": samples,
        },
        records=() if spec.most_refused is None else (QUARANTINE,),
        run={"parity_rows": encoder.compared, "rows_by_reference": encoder.fallback_rows},
    )


def _write(
    spec: TokenizeSpec, work: WorkFolder, tables: dict[str, pa.Table], encoder: "_Encoder"
) -> tuple[dict[str, Any], list[Sample]]:
    """Encode and write all rows; return counts by split, and samples."""
    counts: dict[str, Any] = {}
    samples: list[Sample] = []
    quarantines = spec.most_refused is not None
    with (work.payload / QUARANTINE).open("w", encoding="utf-8") if quarantines else nullcontext() as file:
        quarantine, recorder = Quarantine(file), Recorder()
        for split in SPLITS:
            tally = Counter(dict.fromkeys(COUNTED, 0))
            batches, rated = tables[split].to_batches(), MARGIN.name in tables[split].column_names
            earlier = sum(len(batch) for part in range(1, spec.part) for batch in _part_of(batches, part, spec.parts))
            groups = list(_groups(spec, tables[split]))
            with TokenWriter(work.payload, split, has_weights(tables[split]), rated=rated) as writer:
                for number, group in enumerate(progress(groups, f"tokenizing {split}", "groups of rows", len(groups))):
                    rows, refused = encoder.encode(group, number, refuses=quarantines)
                    for at, error in refused:
                        raw = RawRow("row", earlier + tally["rows"] + at + 1, group.slice(at, 1).to_pylist()[0])
                        quarantine.add(recorder.record(split, raw, Malformed(error.reason, str(error))))
                    writer.write(rows)
                    supervised = rows.supervised_tokens
                    tally["rows"] += len(group)
                    tally["refused"] += len(refused)
                    tally["tokens"] += len(rows.sequences.ids)
                    tally["supervised_tokens"] += int(supervised.sum())
                    tally["control_text"] += int(rows.control_text.sum())
                    tally["nothing_supervised"] += int((supervised == 0).sum()) - len(refused)
                    if split == "train" and spec.part == 1 and len(samples) < SAMPLES:
                        samples += encoder.samples(rows, SAMPLES - len(samples))
            counts[split] = dict(tally)
    if quarantines:
        rows = sum(split_counts["rows"] for split_counts in counts.values())
        quarantine.check_limit(rows, rows, spec.most_refused, work.folder / QUARANTINE)
    return counts, samples


def _part_of(batches: list[pa.RecordBatch], part: int, parts: int) -> list[pa.RecordBatch]:
    """The record batches that start in the `part`-th (from 1) of `parts` equal byte ranges."""
    sizes = np.array([batch.nbytes for batch in batches], np.int64)
    belongs = (np.cumsum(sizes) - sizes) * parts // max(int(sizes.sum()), 1) == part - 1
    return [batch for batch, in_part in zip(batches, belongs) if in_part]


def _groups(spec: TokenizeSpec, table: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of the part as tables of about GROUP_BYTES, each of at least one row."""
    pending: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in _part_of(table.to_batches(), spec.part, spec.parts):
        if pending and (size + batch.nbytes > GROUP_BYTES or rows + len(batch) > GROUP_ROWS):
            yield from _halved(pa.Table.from_batches(pending))
            pending, size, rows = [], 0, 0
        if len(batch):
            pending.append(batch)
            size, rows = size + batch.nbytes, rows + len(batch)
    if pending:
        yield from _halved(pa.Table.from_batches(pending))


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """Yield the table, halved recursively until no part is far above GROUP_BYTES."""
    if len(table) > 1 and table.nbytes > 2 * GROUP_BYTES:
        half = len(table) // 2
        yield from _halved(table.slice(0, half))
        yield from _halved(table.slice(half))
    else:
        yield table


def _count_omitted(spec: TokenizeSpec, tables: dict[str, pa.Table], chat: ChatTokenizer) -> str:
    """How many rows of this part have a turn that the template omits, as "m of n rows"."""
    omitted: list[bool] = []
    for group in (group for table in tables.values() for group in _groups(spec, table)):
        turns = turns_of(group, spec.train_on, spec.reasoning)
        rows = zip(turns.variables.to_pylist(), turns.messages(), turns.tools.to_pylist())
        flags = [bool(chat.with_variables(variables).omitted_turns(*row)) for variables, *row in rows]
        omitted += np.array(flags).reshape(len(group), -1).any(1).tolist()
    return f"{sum(omitted)} of {len(omitted)} rows"


class _Mismatch(Exception):
    """The batched and the reference path differ; the message is the first difference."""


class _Encoder:
    """Encodes tables to rows of tokens.

    Attributes:
        batched, reason: the batched encoder, or None and why it isn't proved for this tokenizer and template.
        compared, fallback_rows: conversations that were encoded on both paths, and that `batched` passed to the reference path.
    """

    def __init__(self, spec: TokenizeSpec, chat: ChatTokenizer, unbatched_because: str = ""):
        self._spec, self._chat = spec, chat
        self.batched, self.reason = (None, unbatched_because) if unbatched_because else batched_encoder(chat)
        self.compared = self.fallback_rows = 0
        if self.batched is None:
            print(f"encoded row by row: {self.reason}", flush=True)

    def encode(self, table: pa.Table, number: int, refuses: bool) -> tuple[TokenRows, list[tuple[int, Refused]]]:
        """Encode the `number`-th table of a split.

        If `refuses`, a row that the template refuses becomes a sequence without tokens, and is returned with its error.
        """
        try:
            return self._encoded(table, number), []
        except Refused:
            if not refuses:
                raise
        refused = []
        for at in range(len(table)):
            try:
                encode_turns(self._chat, self._turns(table.slice(at, 1)))
            except Refused as error:
                refused.append((at, error))
        accepted = np.delete(np.arange(len(table)), [at for at, _ in refused])
        return insert_empty_rows(self._encoded(table.take(accepted), number), accepted, names_of(table)), refused

    def _turns(self, table: pa.Table) -> Turns:
        return turns_of(table, self._spec.train_on, self._spec.reasoning)

    def _encoded(self, table: pa.Table, number: int) -> TokenRows:
        turns = self._turns(table)
        if self.batched is None:
            encoded, one_by_one = encode_turns(self._chat, turns), np.arange(len(turns))
        else:
            encoded, one_by_one = self.batched.encode(turns)
            self.fallback_rows += len(one_by_one)
            self._compare(turns, encoded, number)
        # An end of turn with nothing before it, for example where a response is all reasoning, which the template leaves out.
        text = (encoded.supervised > 0) & ~self._chat.template_only[encoded.ids]
        has_text = np.diff(offsets_of(text)[encoded.offsets]) > 0
        encoded.supervised[~np.repeat(has_text, encoded.lengths)] = 0
        # Rows with the string of a control token are always encoded on the reference path.
        control = np.zeros(len(turns), bool)
        control[one_by_one] = holds_control(self._chat, turns.rows(one_by_one))
        further = [name for name in ("source", MARGIN.name) if name in table.column_names]
        return replace(rows_of(table, encoded, control), **{name: table[name].combine_chunks() for name in further})

    def _compare(self, turns: Turns, encoded: EncodedBatch, number: int) -> None:
        """Compare the first conversations of the split with the reference path; in later groups a sample."""
        if number % COMPARED_EVERY:
            return
        count = min(COMPARED if number else COMPARED_FIRST, len(turns))
        rows = np.linspace(0, len(turns) - 1, count).astype(np.int64) if number else np.arange(count)
        expected, batched = encode_turns(self._chat, turns.rows(rows)), encoded.rows(rows)
        self.compared += count
        for at, row in enumerate(rows):
            for what in ("ids", "supervised", "ends_turn"):
                right, ours = (
                    getattr(batch, what)[batch.offsets[at] : batch.offsets[at + 1]] for batch in (expected, batched)
                )
                if not np.array_equal(right, ours):
                    token = common_start(right, ours)
                    start = turns.rows(np.array([row])).messages()[0][0]["content"][:80]
                    raise _Mismatch(
                        f"{what} of the conversation that starts with {start!r}, from token {token}: "
                        f"{ours[token : token + 5].tolist()} instead of {right[token : token + 5].tolist()}"
                    )

    def samples(self, rows: TokenRows, count: int) -> list[Sample]:
        """Up to `count` rows: short rows first, then excerpts of long rows."""
        sequences = rows.sequences
        samples = []
        order = np.argsort(sequences.lengths > SAMPLE_TOKENS, kind="stable")
        for number in order[sequences.lengths[order] > 0][:count].tolist():
            start, end = sequences.offsets[number : number + 2]
            ids, supervised = sequences.ids[start:end], sequences.supervised[start:end]
            shown = _shown(supervised > 0)
            branches = {begin: prefix for begin, prefix, _ in (sequences.branches or {number: ()})[number]}
            changes = np.flatnonzero((np.diff(supervised) != 0) | np.diff(shown)) + 1
            edges = sorted({0, len(ids), *branches, *changes.tolist()})
            sample: Sample = []
            for a, b in pairwise(edges):
                if a in branches:
                    sample.append((f"\n[after the first {branches[a]} tokens:] ", False))
                sample.append((self._chat.text(ids[a:b]) if shown[a] else f"[… {b - a} tokens …]", bool(supervised[a])))
            samples.append(sample)
        return samples


def _shown(supervised: np.ndarray) -> np.ndarray:
    """bool, the tokens of a row that are shown: all of a short row; of a long row those around the ends of its first and
    last supervised spans, or around the row's own ends if it has none.

    >>> _shown(np.repeat([False, True, False], [400, 500, 60])).nonzero()[0][[0, -1]].tolist()
    [368, 931]
    """
    if len(supervised) <= SAMPLE_TOKENS:
        return np.ones(len(supervised), bool)
    begins = np.flatnonzero(np.diff(supervised, prepend=False) & supervised)
    ends = np.flatnonzero(np.diff(supervised, append=False) & supervised) + 1
    shown = np.zeros(len(supervised), bool)
    for at in (begins[0], ends[0], begins[-1], ends[-1]) if len(begins) else (0, len(supervised)):
        shown[max(0, at - AROUND) : at + AROUND] = True
    return shown
