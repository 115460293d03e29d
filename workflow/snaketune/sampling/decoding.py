"""Generation by transformers, in batches of prompts of similar length, greedy or sampled, up to a stop token or text.

Repetition penalty, temperature, top_k and top_p follow transformers' definitions and order. Two things differ, so that a
response doesn't depend on the batch that its prompt is in: sampling takes one number between 0 and 1 per token, from a
generator seeded by seed, prompt and index alone, so sampled tokens are the same in any batch and order as long as the logits
are; and the repetition penalty ignores padding, which transformers' own counts as part of the prompt.

Where a batch has several responses to a prompt, the prompt is computed once, and its cache is repeated: with prompts of 512
tokens and 8 responses of 64, that is 1,024 tokens per prompt instead of 4,608.

Shapes: B responses, U distinct prompts, W the longest prompt, L all tokens so far, N new ones at most, V the vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
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

from snaketune.config.generation import Decoding
from snaketune.engine.model.devices import Compute
from snaketune.errors import SnaketuneError
from snaketune.sampling.responses import Decode, Request, Response, cut, first_stop
from snaketune.tokenization.chat import ChatTokenizer


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
def generate_batch(
    model: PreTrainedModel,
    chat: ChatTokenizer,
    batch: Sequence[Request],
    *,
    decoding: Decoding,
    compute: Compute,
    cached: bool = True,
    shared: bool = True,
) -> dict[bytes, Response]:
    """The responses to a batch of requests, by digest.

    Args:
        cached, shared: as `generation_check.choose_generation_mode` allows.
    Raises:
        SnaketuneError: the model's logits aren't finite.
    """
    model.eval()
    use_plain_generation(model, chat)
    ids_BW, mask_BW = (
        padded.to(compute.device) for padded in left_padded([request.prompt for request in batch], chat.pad_id)
    )
    width = ids_BW.shape[1]
    stopped = [StopOnText(chat.decode, decoding.stop, width)] if decoding.stop else []
    logps = TokenLogps()
    with compute.autocast():
        prefix = prompt_cache(model, batch, ids_BW, mask_BW) if cached and shared else {}
        out_BX = model.generate(
            input_ids=ids_BW,
            attention_mask=mask_BW,
            max_new_tokens=decoding.max_new_tokens,
            use_cache=cached,
            logits_processor=LogitsProcessorList([logps, *processors(decoding, batch, ids_BW, mask_BW)]),
            stopping_criteria=StoppingCriteriaList(stopped),
            **prefix,
        )
    logps_BN = logps.of(out_BX)
    responses = {}
    for request, new, logps_N in zip(batch, out_BX[:, width:].tolist(), logps_BN, strict=True):
        length = next((n + 1 for n, token in enumerate(new) if token in chat.stop_ids), len(new))
        text, count, stopped_at_text = cut(new[:length], chat.decode, decoding.stop)
        ended = "stop" if stopped_at_text or new[length - 1] in chat.stop_ids else "length"
        logp = float(logps_N[:count].sum())
        if not np.isfinite(logp):
            raise SnaketuneError(
                f"a response's log-probability is {logp}: the model's logits aren't finite; its weights are damaged, or its "
                "training has diverged"
            )
        responses[request.digest] = Response(text, new[:count], ended, logp)
    return responses


def prompt_cache(
    model: PreTrainedModel, batch: Sequence[Request], ids_BW: torch.Tensor, mask_BW: torch.Tensor
) -> dict[str, Cache]:
    """The key/value cache of all but the last token of each prompt, computed once for the responses to it; empty where each
    prompt has one response, or one has one token."""
    runs = [len(list(group)) for _, group in groupby(batch, key=lambda request: request.prompt.tobytes())]
    if len(runs) == len(batch) or min(len(request.prompt) for request in batch) < 2:
        return {}
    first_U = torch.tensor(np.cumsum([0, *runs[:-1]]), device=ids_BW.device)
    # `generate` computes the prompts and one token more, whose keys and values aren't in the cache.
    out = model.generate(
        input_ids=ids_BW[first_U, :-1],
        attention_mask=mask_BW[first_U, :-1],
        max_new_tokens=1,
        use_cache=True,
        return_dict_in_generate=True,
    )
    repeated_B = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).to(ids_BW.device)
    # Made for beam search; of the methods that repeat rows, all kinds of layers have this one.
    out.past_key_values.reorder_cache(repeated_B)
    return {"past_key_values": out.past_key_values}


class TokenLogps(LogitsProcessor):
    """Records the log-probability of each generated token under the logits as they are before other processors."""

    def __init__(self):
        self.chosen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._record(input_ids)
        self.last = scores
        return scores

    def of(self, out_BX: torch.Tensor) -> np.ndarray:
        """float64[B, N], of all generated tokens, those after a response's end included."""
        self._record(out_BX)
        return torch.stack(self.chosen, 1).double().cpu().numpy()

    def _record(self, ids_BL: torch.Tensor) -> None:
        """Record those of the last tokens, which were chosen from the last logits."""
        if self.last is not None:
            logits_BV = self.last.float()
            self.chosen.append(logits_BV.gather(1, ids_BL[:, -1:])[:, 0] - logits_BV.logsumexp(-1))


def processors(
    decoding: Decoding, batch: Sequence[Request], ids_BW: torch.Tensor, mask_BW: torch.Tensor
) -> list[LogitsProcessor]:
    """The logits processors after which the largest logit is the next token; empty for plain greedy decoding.
    Args: ids_BW, mask_BW: the prompts, left-padded, and their mask, on the compute device."""
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
        numbers_BN = np.stack([uniforms(decoding.seed, request, decoding.max_new_tokens) for request in batch])
        chosen.append(Draw(torch.from_numpy(numbers_BN).to(ids_BW.device), ids_BW.shape[1]))
    return chosen


def uniforms(seed: int, request: Request, count: int) -> np.ndarray:
    """float32[count] numbers in [0, 1), determined by seed and request; a longer sequence extends a shorter one.

    >>> request = Request(np.array([5, 7], np.int32))
    >>> [bool((uniforms(seed, request, 2) == uniforms(3, request, 9)[:2]).all()) for seed in (3, 4)]
    [True, False]
    """
    return np.random.default_rng(np.frombuffer(request.seed(seed), "<u4")).random(count, np.float32)


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
