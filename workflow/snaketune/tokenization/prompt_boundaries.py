"""The boundary between a prompt and the turn that follows it: no token reaches over it.

A model generates a turn after the tokens of its prompt. Encoded as one text, the end of the prompt and the start of the turn
may become one token; then the model is trained on a prompt that it never gets:

    prompt      <|im_start|> assistant \\n                          what it gets
    one text    <|im_start|> assistant \\n\\n yes <|im_end|>          with the turn `\\nyes`
    apart       <|im_start|> assistant \\n | \\n yes <|im_end|>

So a turn whose prompt has other tokens in the whole text is encoded apart from it; all others are left as they are. Tokens
don't reach over an added token, so only what is between the last one and the end of the prompt is compared, which mostly is the
template's, and the same for all rows.
"""

import json
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

CACHED_TEXTS = 4096


class PromptBoundaries:
    """Finds the turns that don't follow the tokens of their prompt, and encodes them apart."""

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any]):
        """Set up for a tokenizer and its parsed `tokenizer.json`."""
        self._tokenizer, self._description = tokenizer, description
        self._added = {tokenizer.token_to_id(token["content"]) for token in description["added_tokens"]}
        self._ids = lru_cache(CACHED_TEXTS)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def apart(self, text: str, encoding: Encoding, ends: dict[int, int]) -> tuple[Encoding, list[int]]:
        """The encoding with every prompt as it is encoded alone, and the numbers of the prompts that weren't.

        Args:
            encoding: the encoding of `text`.
            ends: the ends of prompts, in characters, by number, ascending.
        """
        ids = np.array(encoding.ids, np.int64) if ends else np.zeros(0, np.int64)
        changed = [number for number, end in ends.items() if not self._begins_with_prompt(text, encoding, ids, end)]
        if not changed:
            return encoding, changed
        starts = [start for id, (start, _) in zip(encoding.ids, encoding.offsets) if id in self._added]
        parts: list[Encoding] = []
        cursor = 0
        for end in map(ends.__getitem__, changed):
            # The text after the next added token doesn't depend on the turn.
            following = min((start for start in starts if start >= end), default=len(text))
            parts.append(self._tokenizer.encode(text[cursor:end], add_special_tokens=False))
            parts.append(self._continuing.encode(text[end:following], add_special_tokens=False))
            cursor = following
        parts.append(self._tokenizer.encode(text[cursor:], add_special_tokens=False))
        return Encoding.merge(parts, growing_offsets=True), changed

    def _begins_with_prompt(self, text: str, encoding: Encoding, ids: np.ndarray, end: int) -> bool:
        """Whether the tokens of `text` begin with those of its first `end` characters."""
        token = encoding.char_to_token(end)
        if token is None:
            token = len(ids)
        elif encoding.token_to_chars(token)[0] == end and not text[end - 1].isspace():
            # Pre-tokenizers look ahead only from whitespace.
            return True
        at, start = token, end
        while at and (start == end or ids[at] not in self._added):
            at -= 1
            start = encoding.token_to_chars(at)[0]
        prompt = self._ids(text[start:end])
        return ids[at : at + len(prompt)].tolist() == prompt

    @cached_property
    def _continuing(self) -> Tokenizer:
        """The tokenizer without the space that some put before a text."""
        return Tokenizer.from_str(json.dumps(_without_prefix(self._description)))


def _without_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """A description of the same tokenizer that puts no space before a text."""

    def step(component: dict[str, Any]) -> dict[str, Any]:
        changes = {"prepend_scheme": "never", "add_prefix_space": False}
        nested = {
            key: [step(part) for part in component[key] if part["type"] != "Prepend"]
            for key in ("normalizers", "pretokenizers")
            if key in component
        }
        return component | {key: value for key, value in changes.items() if key in component} | nested

    parts = {key: description[key] for key in ("normalizer", "pre_tokenizer")}
    return description | {
        key: None if part is None or part["type"] == "Prepend" else step(part) for key, part in parts.items()
    }
