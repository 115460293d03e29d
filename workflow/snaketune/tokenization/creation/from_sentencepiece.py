"""Conversion of a sentencepiece model to a fast tokenizer with the same pieces.

transformers' converter generates the merges; the rest is built here, because the stock conversion isn't lossless for spaces:
sentencepiece writes a space as `▁` (U+2581), so a `▁` in the text is decoded as a space. In this fast tokenizer, pieces contain
real spaces, nothing is replaced, and `▁` is encoded in bytes. On texts without `▁` the ids are those of sentencepiece, which
`parity` checks.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram

from snaketune.tokenization.creation.train import CONTROL, PAD, TURN_END, UNK

METASPACE = "▁"
# A score below that of any other path: a unigram model matches every piece in text, also control and byte pieces.
UNREACHABLE = -1e4


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
