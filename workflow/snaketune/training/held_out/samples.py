"""Answers to a few held-out prompts during a training: greedy and short, by the model's own layers and without a cache, which
every family computes right."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from snaketune.models.attention import use_kernel, use_own_attention
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import IGNORED
from snaketune.tokenization.chat import ChatTokenizer

# Answers are at most so long, and their prompts.
NEW_TOKENS, PROMPT_TOKENS = 48, 512


class SamplePrompts:
    """The first prompts of the held-out rows: the tokens before a document's first supervised one, of at most PROMPT_TOKENS.

    Documents that are supervised from the start, as texts are, have none.
    """

    def __init__(self, rows: PackedRows, tokenizer: Path):
        self.rows, self.tokenizer = rows, tokenizer

    def tokens(self, count: int) -> int:
        """Return the tokens of the forward passes that answer the first `count` prompts: each new token is a pass over all
        tokens so far."""
        return sum(NEW_TOKENS * (len(prompt) + NEW_TOKENS // 2) for prompt, _ in _prompts(self.rows, count))

    def answers(self, model: torch.nn.Module, count: int, compute: Compute) -> list[dict[str, str]]:
        """Return prompt, expected and given answer of the first `count` prompts. The model isn't changed."""
        chat, inner, answers = ChatTokenizer.load(self.tokenizer), inner_model(model), []
        configured = inner.generation_config
        use_own_attention(inner)
        inner.generation_config = GenerationConfig(
            do_sample=False, num_beams=1, eos_token_id=list(chat.stop_ids), pad_token_id=chat.pad_id
        )
        try:
            for prompt, expected in _prompts(self.rows, count):
                ids_1W = torch.from_numpy(prompt.astype(np.int64))[None].to(compute.device)
                with compute.autocast():
                    out_1X = model.generate(
                        input_ids=ids_1W,
                        attention_mask=torch.ones_like(ids_1W),
                        max_new_tokens=NEW_TOKENS,
                        use_cache=False,
                    )
                texts = (prompt.tolist(), expected.tolist(), out_1X[0, ids_1W.shape[1] :].tolist())
                answers.append(dict(zip(("prompt", "expected", "answer"), map(chat.decode, texts))))
        finally:
            inner.generation_config = configured
            use_kernel(inner, compute.kernel)
        return answers


def _prompts(rows: Any, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens of the first `count` prompts and of the answers that follow them, of one document per row.

    >>> row = {"input_ids": np.arange(9), "labels": np.array([-100, -100, 2, 3, -100, -100, 6, 7, 8])}
    >>> (prompt, answer), = _prompts([row | {"segment_lengths": np.array([5, 4])}], count=2)
    >>> prompt.tolist(), answer.tolist()
    ([0, 1], [2, 3])
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for number in range(len(rows)):
        row = rows[number]
        length = int(row["segment_lengths"][0])
        ids, is_target = row["input_ids"][:length], row["labels"][:length] != IGNORED
        first = int(is_target.argmax())
        if 0 < first <= PROMPT_TOKENS and len(found) < count:
            rest = np.flatnonzero(~is_target[first:])
            found.append((ids[:first], ids[first : first + int(rest[0]) if len(rest) else length]))
        if len(found) == count:
            break
    return found
