"""Answers to a few held-out prompts during a training: greedy and short, by the training's own kernel and without a cache, so
that nothing about the model is changed for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from snaketune.engine.model.batches import collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_logits
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED
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
        """Return prompt, expected and given answer of the first `count` prompts."""
        chat = ChatTokenizer.load(self.tokenizer)
        return [
            {
                "prompt": chat.decode(prompt),
                "expected": chat.decode(expected),
                "answer": chat.decode(_answer(model, prompt, chat.stop_ids, compute)),
            }
            for prompt, expected in _prompts(self.rows, count)
        ]


@torch.no_grad()
def _answer(model: torch.nn.Module, prompt: np.ndarray, stop_ids: tuple[int, ...], compute: Compute) -> np.ndarray:
    """Continue a prompt, int32[n], until a stop token or by NEW_TOKENS; return the new tokens."""
    ids = prompt
    while len(ids) < len(prompt) + NEW_TOKENS and (len(ids) == len(prompt) or ids[-1] not in stop_ids):
        segment = {"segment_lengths": np.array([len(ids)], np.int32), "prefix_lengths": np.zeros(1, np.int32)}
        row = {"input_ids": ids, "labels": np.full(len(ids), IGNORED, np.int32)} | segment
        batch = collate([row], compute.kernel).to(compute.device)
        with compute.autocast():
            logits_1V = packed_logits(model, batch, torch.tensor([len(ids) - 1], device=compute.device))
        ids = np.append(ids, np.int32(logits_1V.argmax().item()))
    return ids[len(prompt) :]


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
