"""Checks that a tokenizer is the one that a base model was trained with, by the token ids in the model's config."""

import numpy as np
from transformers import PretrainedConfig

from snaketune.stages.findings import Finding
from snaketune.tokenization.chat import ChatTokenizer

# Relative to the base's embeddings: up to MORE tokens may have been added for a template, up to FEWER are padding.
MORE, FEWER = 0.01, 0.5


def check_tokenizer_match(key: str, chat: ChatTokenizer, config: PretrainedConfig) -> list[Finding]:
    """Return a finding if the tokenizer seems to be another model's; the training resizes embeddings to any tokenizer.

    Args:
        key: the run's key.
        config: of the base model.
    """
    text = config.get_text_config()
    size, mismatches = text.vocab_size, []
    if chat.vocab_size > (1 + MORE) * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base only {size:,}: the others start untrained")
    elif chat.vocab_size < FEWER * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base {size:,}")
    ends = config.eos_token_id if config.eos_token_id is not None else text.eos_token_id
    for end in ends if isinstance(ends, list | tuple) else () if ends is None else (ends,):
        if end < chat.vocab_size and not chat.is_control(np.array([end]))[0]:
            mismatches.append(f"the base's end-of-text token {end} is the word {chat.id_to_token(end)!r} in it")
    return [
        Finding(
            key=f"{key}.tokenizer",
            problem=f"it isn't the base's own: {'; '.join(mismatches)}",
            do="adopt the base's (`tokenizers.NAME.adopt`), unless its embeddings are meant to be trained again",
            certain=False,
        )
    ] * bool(mismatches)
