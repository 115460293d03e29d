"""Preference pairs encoded one by one, as a reference for batched encoding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import Message


@dataclass(frozen=True)
class EncodedPair:
    """A preference pair whose sequences are `prompt_ids + chosen_ids` and `prompt_ids + rejected_ids`."""

    prompt_ids: np.ndarray
    chosen_ids: np.ndarray
    chosen_supervised: np.ndarray
    rejected_ids: np.ndarray
    rejected_supervised: np.ndarray


def encode_pairs(
    chat: ChatTokenizer, pairs: Sequence[tuple[list[Message], list[Message], list[Message]]]
) -> list[EncodedPair]:
    """Encode preference pairs.

    The prompt is what both sequences start with, up to the first supervised token of either. Only the completions
    are supervised; assistant turns of the prompt are context.

        prompt + chosen     [ 3 90 5 71 2 5 3 91 5 72  9 2 5]
        prompt + rejected   [ 3 90 5 71 2 5 3 91 5 72 40 2 5]
        prompt_ids          [ 3 90 5 71 2 5 3 91 5]             72 is shared too, but it is supervised
        chosen_ids          [72  9 2 5], supervised [1 1 1 0]
        rejected_ids        [72 40 2 5], supervised [1 1 1 0]

    Args:
        pairs: (prompt, chosen, rejected), each a list of messages.
    """
    conversations = [prompt + completion for prompt, *both in pairs for completion in both]
    encoded_conversations = chat.encode(conversations)
    encoded = []
    for number, (prompt, chosen, rejected) in enumerate(pairs):
        context = _assistant_turns(prompt)
        sequences = encoded_conversations[2 * number : 2 * number + 2]
        masks = []
        for sequence, completion in zip(sequences, (chosen, rejected)):
            if len(sequence.spans) != context + _assistant_turns(completion):
                raise SnaketuneError(
                    f"the chat template marks {len(sequence.spans)} generated blocks where the assistant has "
                    f"{context + _assistant_turns(completion)} turns, so completions can't be told from their prompt; "
                    "pairs need a template with one {% generation %} block per assistant turn"
                )
            masks.append(sequence.mask(sequence.spans[context:]))
        shared = shared_prefix(*(sequence.ids for sequence in sequences))
        shared = min([shared, *(int(mask.argmax()) for mask in masks if mask.any())])
        (chosen_ids, rejected_ids), (chosen_mask, rejected_mask) = [s.ids for s in sequences], masks
        encoded.append(
            EncodedPair(
                prompt_ids=chosen_ids[:shared],
                chosen_ids=chosen_ids[shared:],
                chosen_supervised=chosen_mask[shared:],
                rejected_ids=rejected_ids[shared:],
                rejected_supervised=rejected_mask[shared:],
            )
        )
    return encoded


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements are equal.

    >>> shared_prefix(np.array([3, 90, 5]), np.array([3, 90, 7, 2]))
    2
    """
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _assistant_turns(messages: list[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)
