"""From spans of characters, which a template marks as generated, to spans of tokens."""

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.template import Span


def token_spans(encoding: Encoding, spans: list[Span], is_control: np.ndarray) -> list[Span]:
    """The tokens that hold any character of a span, for every span.

        characters   0-12           12-21      21-22  22-24  24-27  27-37
        tokens       <|im_start|>   assistant  \\n     He     llo    <|im_end|>

    Here the characters (22, 37) are the tokens (3, 6). In three cases transformers masks something else: nothing, if
    the span starts with whitespace and the tokenizer's post-processor trims offsets; not the last bytes of a character
    that is spelled in several tokens at the span's end; and also the frame's own control token, if it is one that
    swallows whitespace after it and the span starts with some.

    Args:
        encoding: of the text that the spans are in, n tokens.
        is_control: bool[n], which of the tokens are control tokens.
    Returns:
        Per span its tokens (first, last + 1); (0, 0) where it has none.
    """
    found = []
    for start, end in spans:
        first = _holding(encoding, range(start, end))
        last = _holding(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            found.append((0, 0))
            continue
        # A character spelled in several tokens is found at the first of them.
        while last + 1 < len(is_control) and encoding.token_to_chars(last + 1)[0] < end:
            last += 1
        if is_control[first] and encoding.token_to_chars(first)[0] < start:
            first += 1
        found.append((first, max(first, last + 1)))
    return found


def _holding(encoding: Encoding, characters: range) -> int | None:
    """The token that holds the first of `characters` that any token holds."""
    return next((token for at in characters if (token := encoding.char_to_token(at)) is not None), None)
