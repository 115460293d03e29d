"""What the `tokenize` stage does: one part of a corpus to token ids, and which of them are supervised.

Parts are cut by bytes between record batches, so that they can be made side by side; laid end to end they are the corpus,
however many there are. Batches are encoded at once (see `batched`) where that is proved to give what the ordinary path
(`encode`) gives, and compared with it on the way: the first COMPARED_FIRST conversations of each split, and COMPARED of
every COMPARED_EVERY-th group. One difference, and the whole part is encoded again, one by one.

Measured on one core, with writing and comparing: 35 MB/s of text over 212 MB; one by one 2.7.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.raw_rows import RawRow
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.progress import progress
from snaketune.stages.specs import TokenizeSpec
from snaketune.tables import read_table
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns, holds_control
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.row_groups import groups_of, part_of
from snaketune.tokenization.template import TEXT
from snaketune.tokenization.template_control import LeftOut
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.token_rows import TokenRows, of_completions, of_conversations, of_pairs, spread
from snaketune.tokenization.token_store import SPLITS, TokenWriter
from snaketune.tokenization.turn_columns import Turns, completed, conversations, pairs

COMPARED_FIRST, COMPARED, COMPARED_EVERY = 256, 64, 8
SAMPLES, SAMPLE_TOKENS = 5, 256
COUNTED = ("rows", "refused", "tokens", "supervised_tokens", "control_text", "nothing_supervised")
QUARANTINE = "quarantine.jsonl"
# Tokens on both sides of an end of a supervised span, of rows that are too long to be shown whole.
AROUND = 32
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def tokenize_part(spec: TokenizeSpec, work: WorkFolder, *, corpus: Artifact, tokenizer: Artifact) -> Outcome:
    """Fill the payload with the files of `tokens`.

    Raises:
        SnaketuneError: the template refuses a row, or leaves a turn out; where such rows are quarantined, too many of them.
    """
    # An earlier attempt's.
    (work.folder / QUARANTINE).unlink(missing_ok=True)
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    if spec.kind == TEXT:
        chat = chat.for_documents()
    corpus = corpus.for_part(spec.part)
    tables = {split: read_table(corpus.file(f"{split}.arrow")) for split in SPLITS}
    try:
        encoder, counts, samples = _encoded(spec, work, tables, chat)
    except Refused as first:
        if isinstance(first, LeftOut):
            template = f"the chat template {tokenizer.folder}/chat_template.jinja"
            first = LeftOut(first.turn, template, _count_left_out(spec, tables, chat))
        raise SnaketuneError(
            f"{first}. Or have such rows listed and left out: tokenizers.NAME.on_template_error: quarantine"
        ) from None
    for sample in samples:
        shown = "".join(f"⟦{text}⟧" if supervised else text for text, supervised in sample)
        print("what is supervised, in brackets: " + CONTROL_CHARACTER.sub(_escaped, shown), flush=True)
    return Outcome(
        counts=counts,
        about={
            "kind": spec.kind,
            "pad_id": chat.pad_id,
            "train_on": spec.train_on,
            "path": "fast" if encoder.batched else "reference",
            "why": encoder.why,
            "parity_rows": encoder.compared,
            "rows_by_reference": encoder.left,
            "samples": samples,
        },
        records=() if spec.most_refused is None else (QUARANTINE,),
    )


def _encoded(
    spec: TokenizeSpec, work: WorkFolder, tables: dict[str, pa.Table], chat: ChatTokenizer
) -> tuple["_Encoder", dict[str, Any], list[list[tuple[str, bool]]]]:
    """All written; with the encoder that did it, counts by split, and samples."""
    encoder = _Encoder(spec, chat)
    try:
        return encoder, *_write(spec, work, tables, encoder)
    except _Differs as difference:
        print(f"batched encoding differs, so that all is encoded again one by one: {difference}", flush=True)
        encoder = _Encoder(spec, chat, unbatched_because=str(difference))
        return encoder, *_write(spec, work, tables, encoder)


def _write(
    spec: TokenizeSpec, work: WorkFolder, tables: dict[str, pa.Table], encoder: "_Encoder"
) -> tuple[dict[str, Any], list[list[tuple[str, bool]]]]:
    """Counts by split, and samples."""
    if spec.most_refused is None:
        return _write_splits(spec, work, tables, encoder, None)
    with (work.payload / QUARANTINE).open("w", encoding="utf-8") as file:
        quarantine = Quarantine(file)
        counts, samples = _write_splits(spec, work, tables, encoder, quarantine)
    rows = sum(own["rows"] for own in counts.values())
    quarantine.check_limit(rows, rows, spec.most_refused, work.folder / QUARANTINE)
    return counts, samples


def _write_splits(
    spec: TokenizeSpec,
    work: WorkFolder,
    tables: dict[str, pa.Table],
    encoder: "_Encoder",
    quarantine: Quarantine | None,
) -> tuple[dict[str, Any], list[list[tuple[str, bool]]]]:
    counts: dict[str, Any] = {}
    samples: list[list[tuple[str, bool]]] = []
    for split in SPLITS:
        own = Counter(dict.fromkeys(COUNTED, 0))
        batches = tables[split].to_batches()
        earlier = sum(len(batch) for part in range(1, spec.part) for batch in part_of(batches, part, spec.parts))
        groups = list(groups_of(part_of(batches, spec.part, spec.parts), tables[split].schema))
        with TokenWriter(work.payload, split) as writer:
            for number, group in enumerate(progress(groups, f"tokenizing {split}", "groups of rows", len(groups))):
                if quarantine is None:
                    rows, refused = encoder.encode(group, number), []
                else:
                    rows, refused = encoder.encode_or_refuse(group, number)
                for place, why in refused:
                    raw = RawRow("row", earlier + own["rows"] + place + 1, group.slice(place, 1).to_pylist()[0])
                    quarantine.add(split, raw, Malformed(why.reason, str(why)))
                own["refused"] += len(refused)
                writer.write(rows)
                supervised = rows.supervised_tokens
                own["rows"] += len(group)
                own["tokens"] += len(rows.sequences.ids)
                own["supervised_tokens"] += int(supervised.sum())
                own["control_text"] += int(rows.control_text.sum())
                own["nothing_supervised"] += int((supervised == 0).sum()) - len(refused)
                if split == "train" and spec.part == 1 and len(samples) < SAMPLES:
                    samples += encoder.samples(rows, SAMPLES - len(samples))
        counts[split] = dict(own)
    return counts, samples


def _count_left_out(spec: TokenizeSpec, tables: dict[str, pa.Table], chat: ChatTokenizer) -> str:
    """Of how many rows of this part the template leaves a turn out."""
    found = rows = 0
    for table in tables.values():
        for group in groups_of(part_of(table.to_batches(), spec.part, spec.parts), table.schema):
            turns = _turns(spec, group)
            left_out = [
                bool(chat.left_out(*row)) for row in zip(turns.messages(), turns.tools.to_pylist(), strict=True)
            ]
            found += int(np.array(left_out).reshape(len(group), -1).any(1).sum())
            rows += len(group)
    return f"{found} of {rows} rows"


def _turns(spec: TokenizeSpec, table: pa.Table) -> Turns:
    by_kind = {"preference": pairs, "unpaired": completed}
    return by_kind[spec.kind](table) if spec.kind in by_kind else conversations(table, spec.train_on)


def _escaped(match: re.Match[str]) -> str:
    """A character that a terminal might obey, as one would write it down."""
    return match[0].encode("unicode_escape").decode()


class _Differs(Exception):
    """Batched encoding and the ordinary path give different tokens; the message says where."""


class _Encoder:
    """Tables to rows of tokens.

    Attributes:
        batched: encodes batches at once, where that is proved.
        why: why it isn't.
        compared: conversations that were encoded both ways.
        left: conversations that `batched` left to the ordinary path.
    """

    def __init__(self, spec: TokenizeSpec, chat: ChatTokenizer, unbatched_because: str = ""):
        self._spec, self._chat = spec, chat
        self.batched, self.why = (None, unbatched_because) if unbatched_because else batched_encoder(chat)
        self.compared = self.left = 0
        if self.batched is None:
            print(f"encoded row by row: {self.why}", flush=True)

    def encode(self, table: pa.Table, number: int) -> TokenRows:
        """
        Args:
            number: of the table among those of its split.
        Raises:
            _Differs: see there.
        """
        kind = self._spec.kind
        turns = _turns(self._spec, table)
        control = np.zeros(len(turns), bool)
        if self.batched is None:
            encoded, one_by_one = encode_turns(self._chat, turns), np.arange(len(turns))
        else:
            encoded, one_by_one = self.batched.encode(turns)
            self.left += len(one_by_one)
            self._compare(turns, encoded, number)
        # What holds a control token is never encoded otherwise.
        control[one_by_one] = holds_control(self._chat, turns.rows(one_by_one))
        names = pa.concat_arrays([chunk.cast(pa.string()) for chunk in table.column("id").chunks])
        if kind not in ("preference", "unpaired"):
            return of_conversations(names, encoded, control)
        if kind == "preference":
            rows = of_pairs(names, encoded, control.reshape(-1, 2).any(1))
        else:
            rows = of_completions(names, encoded, table["label"].combine_chunks(), control)
        return replace(rows, source=table["source"].combine_chunks())

    def encode_or_refuse(self, table: pa.Table, number: int) -> tuple[TokenRows, list[tuple[int, Refused]]]:
        """The same; a row that the template refuses is a sequence without tokens, and comes back with the reason."""
        try:
            return self.encode(table, number), []
        except Refused:
            refused = list(self._refused(table))
        kept = np.delete(np.arange(len(table)), [place for place, _ in refused])
        names = pa.concat_arrays([chunk.cast(pa.string()) for chunk in table.column("id").chunks])
        return spread(self.encode(table.take(kept), number), kept, names), refused

    def _refused(self, table: pa.Table) -> Iterator[tuple[int, Refused]]:
        for place in range(len(table)):
            try:
                encode_turns(self._chat, _turns(self._spec, table.slice(place, 1)))
            except Refused as why:
                yield place, why

    def _compare(self, turns: Turns, encoded: EncodedBatch, number: int) -> None:
        if number % COMPARED_EVERY:
            return
        count = min(COMPARED if number else COMPARED_FIRST, len(turns))
        # The first ones of the split, later a sample of the group.
        rows = np.linspace(0, len(turns) - 1, count).astype(np.int64) if number else np.arange(count)
        expected, found = encode_turns(self._chat, turns.rows(rows)), encoded.rows(rows)
        self.compared += count
        for at, row in enumerate(rows.tolist()):
            (a, b), (c, d) = expected.offsets[at : at + 2], found.offsets[at : at + 2]
            for what in ("ids", "supervised", "ends_turn"):
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
        """`count` rows as texts, each with whether it is supervised: first short ones, then long ones in excerpts."""
        sequences = rows.sequences
        found = []
        order = np.argsort(sequences.lengths > SAMPLE_TOKENS, kind="stable")
        for number in order[sequences.lengths[order] > 0][:count].tolist():
            start, end = sequences.offsets[number : number + 2]
            ids, supervised = sequences.ids[start:end], sequences.supervised[start:end]
            shown = _shown(supervised)
            edges = np.flatnonzero(np.diff(supervised) | np.diff(shown)) + 1
            found.append(
                [
                    (self._chat.text(ids[a:b]) if shown[a] else f"[… {b - a} tokens …]", bool(supervised[a]))
                    for a, b in pairwise([0, *edges.tolist(), len(ids)])
                    if a < b
                ]
            )
        return found


def _shown(supervised: np.ndarray) -> np.ndarray:
    """Which tokens of a row are shown: all of a short one; of a long one those around the ends of its first and its last
    supervised span, or its own where it has none.

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
