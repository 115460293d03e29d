"""Which prompts are held out: a hash of the prompt decides, so that corpora agree without knowing of each other.

A row is held out by its system text and first user turn. Whatever begins alike stays together: the same question with
another answer, the preference pair about it, a longer version of the conversation. One SHA-256 per row.
"""

import hashlib

from snaketune.corpus.rows import Message


def split_key(opening: list[Message]) -> str:
    """What the split goes by.

    >>> split_key([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    'Hi'
    """
    first_user = next(turn["content"] for turn in opening if turn["role"] == "user")
    return f"{opening[0]['content']}\0{first_user}" if opening[0]["role"] == "system" else first_user


def is_held_out(key: str, *, seed: int, share: float) -> bool:
    """Whether the prompt `key` belongs to the `share` of all prompts that is held out.

    >>> sum(is_held_out(str(i), seed=0, share=0.25) for i in range(1000))
    242
    """
    drawn = int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:8], "big")
    # Integers against a scaled share: a quotient could round up to 1.0, which no share exceeds.
    return drawn < share * 2**64
