"""Check that a model generates the same logits in batches, with its cache, and with one cache for the responses to a prompt,
as for single prompts and without cache.

It runs once per model: those that ignore left padding (recurrent ones, absolute positions) and faulty caches give other logits
without any error.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedModel

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logit_differences import TOLERANCE, difference_quantile, largest_differences, scale_of
from snaketune.engine.model.selftest_rows import ordinary_ids
from snaketune.errors import SnaketuneError, first_line
from snaketune.sampling.decoding import left_padded, prompt_cache, use_plain_generation
from snaketune.sampling.responses import Request
from snaketune.tokenization.chat import ChatTokenizer

# Prompt lengths; the longest exceeds common windows and chunks.
LENGTHS = (5, 30, 140)
NEW_TOKENS = 4


@dataclass(frozen=True)
class GenerationMode:
    """A way to generate: several prompts per batch, padded on the left, or one; with the key/value cache or without; with the
    prompt's cache shared by its responses or not."""

    batched: bool
    cached: bool
    shared: bool = False

    def batch_size(self, wanted: int) -> int:
        return wanted if self.batched else 1


MODES = (
    GenerationMode(True, True, True),
    GenerationMode(True, True),
    GenerationMode(False, True, True),
    GenerationMode(False, True),
    GenerationMode(False, False),
)


@torch.no_grad()
def choose_generation_mode(model: PreTrainedModel, chat: ChatTokenizer, compute: Compute) -> GenerationMode:
    """The first of MODES whose logits equal those of forwards of single prompts, within the self-test's tolerance;
    SnaketuneError if none is right."""
    model.eval()
    use_plain_generation(model, chat)
    name, faults = model.config.model_type, []
    prompts = _synthetic_prompts(model, chat)
    with compute.autocast():
        expected = [_greedy_tokens(model, prompt, chat) for prompt in prompts]
        for mode in MODES:
            fault = _fault(model, chat, prompts, expected, mode, compute.dtype)
            if not fault:
                break
            shared = "a shared" if mode.shared else "with a"
            how = f"{'batches' if mode.batched else 'single prompts'}, {shared if mode.cached else 'no'} cache"
            faults.append(f"{how}: {fault}")
    if fault:
        raise SnaketuneError(
            f"{name}: logits of generation differ from those of its forward ({'; '.join(faults)}), so its responses can't be "
            "trusted; exclude the model from the evaluation"
        )
    if faults:
        now = [*([] if mode.batched else ["one prompt at a time"]), *([] if mode.cached else ["without cache"])]
        now += [] if mode.shared or not mode.cached else ["every response from the prompt's first token"]
        print(f"{name} can't generate as usual ({'; '.join(faults)}); it generates {', '.join(now)}", flush=True)
    return mode


def _synthetic_prompts(model: PreTrainedModel, chat: ChatTokenizer) -> list[np.ndarray]:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(limit - NEW_TOKENS, 1) if isinstance(limit, int) and limit > 0 else max(LENGTHS)
    allowed = np.setdiff1d(ordinary_ids(model.config), [chat.pad_id, *chat.stop_ids])
    generator = np.random.default_rng(0)
    return [generator.choice(allowed, min(length, longest)).astype(np.int32) for length in LENGTHS]


def _greedy_tokens(model: PreTrainedModel, prompt: np.ndarray, chat: ChatTokenizer) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens up to a stop token and their logits [N, V], with one forward of the whole sequence per token."""
    ids_1L = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    new: list[int] = []
    logits = []
    while len(new) < NEW_TOKENS and not (new and new[-1] in chat.stop_ids):
        logits.append(model(input_ids=ids_1L, use_cache=False).logits[0, -1].float())
        new.append(int(logits[-1].argmax()))
        ids_1L = torch.cat([ids_1L, ids_1L.new_tensor([[new[-1]]])], 1)
    return new, torch.stack(logits)


def _fault(
    model: PreTrainedModel,
    chat: ChatTokenizer,
    prompts: list[np.ndarray],
    expected: list[tuple[list[int], torch.Tensor]],
    mode: GenerationMode,
    dtype: torch.dtype,
) -> str:
    scale = scale_of(torch.cat([logits_NV for _, logits_NV in expected])).item()
    shares, labels = [], []
    # Two responses to each prompt, if they share its cache.
    numbered = [[pair] * (2 if mode.shared else 1) for pair in zip(prompts, expected)]
    for chunk in [list(chain(*numbered))] if mode.batched else numbered:
        ids_BW, mask_BW = (
            padded.to(model.device) for padded in left_padded([prompt for prompt, _ in chunk], chat.pad_id)
        )
        try:
            requests = [Request(prompt) for prompt, _ in chunk]
            prefix = prompt_cache(model, requests, ids_BW, mask_BW) if mode.shared else {}
            out = model.generate(
                input_ids=ids_BW,
                attention_mask=mask_BW,
                max_new_tokens=NEW_TOKENS,
                use_cache=mode.cached,
                output_logits=True,
                return_dict_in_generate=True,
                **prefix,
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            return f"{type(error).__name__}, {first_line(error)}"
        for row, (prompt, (tokens, logits_NV)) in enumerate(chunk):
            generated = out.sequences[row, ids_BW.shape[1] :].tolist()
            for step, token in enumerate(tokens):
                shares.append(largest_differences(out.logits[step][row][None], logits_NV[step][None]) / scale)
                labels.append(f"token {step + 1} after a prompt of {len(prompt)} tokens")
                # Two tokens are equally likely within rounding, so different later logits are no error.
                if generated[step] != token:
                    break
    # NaN fails too.
    if difference_quantile(torch.cat(shares), dtype) <= TOLERANCE[dtype]:
        return ""
    first = next(label for share, label in zip(shares, labels) if not share.item() <= TOLERANCE[dtype])
    return f"other logits for {first}"
