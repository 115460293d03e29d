"""Which token a response goes on with: the likeliest, or one that is drawn.

Penalty, temperature, top_k and top_p are transformers' definitions, in its order. Two things are done otherwise, so that a
response doesn't depend on the batch that its prompt is in:

- A draw takes one number between 0 and 1 per token, from a generator that seed and prompt alone begin. So the tokens drawn are
  the same in any batch and any order, as far as the logits are: on another device, or padded otherwise, these differ in their
  last bits, and a number within such a bit of the border between two tokens takes the other one.
- transformers' repetition penalty counts the padding of a row among the tokens that were there.

Shapes: B prompts, W the longest prompt, L all tokens so far, N new ones at most, V the vocabulary.
"""

import hashlib

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from snaketune.config.evaluations import Decoding


def processors(
    decoding: Decoding, prompts: list[np.ndarray], ids_BW: torch.Tensor, mask_BW: torch.Tensor
) -> LogitsProcessorList:
    """What makes of logits those whose largest is the next token; empty for plain greedy decoding.

    Args:
        prompts: int32[n] each.
        ids_BW, mask_BW: the same, padded on the left, on the device that computes.
    """
    found = LogitsProcessorList()
    if decoding.repetition_penalty != 1.0:
        found.append(PenalizeRepeated(decoding.repetition_penalty, ids_BW, mask_BW))
    if decoding.temperature:
        if decoding.temperature != 1.0:
            found.append(TemperatureLogitsWarper(decoding.temperature))
        if decoding.top_k:
            found.append(TopKLogitsWarper(decoding.top_k))
        if decoding.top_p < 1.0:
            found.append(TopPLogitsWarper(decoding.top_p))
        numbers_BN = np.stack([uniforms(decoding.seed, prompt, decoding.max_new_tokens) for prompt in prompts])
        found.append(Draw(torch.from_numpy(numbers_BN).to(ids_BW.device), ids_BW.shape[1]))
    return found


def uniforms(seed: int, prompt: np.ndarray, count: int) -> np.ndarray:
    """float32[count] between 0 and 1: one per token, the same for the same seed and prompt; more of them begin with fewer.

    >>> prompt = np.array([5, 7], np.int32)
    >>> [bool((uniforms(seed, prompt, 2) == uniforms(3, prompt, 9)[:2]).all()) for seed in (3, 4)]
    [True, False]
    """
    begun = hashlib.sha256(f"{seed} ".encode() + prompt.astype("<i4").tobytes()).digest()
    return np.random.default_rng(np.frombuffer(begun, "<u4")).random(count, np.float32)


class PenalizeRepeated(LogitsProcessor):
    """Divides what is above 0 by the penalty, and multiplies what isn't, for each token that prompt or response hold."""

    def __init__(self, penalty: float, ids_BW: torch.Tensor, mask_BW: torch.Tensor):
        self.penalty = penalty
        # In the place of padding, a token that is there.
        self.prompts_BW = torch.where(mask_BW.bool(), ids_BW, ids_BW[:, -1:])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids_BL = torch.cat([self.prompts_BW, input_ids[:, self.prompts_BW.shape[1] :]], 1)
        found_BL = scores.gather(1, ids_BL)
        return scores.scatter(1, ids_BL, torch.where(found_BL < 0, found_BL * self.penalty, found_BL / self.penalty))


class Draw(LogitsProcessor):
    """Leaves one token of each row: the one in whose part of the summed probabilities the row's number lies.

    probabilities   0.2  0.0  0.5  0.3
    summed          0.2  0.2  0.7  1.0      0.1 → token 0, 0.2 → token 2, 0.9 → token 3
    """

    def __init__(self, numbers_BN: torch.Tensor, width: int):
        self.numbers_BN, self.width = numbers_BN, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        summed_BV = scores.float().softmax(-1).cumsum(-1)
        whole_B1 = summed_BV[:, -1:].contiguous()
        drawn_B1 = torch.searchsorted(summed_BV, self.numbers_BN[:, step : step + 1] * whole_B1, right=True)
        # A number just below 1 may be rounded up to it; no token after the last possible one is.
        drawn_B1 = drawn_B1.minimum(torch.searchsorted(summed_BV, whole_B1))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn_B1, 0.0)
