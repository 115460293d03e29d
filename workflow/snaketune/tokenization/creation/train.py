"""Training of a sentencepiece vocabulary on messages.

Time for a vocabulary of 32,000 on 97 MB: BPE 8 s, unigram 67 s. All texts are in memory, about three times their size.

The settings make the tokenizer lossless: nothing is normalized, no space is added or removed, and characters outside the
vocabulary are encoded in bytes. sentencepiece would skip a whole text with one of the trainer's reserved characters (U+2047,
U+2581, U+2585 and NUL), so these are removed from the training texts and counted; the tokenizer encodes them in bytes.
"""

import io
import re
from collections.abc import Iterable, Iterator

from snaketune.errors import SnaketuneError
from snaketune.stages.specs import TokenizerSpec

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
    # (see `fast_tokenizer`).
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
