"""The format of packed shards, manifest v3.0: Arrow IPC files of fixed-length rows, so that a row is a view.

    input_ids        fixed_size_list<int32>[L]
    labels           fixed_size_list<int32>[L]   the token itself where loss is taken, else -100 (not shifted)
    attention_mask   fixed_size_list<int8>[L]    1 = token, 0 = padding
    segment_lengths  list<int32>                 the documents in this row, in order
    prefix_lengths   list<int32>                 for each segment, the leading tokens it also sees (0 = none)

Shards hold rows of one length; where there are several lengths, those of shorter rows come first. `documents.arrow` beside
the shards tells which conversation or pair is where: split, row, id, tokens, supervised tokens, in the order of the rows.
"""

import numpy as np
import pyarrow as pa

FORMAT_VERSION = "3.0"
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


def schema(row_length: int) -> pa.Schema:
    """The columns of a shard of rows of `row_length` tokens."""
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), row_length)),
            ("labels", pa.list_(pa.int32(), row_length)),
            ("attention_mask", pa.list_(pa.int8(), row_length)),
            ("segment_lengths", pa.list_(pa.int32())),
            ("prefix_lengths", pa.list_(pa.int32())),
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
) -> pa.RecordBatch:
    """R rows of L tokens as a record batch.

    Args:
        ids_RL, labels_RL: int32[R, L], padding included.
        fill_R: tokens of each row, without padding.
        segments_R1: int32[R + 1], where the segments of each row begin among all S.
        segment_lengths_S, prefix_lengths_S: int32[S].
    """
    length = ids_RL.shape[1]
    blocks = (ids_RL, labels_RL, (np.arange(length) < fill_R[:, None]).view(np.int8))
    columns: list[pa.Array] = [pa.FixedSizeListArray.from_arrays(block.reshape(-1), length) for block in blocks]
    columns += [
        pa.ListArray.from_arrays(pa.array(segments_R1, pa.int32()), pa.array(values, pa.int32()))
        for values in (segment_lengths_S, prefix_lengths_S)
    ]
    return pa.record_batch(columns, schema=schema(length))
