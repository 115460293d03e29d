"""Vocabulary check of an external reference model, one that isn't a result of this workflow."""

from collections.abc import Iterable

import numpy as np

from snaketune.config.training_runs import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import own_tokenizer
from snaketune.packing.reader import PackedRows
from snaketune.tokenization.chat import ChatTokenizer


def check_same_tokens(reference: Pretrained, chat: ChatTokenizer, packs: Iterable[PackedRows]) -> None:
    """Check that every token id in the pairs stands for the same text in the reference's tokenizer.

    Args:
        chat: tokenizer of the pairs.
        packs: the packed rows of all splits; only tokens that occur in them are checked.
    Raises:
        SnaketuneError: some tokens differ, or the reference has no tokenizer.json.
    """
    own = own_tokenizer(reference)
    if own is None:
        raise SnaketuneError(
            f"dpo.reference: {reference.path!r} has no tokenizer.json, so its vocabulary can't be compared with that of the "
            "pairs; add the file, or choose a model that has one"
        )
    used = set().union(*(np.unique(batch["input_ids"]).tolist() for rows in packs for batch in rows.batches))
    if chat.pad_id not in chat.stop_ids:
        # It is only padding: no document contains it.
        used.discard(chat.pad_id)
    if other := sorted(id for id in used if own.id_to_token(id) != chat.id_to_token(id)):
        first = other[0]
        raise SnaketuneError(
            f"dpo.reference: {len(other)} of {len(used)} tokens in the pairs are different in {reference.path!r}, for instance "
            f"{first}, which is {chat.id_to_token(first)!r} here and {own.id_to_token(first)!r} there; a reference needs the "
            "same vocabulary as the SFT run"
        )
