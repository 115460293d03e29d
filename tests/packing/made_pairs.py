"""Synthetic tokenized pairs, packed and read back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.packing.segments import layout_of
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.specs import PackSpec
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.token_rows import pair_rows
from snaketune.tokenization.token_store import TokenWriter
from tests.packing.chain import pack_tokens

# A token, and whether it is supervised.
Token = tuple[int, bool]


@dataclass(frozen=True)
class MadePair:
    """A pair of token sequences; the prompt isn't supervised."""

    prompt: tuple[int, ...]
    chosen: tuple[Token, ...]
    rejected: tuple[Token, ...]

    def sequences(self) -> list[tuple[Token, ...]]:
        return [tuple((token, False) for token in self.prompt) + side for side in (self.chosen, self.rejected)]

    def learned(self) -> list[tuple[Token, ...]]:
        """Return both sequences up to the last supervised token, as they are packed."""
        return [up_to_supervised(sequence) for sequence in self.sequences()]

    @property
    def prefers(self) -> bool:
        """Whether the completions differ in what is packed of them; other pairs are dropped."""
        chosen, rejected = self.learned()
        return chosen != rejected


def up_to_supervised(sequence: tuple[Token, ...]) -> tuple[Token, ...]:
    return sequence[: max((at + 1 for at, (_, supervised) in enumerate(sequence) if supervised), default=0)]


def tokenized(
    folder: Path, train: Sequence[MadePair], held_out: Sequence[MadePair] = (), per_batch: int = 3
) -> Artifact:
    """Return the tokenized artifact of pairs, whose ids are their numbers."""
    folder.mkdir(parents=True)
    counts = {}
    for split, pairs in (("train", train), ("held_out", held_out)):
        counts[split] = {"rows": len(pairs), "tokens": 0}
        with TokenWriter(folder, split) as writer:
            for first in range(0, len(pairs), per_batch):
                some = pairs[first : first + per_batch]
                both = concatenated([encoded(sequence) for pair in some for sequence in pair.sequences()])
                names = pa.array([str(first + at) for at in range(len(some))], pa.string())
                rows = pair_rows(names, both, np.zeros(len(some), bool))
                counts[split]["tokens"] += len(rows.sequences.ids)
                writer.write(rows)
    manifest = {"payload": describe_files(folder), "records": {}, "counts": counts, "pad_id": 0}
    return Artifact(folder.parent / "tokens.json", manifest, folder)


def encoded(sequence: Sequence[Token]) -> EncodedBatch:
    """Return an encoded conversation of these tokens."""
    ids, supervised = np.array([token for token, _ in sequence], np.int32), np.array([s for _, s in sequence], bool)
    return EncodedBatch(ids, np.array([0, len(ids)]), supervised, np.zeros(len(ids), bool))


def packed(folder: Path, pairs: Sequence[MadePair], length: int, overflow: str = "drop", **more) -> Artifact:
    spec = PackSpec(kind="preference", length=length, overflow=overflow)
    return pack_tokens(folder, [tokenized(folder / "tokens", pairs, **more)], spec)


def read_back(pack: Artifact, split: str = "train") -> dict[str, list[tuple[Token, ...]]]:
    """Return the two sequences of each pair, by id, as the shards have them: tokens, and whether they have a label."""
    rows, pairs = open_rows(pack, split), {}
    ids = [document["id"] for document in documents(pack, split)]
    for r in range(len(rows)):
        row = rows[r]
        layout = layout_of([row])
        ends = layout.completions.reshape(-1, 2)
        own, ids = ids[: len(ends)], ids[len(ends) :]
        for pair, both in zip(own, ends, strict=True):
            assert pair not in pairs
            pairs[pair] = []
            for end in both:
                tokens = layout.sequence_tokens(end, np.arange(layout.sequence_lengths[end]))
                labels = row["labels"][tokens]
                assert ((labels == -100) | (labels == row["input_ids"][tokens])).all()
                pairs[pair].append(tuple(zip(row["input_ids"][tokens].tolist(), (labels != -100).tolist())))
    assert not ids
    return pairs
