"""The key `distill` of SFT runs: training towards the probabilities of a teacher."""

from typing import Annotated, Literal

from pydantic import Field

from snaketune.config.base import Model, PositiveFloat, TeacherName


class DistillLoss(Model):
    """A teacher's part in the loss of a supervised token: `(1 - weight) · loss + weight · temperature² · divergence`."""

    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the divergence from the teacher; the rest is the loss of the token itself. With 1, the rows' own tokens aren't
    learned, only what the teacher expects after them."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both models: above 1, the teacher's unlikely tokens count more. Another one computes the teacher's
    probabilities anew."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence: `forward_kl` makes the student cover all that the teacher may say; `reverse_kl` makes it say only what the
    teacher says; `jsd`, the Jensen-Shannon divergence, is between them."""


class Distill(DistillLoss):
    """Distillation (Hinton et al., 2015): the student also learns a teacher's probabilities for each supervised token, which
    are computed once, as an artifact."""

    teacher: TeacherName
    """Entry of `teacher:`."""
