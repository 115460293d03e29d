"""Texts without a template through the encoder's chunks, as sentencepiece takes them: what its speed is measured against."""

from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.tokenization.batched.chunks import ChunkEncoder
from snaketune.tokenization.batched.separable import METASPACE, NotSeparable, separable


class PlainTexts:
    """Encodes plain texts, without a template; what looks like an added token is text.

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
        """The ids of n texts laid end to end, int32[t], and int64[n + 1], where each text's are."""
        _, offsets, data = texts.buffers()
        places = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
        start, end = int(places[0]), int(places[-1])
        encoded = self._chunks.encode((data or pa.py_buffer(b"")).slice(start, end - start), [places - start])
        return encoded.ids, encoded.tokens[np.searchsorted(encoded.cuts, places - start)].astype(np.int64)
