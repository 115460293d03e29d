"""Generation of responses in batches of prompts of similar length."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from snaketune.config.evaluations import Decoding
from snaketune.engine.model.devices import Compute
from snaketune.evaluation.decoding import StopOnText, cut, processors
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
    """Return tokens and attention mask of left-padded prompts, int64[B, W] each."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = [torch.from_numpy(prompt.astype(np.int64)) for prompt in prompts]
    return pad(ids, padding_value=pad_id), pad([torch.ones_like(one) for one in ids])


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
