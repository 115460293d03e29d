"""Conversion of character spans, which a template marks as generated, to token spans."""

import numpy as np
from tokenizers import Encoding

from snaketune.tokenization.template import Span


def token_spans(encoding: Encoding, spans: list[Span], is_control: np.ndarray) -> list[Span]:
    """Return, for each span, the tokens that contain any of its characters.

        characters   0-12           12-21      21-22  22-24  24-27  27-37
        tokens       <|im_start|>   assistant  \\n     He     llo    <|im_end|>

    Here the characters (22, 37) are the tokens (3, 6). transformers' mask differs in three cases: it is empty if the
    span starts with whitespace and the tokenizer's post-processor trims offsets; it lacks the last tokens of a character that
    is encoded as several tokens at the span's end; and it includes the control token before the span if that token strips
    whitespace after it and the span starts with whitespace.

    Args:
        encoding: the encoding of the text, n tokens.
        is_control: bool[n], which of the tokens are control tokens.
    Returns:
        The tokens (first, last + 1) of each span; (0, 0) if it has none.
    """
    converted = []
    for start, end in spans:
        first = _first_token(encoding, range(start, end))
        last = _first_token(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            converted.append((0, 0))
            continue
        # `char_to_token` returns the first token of a character that is encoded as several.
        while last + 1 < len(is_control) and encoding.token_to_chars(last + 1)[0] < end:
            last += 1
        if is_control[first] and encoding.token_to_chars(first)[0] < start:
            first += 1
        converted.append((first, max(first, last + 1)))
    return converted


def _first_token(encoding: Encoding, characters: range) -> int | None:
    """Return the token of the first of `characters` that is in any token; None if none is."""
    return next((token for at in characters if (token := encoding.char_to_token(at)) is not None), None)
