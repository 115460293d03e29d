"""The format of packed shards: Arrow IPC files of fixed-length rows, so that a row is a view.

    input_ids        fixed_size_list<int32>[L]
    labels           fixed_size_list<int32>[L]   the token itself where loss is taken, else -100 (not shifted)
    attention_mask   fixed_size_list<int8>[L]    1 = token, 0 = padding
    segment_lengths  list<int32>                 the documents in this row, in order
    prefix_lengths   list<int32>                 for each segment, the leading tokens it also sees (0 = none)

That is format 3.0, of conversations. Preferences have format 3.1, with two columns more, since what completions have in common
stands once and segments form trees (`segments` has a picture):

    prefix_segments  list<int32>                 for each segment, the one whose sequence its prefix is of, counted within
                                                 the row (itself if it has no prefix)
    completions      list<int32>                 chosen, rejected, chosen, rejected, ... of the row's pairs: the segment that
                                                 each ends with

A segment's sequence is its prefix and its own tokens; a completion's is that of its last segment, from the prompt on. CD over
EF and CD over CG, both after the prompt ab, are a tree of seven tokens:

    input_ids        a b C D E F G
    segment_lengths  [4, 2, 1]      prefix_lengths [0, 2, 3]    prefix_segments [0, 0, 0]    completions [0, 1, 0, 2]

A beginning is shared as far as tokens and supervision agree, so a token's label counts for every completion through it.
Completions that are equal end with the same segment.

Shards hold rows of one length; where there are several lengths, those of shorter rows come first. `documents.arrow` beside
the shards tells which conversation or pair is where: split, row, id, tokens, supervised tokens, in the order of the rows and
of `completions`; of pairs also `source`, which of the corpus' sources they are from, counted from 0. Tokens that pairs share
are counted with the first of them.

Completions with a label (manifest kind `unpaired`) have format 3.1 too: in the place of the rejected completion stands one of
another prompt, and `documents.arrow` has a column more, `label`: whether the first one is good.
"""

import numpy as np
import pyarrow as pa

# By the kind of what is packed.
FORMAT_VERSIONS = {"sft": "3.0", "preference": "3.1", "unpaired": "3.1"}
RAW_FORMAT_VERSION = "2.0"
IGNORED = -100
SPLITS = ("train", "held_out")
# A shard is some 300 MB, and is written in batches that fit a processor's cache.
TOKENS_PER_SHARD = 2**25
TOKENS_PER_BATCH = 2**19

DOCUMENTS = pa.schema(
    [
        ("split", pa.string()),
        ("row", pa.int32()),
        ("id", pa.string()),
        ("tokens", pa.int32()),
        ("supervised", pa.int32()),
    ]
)
# Of pairs, and of completions with a label.
TOLD = {"source": pa.field("source", pa.int16()), "label": pa.field("label", pa.bool_())}


def documents_schema(kind: str) -> pa.Schema:
    """The columns of `documents.arrow`."""
    told = {"sft": (), "preference": ("source",), "unpaired": ("source", "label")}[kind]
    return pa.schema([*DOCUMENTS, *(TOLD[name] for name in told)])


def schema(row_length: int, completions: bool = False) -> pa.Schema:
    """The columns of a shard of rows of `row_length` tokens, with or without completions."""
    lists = ("segment_lengths", "prefix_lengths", *(("prefix_segments", "completions") if completions else ()))
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), row_length)),
            ("labels", pa.list_(pa.int32(), row_length)),
            ("attention_mask", pa.list_(pa.int8(), row_length)),
            *((name, pa.list_(pa.int32())) for name in lists),
        ]
    )


def shard_name(split: str, number: int) -> str:
    """Its file, for instance `train-00000.arrow`."""
    return f"{split}-{number:05d}.arrow"


def row_batch(
    ids_RL: np.ndarray,
    labels_RL: np.ndarray,
    fill_R: np.ndarray,
    segments_R1: np.ndarray,
    segment_lengths_S: np.ndarray,
    prefix_lengths_S: np.ndarray,
    tree: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> pa.RecordBatch:
    """R rows of L tokens as a record batch.

    Args:
        ids_RL, labels_RL: int32[R, L], padding included.
        fill_R: tokens of each row, without padding.
        segments_R1: int32[R + 1], where the segments of each row begin among all S.
        segment_lengths_S, prefix_lengths_S: int32[S].
        tree: of preferences, int32[S] prefix_segments, int32[C] completions, and int32[R + 1], where the completions of each
            row begin.
    """
    length = ids_RL.shape[1]
    blocks = (ids_RL, labels_RL, (np.arange(length) < fill_R[:, None]).view(np.int8))
    columns: list[pa.Array] = [pa.FixedSizeListArray.from_arrays(block.reshape(-1), length) for block in blocks]
    lists = [(segments_R1, segment_lengths_S), (segments_R1, prefix_lengths_S)]
    if tree is not None:
        prefix_segments_S, completions_C, completions_R1 = tree
        lists += [(segments_R1, prefix_segments_S), (completions_R1, completions_C)]
    columns += [
        pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
        for offsets, values in lists
    ]
    return pa.record_batch(columns, schema=schema(length, completions=tree is not None))
