"""The format of packed shards: Arrow IPC files of fixed-length rows, which are read as views.

    input_ids        fixed_size_list<int32>[L]
    labels           fixed_size_list<int32>[L]   the token itself where loss is taken, else -100 (not shifted)
    attention_mask   fixed_size_list<int8>[L]    1 = token, 0 = padding
    segment_lengths  list<int32>                 the documents in this row, in order
    prefix_lengths   list<int32>                 for each segment, the tokens of its prefix (0 = none)

That is format 3.0, for conversations. In format 3.1 tokens that sequences share are stored once, and segments form trees
(`segments` has a picture). Conversations whose template rewrites earlier turns (`tokenization.encode_rows`) have one more
column, preferences two:

    prefix_segments  list<int32>                 for each segment, the segment of the row whose sequence its prefix is of
                                                 (itself if it has no prefix)
    completions      list<int32>                 chosen, rejected, chosen, rejected, ... of the row's pairs: the segment that
                                                 each ends with

Conversations with turns of other weights in the loss than 0 and 1 have format 3.2: that of trees with one more column,

    loss_weights     fixed_size_list<float32>[L] the weight of each label, 0 where no loss is taken

A segment's sequence is its prefix and its own tokens; a completion's sequence is that of its last segment, and begins with the
prompt. CD over EF and CD over CG, both after the prompt ab, are a tree of seven tokens:

    input_ids        a b C D E F G
    segment_lengths  [4, 2, 1]      prefix_lengths [0, 2, 3]    prefix_segments [0, 0, 0]    completions [0, 1, 0, 2]

Completions share leading tokens that are equal in id and supervision, so a token's label holds for every completion that
contains it. Equal completions end with the same segment.

A shard holds rows of one length; with several lengths, the shards of shorter rows come first. `documents.arrow` beside the
shards lists the conversations or pairs in the order of the rows and of `completions`: split, row, id, tokens, supervised
tokens, and `source`, the number of its source in the corpus, from 0. Tokens that pairs share count for the first of them.

Completions with a label (manifest kind `unpaired`) have format 3.1 too: the second completion of each pair is that of another
prompt, and `documents.arrow` has one more column, `label`: whether the first completion is good. Pairs of a corpus with ratings
have one, `margin`: by how much the chosen completion is rated higher, null for pairs without ratings.
"""

import numpy as np
import pyarrow as pa

# By manifest kind, and in 3.1 with the columns of trees.
TREE_VERSION, WEIGHTED_VERSION = "3.1", "3.2"
FORMAT_VERSIONS = {
    "sft": ("3.0", TREE_VERSION, WEIGHTED_VERSION),
    "preference": (TREE_VERSION,),
    "unpaired": (TREE_VERSION,),
}
RAW_FORMAT_VERSION = "2.0"
IGNORED = -100
SPLITS = ("train", "held_out")
# A shard is some 300 MB; it is written in batches that fit the CPU's cache.
TOKENS_PER_SHARD = 2**25
TOKENS_PER_BATCH = 2**19

# Columns of `documents.arrow`, with that of completions with a label, and of pairs with ratings.
DOCUMENTS = {
    "split": pa.string(),
    "row": pa.int32(),
    "id": pa.string(),
    "tokens": pa.int32(),
    "supervised": pa.int32(),
    "source": pa.int16(),
}
LABEL, MARGIN = {"label": pa.bool_()}, {"margin": pa.float64()}
# Those that are copied from the index of tokens.
COPIED = ("id", "source", "label", "margin")


def documents_schema(kind: str, rated: bool = False) -> pa.Schema:
    return pa.schema(DOCUMENTS | (LABEL if kind == "unpaired" else {}) | (MARGIN if rated else {}))


def list_columns(kind: str, version: str) -> tuple[str, ...]:
    """The columns of lists that shards of a manifest's kind and format version have.

    >>> list_columns("sft", "3.0"), list_columns("preference", "3.1")[2:]
    (('segment_lengths', 'prefix_lengths'), ('prefix_segments', 'completions'))
    """
    trees = ("prefix_segments", *(() if kind == "sft" else ("completions",))) if version >= TREE_VERSION else ()
    return ("segment_lengths", "prefix_lengths", *trees)


def schema(row_length: int, lists: tuple[str, ...], weighted: bool = False) -> pa.Schema:
    """The schema of a shard of rows of `row_length` tokens, with these columns of lists, with or without weights."""
    tokens = {"input_ids": pa.int32(), "labels": pa.int32(), "attention_mask": pa.int8()}
    if weighted:
        tokens["loss_weights"] = pa.float32()
    columns = {name: pa.list_(kind, row_length) for name, kind in tokens.items()}
    return pa.schema(columns | dict.fromkeys(lists, pa.list_(pa.int32())))


def row_batch(
    ids_RL: np.ndarray,
    labels_RL: np.ndarray,
    fill_R: np.ndarray,
    segments_R1: np.ndarray,
    segment_lengths_S: np.ndarray,
    prefix_lengths_S: np.ndarray,
    prefix_segments_S: np.ndarray | None = None,
    completions: tuple[np.ndarray, np.ndarray] | None = None,
    weights_RL: np.ndarray | None = None,
) -> pa.RecordBatch:
    """R rows of L tokens as a record batch.

    Args:
        ids_RL, labels_RL: int32[R, L], padding included.
        fill_R: tokens of each row, without padding.
        segments_R1: int32[R + 1], the offsets of the rows in the S segments.
        segment_lengths_S, prefix_lengths_S: int32[S].
        prefix_segments_S: int32[S]; None without trees.
        completions: for preferences, int32[C] completions, and int32[R + 1], the offsets of the rows in them.
        weights_RL: float32[R, L], the weights of the labels; None if all are 1.
    """
    length = ids_RL.shape[1]
    blocks = [ids_RL, labels_RL, (np.arange(length) < fill_R[:, None]).view(np.int8)]
    if weights_RL is not None:
        blocks.append(weights_RL)
    columns: list[pa.Array] = [pa.FixedSizeListArray.from_arrays(block.reshape(-1), length) for block in blocks]
    lists = {"segment_lengths": (segments_R1, segment_lengths_S), "prefix_lengths": (segments_R1, prefix_lengths_S)}
    if prefix_segments_S is not None:
        lists["prefix_segments"] = segments_R1, prefix_segments_S
    if completions is not None:
        completions_C, completions_R1 = completions
        lists["completions"] = completions_R1, completions_C
    columns += [
        pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
        for offsets, values in lists.values()
    ]
    return pa.record_batch(columns, schema=schema(length, tuple(lists), weights_RL is not None))
