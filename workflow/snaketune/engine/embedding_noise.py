"""Noise on the embeddings of training tokens (NEFTune: Jain et al., 2023).

The noise of a document depends on its length, so transformers' own, which takes the length of the whole input, would be too
weak for packed documents.
"""

import torch
from transformers import PreTrainedModel

from snaketune.engine.model.kernels import SEPARATE, Segments


class EmbeddingNoise:
    """Adds uniform noise between ±alpha / √(length x width) to the embeddings [1, T, H] of a packed batch, in training mode.

    The length is that of the token's document, its prefix included. Where documents run separately, it is that of the padded
    sequence, as in transformers.
    """

    def __init__(self, model: PreTrainedModel, alpha: float):
        self.alpha = alpha
        # That of the forward pass that runs; None without packed documents, as in evaluations.
        self.segments: Segments | None = None
        model.register_forward_pre_hook(self._note_segments, with_kwargs=True)
        model.get_input_embeddings().register_forward_hook(self._add_noise)

    def _note_segments(self, model, arguments, keywords) -> None:
        self.segments = keywords.get("segments")

    def _add_noise(self, embedding, arguments, embedded_BTH: torch.Tensor) -> torch.Tensor:
        if not embedding.training or self.segments is None:
            return embedded_BTH
        _, tokens, width = embedded_BTH.shape
        if self.segments.kernel == SEPARATE:
            lengths_T = embedded_BTH.new_full((tokens,), tokens, dtype=torch.float32)
        else:
            layout = self.segments.layout
            lengths_S = layout.prefix_lengths + layout.lengths
            lengths_T = torch.from_numpy(lengths_S[layout.segment_of]).to(embedded_BTH.device)
        most_T1 = self.alpha / (lengths_T.float() * width).sqrt()[:, None]
        noise_BTH = torch.empty_like(embedded_BTH).uniform_(-1, 1)
        return embedded_BTH + (noise_BTH * most_T1).to(embedded_BTH.dtype)
