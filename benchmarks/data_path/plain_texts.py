"""Encoding of plain texts without a template, for comparing the encoder's speed with sentencepiece's."""

from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.tokenization.batched.chunks import ChunkEncoder
from snaketune.tokenization.batched.separable import METASPACE, NotSeparable, separable


class PlainTexts:
    """Encoder of plain texts without a template; strings that look like added tokens are text.

    Memory: some 30 bytes per byte of the texts given at once; a few MB at once are fastest.
    """

    def __init__(self, description: dict[str, Any]):
        """
        Args:
            description: `tokenizer.json`, parsed.
        Raises:
            NotSeparable: no proof covers it, or it treats a text's start, or `▁`, in a way of its own.
        """
        found = separable(description)
        if found.prefix != "none" or found.reserved.search(METASPACE.encode()):
            raise NotSeparable("it writes spaces as another character")
        self._chunks = ChunkEncoder(found)

    def encode(self, texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Encode n texts; return their ids end to end, int32[t], and their offsets, int64[n + 1]."""
        _, offsets, data = texts.buffers()
        starts = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
        start, end = int(starts[0]), int(starts[-1])
        encoded = self._chunks.encode((data or pa.py_buffer(b"")).slice(start, end - start), [starts - start])
        return encoded.ids, encoded.tokens[np.searchsorted(encoded.cuts, starts - start)].astype(np.int64)
