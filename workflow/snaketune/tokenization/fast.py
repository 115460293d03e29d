"""A sentencepiece model as a fast tokenizer, piece for piece.

transformers' converter finds the merges; the rest is put together here, because what the stock conversion does with
spaces loses text: sentencepiece writes a space as `▁` (U+2581), so that a `▁` in the text comes back as a space. In the
fast tokenizer, pieces hold real spaces, nothing is replaced, and `▁` is one more character spelled in bytes. On texts
without it the ids are sentencepiece's own, which `parity` checks.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram

from snaketune.errors import SnaketuneError
from snaketune.tokenization.train import CONTROL, PAD, TURN_END, UNK

SPACE = "▁"
# No piece goes on after a space: spaces open a word. Words are what the fast tokenizer caches.
WORDS = Regex(r" *[^ ]+| +")
# Below the cost of any spelling. A unigram model takes every piece for text, control and byte pieces too.
NEVER = -1e4


def fast_tokenizer(model: bytes) -> Tokenizer:
    """Build the fast tokenizer of a sentencepiece model trained by `train`."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.convert_slow_tokenizer import generate_merges

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    named = [(p.piece, p.score) if p.type != kinds.NORMAL else (p.piece.replace(SPACE, " "), p.score) for p in proto.pieces]
    unspoken = {p.piece for p in proto.pieces if p.type != kinds.NORMAL}
    for piece, _ in named:
        if piece not in unspoken and " " in piece.lstrip(" "):
            raise SnaketuneError(f"the trained vocabulary has a piece with a space inside, {piece!r}; this is a bug")
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        vocab = {piece: id for id, (piece, _) in enumerate(named)}
        scores = {piece: score for piece, score in named if piece not in unspoken}
        merges = generate_merges(vocab, scores, skip_tokens=unspoken)
        tokenizer = Tokenizer(BPE(vocab, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    else:
        scored = [(piece, NEVER if piece in unspoken else score) for piece, score in named]
        tokenizer = Tokenizer(Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(WORDS, behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def save(tokenizer: Tokenizer, template: str, folder: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads."""
    # Not from `transformers` itself, which would import torch.
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    TokenizersBackend(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
