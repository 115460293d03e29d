"""Whether a tokenizer is the one that a base has learned with, by what the base's config says of tokens."""

import numpy as np
from transformers import PretrainedConfig

from snaketune.stages.gpu_needs import Finding
from snaketune.tokenization.chat import ChatTokenizer

# Of the base's embeddings: so many more are what somebody adds for a template, so many fewer what pads a vocabulary.
MORE, FEWER = 0.01, 0.5


def check_tokenizer_match(key: str, chat: ChatTokenizer, config: PretrainedConfig) -> list[Finding]:
    """What only a tokenizer of some other model would do; the training itself makes embeddings for whatever it has.

    Args:
        key: of the run.
        config: of the base.
    """
    text = config.get_text_config()
    size, found = text.vocab_size, []
    if chat.vocab_size > (1 + MORE) * size:
        found.append(f"it has {chat.vocab_size:,} tokens, and the base knows {size:,}: the others begin untrained")
    elif chat.vocab_size < FEWER * size:
        found.append(f"it has {chat.vocab_size:,} tokens, of the {size:,} that the base knows")
    ends = config.eos_token_id if config.eos_token_id is not None else text.eos_token_id
    for end in ends if isinstance(ends, list | tuple) else () if ends is None else (ends,):
        if end < chat.vocab_size and not chat.is_control(np.array([end]))[0]:
            found.append(f"what ends the base's texts, token {end}, is the word {chat.text_of(end)!r} in it")
    return [
        Finding(
            key=f"{key}.tokenizer",
            problem=f"it isn't the base's own: {'; '.join(found)}",
            do="adopt the base's (`tokenizers.NAME.adopt`), unless its embeddings are to be learned anew",
            certain=False,
        )
    ] * bool(found)
