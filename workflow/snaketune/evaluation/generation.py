"""Generation of responses in batches of prompts of similar length, greedy or sampled, up to a stop token or text.

Repetition penalty, temperature, top_k and top_p follow transformers' definitions and order. Two things differ, so that a
response doesn't depend on the batch that its prompt is in: sampling takes one number between 0 and 1 per token, from a
generator seeded by seed and prompt alone, so sampled tokens are the same in any batch and order as long as the logits are; and
the repetition penalty ignores padding, which transformers' own counts as part of the prompt.

Shapes: B prompts, W the longest prompt, L all tokens so far, N new ones at most, V the vocabulary.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from snaketune.config.evaluations import Decoding
from snaketune.engine.model.devices import Compute
from snaketune.progress import progress
from snaketune.tokenization.chat import ChatTokenizer


class GeneratedText(NamedTuple):
    """A generated response without special tokens, and its length in tokens (stop token included)."""

    text: str
    tokens: int


def use_plain_generation(model: PreTrainedModel, chat: ChatTokenizer) -> None:
    """Replace a model's own generation_config (penalties, forbidden n-grams, sampling) by greedy decoding: every model that
    is trained from a base inherits it, and `generate` merges its arguments with it, so passing plain settings isn't
    enough."""
    model.generation_config = GenerationConfig(
        do_sample=False, num_beams=1, eos_token_id=list(chat.stop_ids), pad_token_id=chat.pad_id
    )


def left_padded(prompts: list[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask of left-padded prompts, int64[B, W] each."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = [torch.from_numpy(prompt.astype(np.int64)) for prompt in prompts]
    return pad(ids, padding_value=pad_id), pad([torch.ones_like(tokens) for tokens in ids])


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    chat: ChatTokenizer,
    prompts: list[np.ndarray],
    *,
    decoding: Decoding,
    batch_size: int,
    compute: Compute,
    cached: bool = True,
    on_batch: Callable[[dict[int, GeneratedText]], None] = lambda texts: None,
) -> list[GeneratedText]:
    """Continue prompts (int32[n] each) until a stop token or a stop text; return one response for each. `batch_size` and
    `cached` as `generation_check.choose_generation_mode` allows; `on_batch` gets each generated batch, by index of the
    prompt."""
    model.eval()
    use_plain_generation(model, chat)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: dict[int, GeneratedText] = {}
    offsets = range(0, len(order), batch_size)
    for start in progress(offsets, "generating", f"batches of {batch_size}", len(offsets)):
        chunk = order[start : start + batch_size]
        batch_prompts = [prompts[i] for i in chunk]
        ids_BW, mask_BW = (padded.to(compute.device) for padded in left_padded(batch_prompts, chat.pad_id))
        width = ids_BW.shape[1]
        stopped = [StopOnText(chat.decode, decoding.stop, width)] if decoding.stop else []
        with compute.autocast():
            out_BX = model.generate(
                input_ids=ids_BW,
                attention_mask=mask_BW,
                max_new_tokens=decoding.max_new_tokens,
                use_cache=cached,
                logits_processor=processors(decoding, batch_prompts, ids_BW, mask_BW),
                stopping_criteria=StoppingCriteriaList(stopped),
            )
        batch = {}
        for i, new in zip(chunk, out_BX[:, width:].tolist(), strict=True):
            length = next((n + 1 for n, token in enumerate(new) if token in chat.stop_ids), len(new))
            batch[i] = GeneratedText(*cut(new[:length], chat.decode, decoding.stop))
        on_batch(batch)
        texts |= batch
    return [texts[i] for i in range(len(prompts))]


Decode = Callable[[Sequence[int]], str]


def processors(
    decoding: Decoding, prompts: list[np.ndarray], ids_BW: torch.Tensor, mask_BW: torch.Tensor
) -> LogitsProcessorList:
    """The logits processors after which the largest logit is the next token; empty for plain greedy decoding.
    `prompts` are int32[n] each; `ids_BW`, `mask_BW` the same, left-padded, and their mask, on the compute device."""
    chosen: list[LogitsProcessor] = []
    if decoding.repetition_penalty != 1.0:
        chosen.append(PenalizeRepeated(decoding.repetition_penalty, ids_BW, mask_BW))
    if decoding.temperature:
        if decoding.temperature != 1.0:
            chosen.append(TemperatureLogitsWarper(decoding.temperature))
        if decoding.top_k:
            chosen.append(TopKLogitsWarper(decoding.top_k))
        if decoding.top_p < 1.0:
            chosen.append(TopPLogitsWarper(decoding.top_p))
        numbers_BN = np.stack([uniforms(decoding.seed, prompt, decoding.max_new_tokens) for prompt in prompts])
        chosen.append(Draw(torch.from_numpy(numbers_BN).to(ids_BW.device), ids_BW.shape[1]))
    return LogitsProcessorList(chosen)


def uniforms(seed: int, prompt: np.ndarray, count: int) -> np.ndarray:
    """float32[count] numbers in [0, 1), determined by seed and prompt; a longer sequence extends a shorter one.

    >>> prompt = np.array([5, 7], np.int32)
    >>> [bool((uniforms(seed, prompt, 2) == uniforms(3, prompt, 9)[:2]).all()) for seed in (3, 4)]
    [True, False]
    """
    digest = hashlib.sha256(f"{seed} ".encode() + prompt.astype("<i4").tobytes()).digest()
    return np.random.default_rng(np.frombuffer(digest, "<u4")).random(count, np.float32)


class PenalizeRepeated(LogitsProcessor):
    """Divides positive logits of tokens in the prompt or response by the penalty, and multiplies negative ones by it."""

    def __init__(self, penalty: float, ids_BW: torch.Tensor, mask_BW: torch.Tensor):
        self.penalty = penalty
        # Padding is replaced by the prompt's last token.
        self.prompts_BW = torch.where(mask_BW.bool(), ids_BW, ids_BW[:, -1:])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids_BL = torch.cat([self.prompts_BW, input_ids[:, self.prompts_BW.shape[1] :]], 1)
        logits_BL = scores.gather(1, ids_BL)
        return scores.scatter(1, ids_BL, torch.where(logits_BL < 0, logits_BL * self.penalty, logits_BL / self.penalty))


class Draw(LogitsProcessor):
    """Sample one token per row: the one whose interval of the cumulative probabilities contains the row's number.

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
        # A number just below 1 may be rounded up to it; limit the index to the last token with a nonzero probability.
        drawn_B1 = drawn_B1.minimum(torch.searchsorted(summed_BV, whole_B1))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn_B1, 0.0)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The offset of the earliest stop text in `text`; None if there is none.

    >>> first_stop("one. two\\n", ["\\n", ". "]), first_stop("one", ["."])
    (3, None)
    """
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


def cut(new: list[int], decode: Decode, stops: Sequence[str]) -> tuple[str, int]:
    """The decoded text before the earliest stop text, and the number of tokens up to the end of that stop text."""
    text = decode(new)
    offset = first_stop(text, stops)
    if offset is None:
        return text, len(new)
    ended = bisect_left(range(len(new)), True, key=lambda n: first_stop(decode(new[:n]), stops) is not None)
    return text[:offset], ended


class StopOnText(StoppingCriteria):
    """Stopping criterion per row: the response contains a stop text.

    Each step decodes the last few tokens of each row: as many as the longest stop text has bytes, since a token has at least
    one byte. A stop text that this misses, because of tokens without text, is found by `cut` after generation.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], width: int):
        """Args: width: width of the padded prompts in tokens."""
        self.decode, self.stops, self.width = decode, stops, width
        self.tail = max(len(stop.encode()) for stop in stops) + 1
        self.ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        new_BN = input_ids[:, self.width :]
        for row, last in enumerate(new_BN[:, -self.tail :].tolist()):
            # Confirmed on the whole response, since some tokenizers decode a token differently without those before it.
            if row not in self.ended and self._is_in(last) and self._is_in(new_BN[row].tolist()):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new_BN))], device=input_ids.device)

    def _is_in(self, ids: list[int]) -> bool:
        return first_stop(self.decode(ids), self.stops) is not None
