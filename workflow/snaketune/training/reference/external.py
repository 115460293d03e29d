"""A reference that is no result of this workflow: its tokens must be those of the pairs."""

from collections.abc import Iterable

import numpy as np

from snaketune.config.training_runs import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import own_tokenizer
from snaketune.packing.reader import PackedRows
from snaketune.tokenization.chat import ChatTokenizer


def check_same_tokens(reference: Pretrained, chat: ChatTokenizer, packs: Iterable[PackedRows]) -> None:
    """Refuse a reference that has learned any token of the pairs as another one, or not at all.

    Args:
        chat: the tokenizer that the pairs were tokenized with.
        packs: all of them; tokens that don't occur don't matter.
    Raises:
        SnaketuneError: with some of them; or nobody can tell.
    """
    own = own_tokenizer(reference)
    if own is None:
        raise SnaketuneError(
            f"dpo.reference: {reference.path!r} has no tokenizer.json, so nobody can tell whether its tokens are those of the "
            "pairs; put the file there, or take a model that has one"
        )
    used = set().union(*(np.unique(batch["input_ids"]).tolist() for rows in packs for batch in rows.batches))
    if chat.pad_id not in chat.stop_ids:
        # Free places of rows hold it, and no document does.
        used.discard(chat.pad_id)
    if other := sorted(id for id in used if own.id_to_token(id) != chat.id_to_token(id)):
        first = other[0]
        raise SnaketuneError(
            f"dpo.reference: {len(other)} of {len(used)} tokens in the pairs are others to {reference.path!r}, for instance "
            f"{first}, which is {chat.id_to_token(first)!r} here and {own.id_to_token(first)!r} there; a reference needs the "
            "same vocabulary as the SFT run"
        )
