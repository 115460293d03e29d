"""Training of a sentencepiece vocabulary on messages, its conversion to a fast tokenizer, and the comparison of the two.

Time for a vocabulary of 32,000 on 97 MB: BPE 8 s, unigram 67 s. All texts are in memory, about three times their size.

The settings make the tokenizer lossless: nothing is normalized, no space is added or removed, and characters outside the
vocabulary are encoded in bytes. sentencepiece would skip a whole text with one of the trainer's reserved characters (U+2047,
U+2581, U+2585 and NUL), so these are removed from the training texts and counted; the tokenizer encodes them in bytes.

transformers' converter generates the merges of the fast tokenizer; the rest is built here, because the stock conversion isn't
lossless for spaces: sentencepiece writes a space as `▁` (U+2581), so a `▁` in the text is decoded as a space. In this fast
tokenizer, pieces contain real spaces, nothing is replaced, and `▁` is encoded in bytes. On texts without `▁` the ids are those
of sentencepiece. For the comparison texts are split at `▁`, which is expected as its three bytes. About 3 MB/s; at most
MAX_BYTES are compared.
"""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram

from snaketune.errors import SnaketuneError
from snaketune.stages.specs import TokenizerSpec

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

UNK, PAD, TURN_START, TURN_END = "<unk>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CONTROL = (UNK, PAD, TURN_END, TURN_START)
RESERVED = re.compile("[\\x00\\u2047\\u2581\\u2585]")
# Unigram scores are rounded to multiples of this, so that their sums are exact both in sentencepiece's 32 bits and in the fast
# tokenizer's 64, and ties are ties in both (otherwise 44 of 5,649 texts differed). Exact up to sums of 2**24 / 2**7, some
# 15,000 tokens.
SCORE_STEP = 1 / 128
# The rounding of sums depends on the number of threads, so the number is the same on every machine.
THREADS = 8


class Texts:
    """The training texts without reserved characters, with counts of texts, bytes and removed characters."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.count = self.bytes = self.reserved = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            learnable, reserved = RESERVED.subn("", text)
            self.reserved += reserved
            self.count += 1
            self.bytes += len(text.encode())
            if learnable:
                yield learnable


def train(texts: Texts, spec: TokenizerSpec) -> bytes:
    """Train a sentencepiece model; the same texts give the same bytes.

    Raises:
        SnaketuneError: the texts can't fill the vocabulary, or it can't hold their characters.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    # In a unigram model control and byte pieces must score below their spelling, so their characters must be in the vocabulary
    # (see `convert`).
    required = set("".join(CONTROL) + "<0x0123456789ABCDEF>") if spec.model == "unigram" else set()
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=spec.model,
            vocab_size=spec.vocab_size,
            character_coverage=spec.character_coverage,
            split_digits=spec.split_digits,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            required_chars="".join(sorted(required)),
            unk_id=0,
            pad_id=1,
            eos_id=2,
            bos_id=-1,
            unk_piece=UNK,
            unk_surface=UNK,
            pad_piece=PAD,
            eos_piece=TURN_END,
            control_symbols=[TURN_START],
            # A newline ends the role line of templates. A piece across it would be the first token of answers in training, but
            # can't be generated, because generation starts after the newline.
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 30,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), spec, texts) from None
    if spec.model == "bpe":
        return model.getvalue()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    for piece in proto.pieces:
        piece.score = round(piece.score / SCORE_STEP) * SCORE_STEP
    return proto.SerializeToString(deterministic=True)


def _training_error(message: str, spec: TokenizerSpec, texts: Texts) -> SnaketuneError:
    if numbers := re.search(r"value <= (\d+)", message):
        return SnaketuneError(
            f"tokenizers.train.vocab_size: {spec.vocab_size} is more than {texts.bytes / 1e6:.2f} MB of text can fill; "
            f"the largest that works is {numbers[1]}"
        )
    if numbers := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        return SnaketuneError(
            f"tokenizers.train.vocab_size: {numbers[1]} is too small for the characters of the corpora; the smallest that "
            f"works is {numbers[2]}, or lower train.character_coverage"
        )
    if not texts.count or "sentences_.empty()" in message:
        return SnaketuneError("tokenizers.train.corpora: their train splits have no text to learn from")
    return SnaketuneError(f"tokenizers.train: sentencepiece can't train on these texts: {message}")


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
