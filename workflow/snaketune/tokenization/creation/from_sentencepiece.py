"""A sentencepiece model as a fast tokenizer, piece for piece.

transformers' converter finds the merges; the rest is put together here, because what the stock conversion does with
spaces loses text: sentencepiece writes a space as `▁` (U+2581), so that a `▁` in the text comes back as a space. In the
fast tokenizer, pieces hold real spaces, nothing is replaced, and `▁` is one more character spelled in bytes. On texts
without it the ids are sentencepiece's own, which `parity` checks.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram

from snaketune.tokenization.creation.train import CONTROL, PAD, TURN_END, UNK

METASPACE = "▁"
# Below the cost of any spelling. A unigram model takes every piece for text, control and byte pieces too.
NEVER = -1e4


def converted(model: bytes) -> Tokenizer:
    """Build the fast tokenizer of a sentencepiece model trained by `train`."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.convert_slow_tokenizer import generate_merges

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    unspoken = {p.piece for p in proto.pieces if p.type not in (kinds.NORMAL, kinds.USER_DEFINED)}
    named = [(p.piece if p.piece in unspoken else p.piece.replace(METASPACE, " "), p.score) for p in proto.pieces]
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        vocab = {piece: id for id, (piece, _) in enumerate(named)}
        scores = {piece: score for piece, score in named if piece not in unspoken}
        merges = generate_merges(vocab, scores, skip_tokens=unspoken)
        tokenizer = Tokenizer(BPE(vocab, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    else:
        scored = [(piece, NEVER if piece in unspoken else score) for piece, score in named]
        tokenizer = Tokenizer(Unigram(scored, unk_id=0, byte_fallback=True))
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
