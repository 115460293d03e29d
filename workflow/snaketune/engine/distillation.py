"""Distillation: a model is trained towards the probabilities of another one, the teacher, at each supervised token.

Of the teacher, the k most likely tokens with their log-probabilities are known, and that of all others together: k + 1
outcomes, on which the divergence is computed. With k = V it is that of the whole distributions. Where k < V it is a lower
bound: how the student divides the rest among the others isn't seen. Both distributions are those of logits / temperature.

    forward_kl   Σ p (log p - log q)     p: the teacher, q: the student
    reverse_kl   Σ q (log q - log p)
    jsd          half of each, from the mean of p and q

Shapes: C positions of a chunk, U positions, V vocabulary, k tokens, O = k + 1 outcomes (k where these are all tokens).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from snaketune.engine.model.chunked_head import OfLogits
from snaketune.engine.model.forward import packed_values

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]
# Log-probability of what is impossible, so that differences of logarithms are finite.
LEAST = -100.0
# Per row of a pack: the ids of the teacher's tokens and their log-probabilities with that of all others, of one supervised
# token after the other.
SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "logps": pa.list_(pa.float16())})


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How a training is distilled: the share of the divergence in the loss, the temperature of both distributions, and which
    divergence. It is multiplied by the square of the temperature, so that its gradients don't shrink (Hinton et al., 2015)."""

    weight: float
    temperature: float
    loss: DivergenceName

    def token_losses(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of each supervised token, float32[N]."""

        def of_logits(logits_CV: torch.Tensor, begin: int) -> tuple[torch.Tensor]:
            teacher_CO, student_CO = outcomes(logits_CV, *teacher_of(batch, begin, len(logits_CV)), self.temperature)
            return (divergence(teacher_CO, student_CO, self.loss),)

        losses_N, (divergences_U,) = packed_values(model, batch, of_logits)
        scaled_N = self.temperature**2 * divergences_U.index_select(0, batch["source_rows"])
        return (1 - self.weight) * losses_N + self.weight * scaled_N


class TeacherRows:
    """A teacher's most likely tokens for the rows of a pack, views of memory-mapped files.

    Attributes:
        k: tokens per supervised token.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], k: int):
        """Args: batches: of SCHEMA."""
        self.k, self._batches = k, batches
        self._offsets = np.cumsum([0, *map(len, self._batches)])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def of_row(self, row: int) -> dict[str, np.ndarray]:
        """`teacher_ids` int32[n, k] and `teacher_logps` float16[n, k + 1] of the row's n supervised tokens."""
        number = int(np.searchsorted(self._offsets, row, side="right")) - 1
        ids, logps = (column[row - int(self._offsets[number])].values for column in self._batches[number].columns)
        return {
            "teacher_ids": ids.to_numpy().reshape(-1, self.k),
            "teacher_logps": logps.to_numpy().reshape(-1, self.k + 1),
        }

    def blank(self) -> dict[str, np.ndarray]:
        return {"teacher_ids": np.empty((0, self.k), np.int32), "teacher_logps": np.empty((0, self.k + 1), np.float16)}


def collate_teacher(rows: Sequence[dict[str, Any]], batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The columns of `TeacherRows` for each position of a batch that predicts a supervised token, [U, k] and [U, k + 1]."""
    _, first_U = np.unique(batch["source_rows"].numpy(), return_index=True)
    return {
        name: torch.from_numpy(np.concatenate([row[name] for row in rows])[first_U])
        for name in ("teacher_ids", "teacher_logps")
    }


def teacher_of(batch: dict[str, Any], begin: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, int64[C, k], and log-probabilities, float32[C, k + 1], for some positions of a batch."""
    chunk = slice(begin, begin + positions)
    return batch["teacher_ids"][chunk].long(), batch["teacher_logps"][chunk].float()


def outcomes(
    logits_CV: torch.Tensor, ids_Ck: torch.Tensor, teacher_logps_CO: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the teacher and of the student for the same outcomes, float32[C, O] each."""
    logits_CV = logits_CV / temperature
    total_C1, top_Ck = logits_CV.logsumexp(1, keepdim=True), logits_CV.gather(1, ids_Ck)
    if ids_Ck.shape[1] == logits_CV.shape[1]:
        # Nothing is left for the last outcome.
        return teacher_logps_CO[:, :-1].log_softmax(1), top_Ck - total_C1
    rest_C1 = logits_CV.scatter(1, ids_Ck, -math.inf).logsumexp(1, keepdim=True)
    # Normalized, since 16-bit logarithms are rounded.
    return teacher_logps_CO.log_softmax(1), torch.cat([top_Ck, rest_C1], 1) - total_C1


def divergence(teacher_CO: torch.Tensor, student_CO: torch.Tensor, name: DivergenceName) -> torch.Tensor:
    """The divergence of two distributions, given as log-probabilities, in nats, float32[C]."""
    if name == "forward_kl":
        return _kl(teacher_CO, student_CO)
    if name == "reverse_kl":
        return _kl(student_CO, teacher_CO)
    mean_CO = torch.logaddexp(teacher_CO, student_CO) - math.log(2)
    return (_kl(teacher_CO, mean_CO) + _kl(student_CO, mean_CO)) / 2


def _kl(of_CO: torch.Tensor, from_CO: torch.Tensor) -> torch.Tensor:
    return (of_CO.exp() * (of_CO - from_CO)).sum(1)


def most_likely(k: int, temperature: float, vocabulary: int) -> OfLogits:
    """A function of logits [C, V]: the k most likely tokens, int32[C, k], the most likely one first, and their
    log-probabilities with that of all others, float16[C, k + 1]. Args: vocabulary: tokens from this id on are among the others.
    """

    def of_logits(logits_CV: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = logits_CV / temperature
        total_C1 = logits_CV.logsumexp(1, keepdim=True)
        top_Ck, ids_Ck = logits_CV[:, :vocabulary].topk(k)
        rest_C1 = logits_CV.scatter(1, ids_Ck, -math.inf).logsumexp(1, keepdim=True)
        logps_CO = (torch.cat([top_Ck, rest_C1], 1) - total_C1).clamp(min=LEAST)
        return ids_Ck.int(), logps_CO.half()

    return of_logits


def agreement(temperature: float, batch: dict[str, Any]) -> OfLogits:
    """A function of logits [C, V]: the student's most likely token, int64[C], and the forward divergence, float32[C]."""

    def of_logits(logits_CV: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        teacher_CO, student_CO = outcomes(logits_CV, *teacher_of(batch, begin, len(logits_CV)), temperature)
        return logits_CV.argmax(1), divergence(teacher_CO, student_CO, "forward_kl")

    return of_logits
