"""A new sentencepiece vocabulary, trained on messages.

Speeds for a vocabulary of 32,000 on 97 MB: BPE 8 s, unigram 67 s. All texts are in memory, about three times their size.

Settings that matter: nothing is normalized, no space is added or removed, and what the vocabulary lacks is spelled in
bytes, so that decoding gives back what was encoded. The trainer's reserved characters (U+2047, U+2581, U+2585 and NUL),
for which sentencepiece would skip a whole text, are left out of what it learns from, and counted; in use they are
spelled in bytes.
"""

import io
import re
from collections.abc import Iterable, Iterator

from snaketune.errors import SnaketuneError
from snaketune.stages.specs import TokenizerSpec

UNK, PAD, TURN_START, TURN_END = "<unk>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CONTROL = (UNK, PAD, TURN_END, TURN_START)
RESERVED = re.compile("[\\x00\\u2047\\u2581\\u2585]")
# Unigram scores are rounded to this, so that their sums are exact in sentencepiece's 32 bits as in the fast tokenizer's 64,
# and ties are ties in both (44 of 5,649 texts differed without). Exact up to sums of 2**24 / 2**7, some 15,000 tokens.
SCORE_STEP = 1 / 128
# The sums over threads are rounded in their order: as many on every machine, whatever its cores.
THREADS = 8


class Texts:
    """The texts to learn from, and how many reserved characters were left out of them."""

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

    # In a unigram model the control and byte pieces must cost more than their spelling, so that has to exist (see `convert`).
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
            # It ends every template's role line. A piece across it would make the first token of an answer one that
            # generation, which begins after the line, could never write.
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 30,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error), spec, texts) from None
    return _with_rounded_scores(model.getvalue()) if spec.model == "unigram" else model.getvalue()


def _with_rounded_scores(model: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score / SCORE_STEP) * SCORE_STEP
    return proto.SerializeToString(deterministic=True)


def _explained(message: str, spec: TokenizerSpec, texts: Texts) -> SnaketuneError:
    if found := re.search(r"value <= (\d+)", message):
        return SnaketuneError(
            f"tokenizers.train.vocab_size: {spec.vocab_size} is more than {texts.bytes / 1e6:.2f} MB of text can fill; "
            f"the largest that works is {found[1]}"
        )
    if found := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        return SnaketuneError(
            f"tokenizers.train.vocab_size: {found[1]} is too small for the characters of the corpora; the smallest that "
            f"works is {found[2]}, or lower train.character_coverage"
        )
    if not texts.count or "sentences_.empty()" in message:
        return SnaketuneError("tokenizers.train.corpora: their train splits hold no text to learn from")
    return SnaketuneError(f"tokenizers.train: sentencepiece can't train on these texts: {message}")
