"""A fast tokenizer with the pieces of a sentencepiece model: conversion, and comparison of the two on the corpus.

transformers' converter generates the merges; the rest is built here, because the stock conversion isn't lossless for spaces:
sentencepiece writes a space as `▁` (U+2581), so a `▁` in the text is decoded as a space. In this fast tokenizer, pieces contain
real spaces, nothing is replaced, and `▁` is encoded in bytes. On texts without `▁` the ids are those of sentencepiece. For the
comparison texts are split at `▁`, which is expected as its three bytes. About 3 MB/s; at most MAX_BYTES are compared.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram

from snaketune.errors import SnaketuneError
from snaketune.tokenization.creation.train import CONTROL, PAD, TURN_END, UNK

METASPACE = "▁"
# A score below that of any other path: a unigram model matches every piece in text, also control and byte pieces.
UNREACHABLE = -1e4
MAX_TEXTS, MAX_BYTES = 20_000, 20_000_000
BATCH = 1000
# Longer texts are cut, because sentencepiece's sums of scores aren't exact for them.
SLICE = 20_000
EDGE_CASES = (
    *(
        "",
        " ",
        "   leading and trailing   ",
        "\n",
        "\n\n  \n",
        "\t\ttabs\tbetween",
        "\r\nline\rends",
        "a\x00b\x00",
        "\x01\x7f",
    ),
    *("▁", "▁ ▁▁  ▁a▁ b", "▅⁇ reserved", "<unk>", "<|im_start|>system\n<|im_end|>", "<|pad|><|im_", "<0x0A><0xFF>"),
    *("<s></s><pad>", "1234567890 3.14", "naïve café, ﬁ, Å vs Å", "\u200b\ufeff\u00a0\u3000", "👩‍👩‍👧 😀🇩🇪"),
    *("漢字かな交じり文 नमस्ते مرحبا", "\U0010fffd\ue000\ufdd0\uffff", "a" * 300, " " * 300),
)


def convert(model: bytes) -> Tokenizer:
    """Build the fast tokenizer of a sentencepiece model trained by `train`."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.convert_slow_tokenizer import generate_merges

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    not_text = {p.piece for p in proto.pieces if p.type not in (kinds.NORMAL, kinds.USER_DEFINED)}
    named = [(p.piece if p.piece in not_text else p.piece.replace(METASPACE, " "), p.score) for p in proto.pieces]
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        vocab = {piece: id for id, (piece, _) in enumerate(named)}
        scores = {piece: score for piece, score in named if piece not in not_text}
        merges = generate_merges(vocab, scores, skip_tokens=not_text)
        tokenizer = Tokenizer(BPE(vocab, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    else:
        scored = [(piece, UNREACHABLE if piece in not_text else score) for piece, score in named]
        tokenizer = Tokenizer(Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def save(tokenizer: Tokenizer, template: str, folder: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads."""
    # Importing it from `transformers` itself would import torch.
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    TokenizersBackend(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def compare(tokenizer: Tokenizer, model: bytes, texts: Iterable[str]) -> int:
    """Compare with the sentencepiece model on EDGE_CASES and on `texts`, up to the limits.

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
        batch += [text[start : start + SLICE] for start in range(0, len(text), SLICE)]
        size += len(text.encode())
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
