"""Greedy generation in batches, prompts of similar length together."""

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from snaketune.models.devices import Compute
from snaketune.stages.progress import progress
from snaketune.tokenization.chat import ChatTokenizer


def generates_plainly(model: PreTrainedModel, chat: ChatTokenizer) -> None:
    """Take away what a model's own generation_config asks for (penalties, forbidden n-grams, sampling).

    Models are compared by what they find likeliest, and a base that brings such settings hands them down to all that is trained
    from it. Generation merges whatever isn't given with the model's own, so giving plain settings to a call isn't enough.
    """
    model.generation_config = GenerationConfig(
        do_sample=False, num_beams=1, eos_token_id=list(chat.stop_ids), pad_token_id=chat.pad_id
    )


def left_padded(prompts: list[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask, int64[B, W] each, padded on the left, so that all prompts end where writing begins."""
    width = max(map(len, prompts))
    ids_BW = torch.full((len(prompts), width), pad_id)
    mask_BW = torch.zeros_like(ids_BW)
    for row, prompt in enumerate(prompts):
        ids_BW[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask_BW[row, width - len(prompt) :] = 1
    return ids_BW, mask_BW


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    chat: ChatTokenizer,
    prompts: list[np.ndarray],
    *,
    max_new_tokens: int,
    batch_size: int,
    compute: Compute,
    cached: bool = True,
) -> list[tuple[str, int]]:
    """Continue prompts greedily until a stop token, by the settings of `generates_plainly`.

    Args:
        prompts: int32[n] each.
        batch_size, cached: as `continuing.how_to_continue` allows.
    Returns:
        For each prompt what was written, without special tokens, and its length in tokens (the stop token included).
    """
    model.eval()
    generates_plainly(model, chat)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    written: list[tuple[str, int]] = [("", 0)] * len(prompts)
    starts = range(0, len(order), batch_size)
    for start in progress(starts, "generating", f"batches of {batch_size}", len(starts)):
        chunk = order[start : start + batch_size]
        ids_BW, mask_BW = left_padded([prompts[i] for i in chunk], chat.pad_id)
        with compute.autocast():
            out_BX = model.generate(
                input_ids=ids_BW.to(compute.device),
                attention_mask=mask_BW.to(compute.device),
                max_new_tokens=max_new_tokens,
                use_cache=cached,
            )
        for row, i in enumerate(chunk):
            new = out_BX[row, ids_BW.shape[1] :].tolist()
            length = next((n + 1 for n, token in enumerate(new) if token in chat.stop_ids), len(new))
            written[i] = (chat.decode(new[:length]), length)
    return written
