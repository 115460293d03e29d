"""The check of stored greedy responses: their first tokens once more, each prompt alone, by `generate` of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.engine.model.logit_differences import TOLERANCE, scale_of
from snaketune.sampling.decoding import use_plain_generation
from snaketune.tokenization.chat import ChatTokenizer

RESPONSES = "responses = transformers"
OF_RESPONSES = "share of greedy responses that begin otherwise than those of transformers' generate"
# The most tokens of a response that are generated once more.
FIRST = 16


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stored response to a prompt, int32[n]: its text, and how many tokens it has, the stop token included."""

    id: str
    prompt: np.ndarray
    text: str
    tokens: int


def responses_equal_generated(
    model: PreTrainedModel, chat: ChatTokenizer, stored: Sequence[Stored], dtype: torch.dtype, *, cut: bool
) -> Check:
    """Compare the beginnings of stored responses with generated ones, up to the first token that rounding may change.

    Args:
        model: loaded by transformers alone.
        dtype: of the computation that made the responses.
        cut: whether responses are cut at stop texts.
    """
    use_plain_generation(model.eval(), chat)
    wrong: list[str] = []
    compared = 0
    for response in stored:
        certain = _certain_tokens(model, response, TOLERANCE[dtype])
        compared += len(certain)
        # The last bytes may be a part of a character.
        begins = chat.decode(certain).rstrip("\ufffd")
        ended = response.tokens <= len(certain)
        same = response.text == begins if ended and not cut else response.text.startswith(begins)
        if not (same or (cut and begins.startswith(response.text))):
            wrong.append(f"{response.id}: {begins[:40]!r}, stored {response.text[:40]!r}")
    if not compared:
        return not_checked(RESPONSES, OF_RESPONSES, "rounding may change the first token of each")
    compares = f"{OF_RESPONSES}, of {len(stored)}, {compared} tokens"
    return judged(RESPONSES, compares, len(wrong) / len(stored), 0.0, reason="; ".join(wrong[:1]))


@torch.no_grad()
def _certain_tokens(model: PreTrainedModel, response: Stored, tolerance: float) -> list[int]:
    """The first tokens that `generate` gives, until the two largest logits are so close that rounding may exchange them."""
    prompt_1W = torch.from_numpy(response.prompt.astype(np.int64))[None].to(model.device)
    out = model.generate(
        input_ids=prompt_1W,
        attention_mask=torch.ones_like(prompt_1W),
        max_new_tokens=min(FIRST, response.tokens),
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits_NV = torch.cat(out.logits).float()
    top_N2 = logits_NV.topk(2).values
    # Both may be off by the tolerance.
    close_N = top_N2[:, 0] - top_N2[:, 1] <= 2 * tolerance * scale_of(logits_NV)
    certain = int(close_N.nonzero()[0]) if close_N.any() else len(close_N)
    return out.sequences[0, prompt_1W.shape[1] :][:certain].tolist()
