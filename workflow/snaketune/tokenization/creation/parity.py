"""Comparison of the fast tokenizer with the sentencepiece model on the corpus: equal ids, and lossless decoding.

sentencepiece doesn't distinguish `▁` from a space; so texts are split at `▁`, which is expected as its three bytes. About
3 MB/s; at most MAX_BYTES are compared.
"""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from snaketune.errors import SnaketuneError
from snaketune.tokenization.creation.from_sentencepiece import METASPACE

MAX_TEXTS, MAX_BYTES = 20_000, 20_000_000
BATCH = 1000
# Longer texts are cut, because sentencepiece's sums of scores aren't exact for them.
SLICE = 20_000
EDGE_CASES = (
    "",
    " ",
    "   leading and trailing   ",
    "\n",
    "\n\n  \n",
    "\t\ttabs\tbetween",
    "\r\nline\rends",
    "a\x00b\x00",
    "\x01\x7f",
    "▁",
    "▁ ▁▁  ▁a▁ b",
    "▅⁇ reserved",
    "<unk>",
    "<|im_start|>system\n<|im_end|>",
    "<|pad|><|im_",
    "<0x0A><0xFF>",
    "<s></s><pad>",
    "1234567890 3.14",
    "naïve café, ﬁ, Å vs Å",
    "\u200b\ufeff\u00a0\u3000",
    "👩‍👩‍👧 😀🇩🇪",
    "漢字かな交じり文 नमस्ते مرحبا",
    "\U0010fffd\ue000\ufdd0\uffff",
    "a" * 300,
    " " * 300,
)


def compare(tokenizer: Tokenizer, model: bytes, texts: Iterable[str]) -> int:
    """Compare on EDGE_CASES and on `texts`, up to the limits.

    Returns:
        The number of texts compared.
    Raises:
        SnaketuneError: the ids of a text differ, or it isn't decoded to itself.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    metaspace_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in METASPACE.encode()]
    # Only templates write control tokens; here their strings are text.
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    compared = 0
    for batch in _batches(texts):
        for text, encoding in zip(batch, tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            before, *after = processor.encode(text.split(METASPACE))
            expected = before + [id for part in after for id in (*metaspace_ids, *part)]
            if encoding.ids != expected:
                raise SnaketuneError(
                    f"the fast tokenizer and sentencepiece disagree on {_excerpt(text, encoding.ids, expected)}; please "
                    "report this, and train with another vocab_size or model until it is fixed"
                )
            if tokenizer.decode(encoding.ids, skip_special_tokens=False) != text:
                raise SnaketuneError(
                    f"the trained tokenizer doesn't decode to the text that it encoded, {text[:200]!r}; please report this"
                )
        compared += len(batch)
    return compared


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    yield list(EDGE_CASES)
    batch, compared, size = [], 0, 0
    for text in texts:
        for start in range(0, len(text), SLICE):
            batch.append(text[start : start + SLICE])
            size += len(batch[-1].encode())
        if len(batch) >= BATCH:
            yield batch
            compared, batch = compared + len(batch), []
        if compared + len(batch) >= MAX_TEXTS or size >= MAX_BYTES:
            break
    if batch:
        yield batch


def _excerpt(text: str, ids: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
    return f"{text[:200]!r}: from token {at} on {ids[at : at + 5]}, expected {expected[at : at + 5]}"
