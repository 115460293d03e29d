"""Choices of a model's routers, repeated where two passes are within rounding of a tie.

A router sends a token to the experts with the largest scores. Where two scores are as good as equal, rounding decides, and
another expert's output isn't a rounding error. So a comparison of two passes has the second one choose as the first did
wherever its own scores allow both; all tokens then stay comparable, the later ones of the document too.
"""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CHOOSING = {torch.topk, torch.Tensor.topk, torch.max, torch.Tensor.max}


class RouterChoices(TorchFunctionMode):
    """While active: records the choices of a pass by token, as those of the largest scores in the last dimension; once
    `repeating`, makes the same choices in the order of the calls.

    Attributes:
        tolerance: how far apart scores may be, relative to the scale of all, to be a tie.
        ties: choices that were repeated though the scores of the pass had others.
    """

    def __init__(self, tokens: int, tolerance: float):
        super().__init__()
        self.tokens, self.tolerance, self.ties = tokens, tolerance, 0
        self.repeating = False
        # By number of scores and of choices, then by call.
        self._choices: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def begin(self, tokens_BL: torch.Tensor) -> None:
        """Begin a pass over these tokens, rows of one document each or one packed row; token 0 after the first is padding."""
        is_padding_BL = tokens_BL == 0
        is_padding_BL[:, 0] = False
        self._tokens_M = tokens_BL.masked_fill(is_padding_BL, -1).flatten()
        self._calls: Counter[tuple[int, int]] = Counter()

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        if function not in CHOOSING or not isinstance(found, tuple):
            return found
        scores, indices = arguments[0], found.indices
        # `max` has no dimension for its one choice.
        choices = indices if indices.dim() == scores.dim() else indices[..., None]
        by_token = scores.numel() == len(self._tokens_M) * scores.shape[-1] and choices.shape[:-1] == scores.shape[:-1]
        if not by_token or scores.shape[-1] == choices.shape[-1]:
            return found
        kind = scores.shape[-1], choices.shape[-1]
        call, self._calls[kind] = self._calls[kind], self._calls[kind] + 1
        chosen_MK = choices.reshape(-1, choices.shape[-1])
        if not self.repeating:
            self._record(self._choices[kind], call, chosen_MK)
        elif call < len(self._choices[kind]):
            wanted_MK = self._choices[kind][call][self._tokens_M.clamp(min=0)]
            tied_M = self._tied(scores.detach().reshape(-1, scores.shape[-1]).float(), chosen_MK, wanted_MK)
            self.ties += int(tied_M.sum())
            repeated = torch.where(tied_M[:, None], wanted_MK, chosen_MK).reshape(choices.shape)
            return type(found)((scores.gather(-1, repeated).reshape(indices.shape), repeated.reshape(indices.shape)))
        return found

    def _record(self, calls: list[torch.Tensor], call: int, chosen_MK: torch.Tensor) -> None:
        if call == len(calls):
            calls.append(chosen_MK.new_full((self.tokens, chosen_MK.shape[1]), -1))
        is_token_M = self._tokens_M >= 0
        calls[call][self._tokens_M[is_token_M]] = chosen_MK[is_token_M]

    def _tied(self, scores_ME: torch.Tensor, chosen_MK: torch.Tensor, wanted_MK: torch.Tensor) -> torch.Tensor:
        """Return bool[M]: the tokens with another choice than wanted, of scores that are as good as equal."""
        known_M = (self._tokens_M >= 0) & (wanted_MK >= 0).all(1)
        lowest_M, wanted_M = (scores_ME.gather(1, experts.clamp(min=0)).amin(1) for experts in (chosen_MK, wanted_MK))
        finite = scores_ME[scores_ME.isfinite()]
        scale = finite.max() - finite.min() if len(finite) else 0.0
        differs_M = (chosen_MK.sort(1).values != wanted_MK.sort(1).values).any(1)
        return known_M & differs_M & (lowest_M - wanted_M <= self.tolerance * scale)
