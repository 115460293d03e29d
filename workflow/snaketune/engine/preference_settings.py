"""What a preference training is asked for: losses with weights, their parameters, and thresholds at which it ends early."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Steps of a window: enough to separate a trend from the noise of single batches.
WINDOW = 20


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a loss."""

    reference: bool = True  # whether it needs log-probabilities of a reference model
    unpaired: bool = False  # whether it takes labelled single completions instead of pairs
    diverges: bool = False  # whether it is of a difference of scores, so that `f_divergence_type` is defined for it
    reads: tuple[str, ...] = ()  # the parameters that it uses, besides `beta`


SMOOTHED, WEIGHTED = ("label_smoothing",), ("desirable_weight", "undesirable_weight")
NEEDS: dict[str, Needs] = {
    "sigmoid": Needs(diverges=True, reads=SMOOTHED),
    "ipo": Needs(diverges=True),
    "hinge": Needs(diverges=True),
    "robust": Needs(diverges=True, reads=SMOOTHED),
    "exo_pair": Needs(diverges=True, reads=SMOOTHED),
    "nca_pair": Needs(),
    "bco_pair": Needs(),
    "sppo_hard": Needs(),
    "apo_zero": Needs(),
    "apo_down": Needs(),
    "discopop": Needs(diverges=True, reads=("discopop_tau",)),
    "sigmoid_norm": Needs(diverges=True),
    "aot": Needs(reads=SMOOTHED),
    "simpo": Needs(reference=False, reads=(*SMOOTHED, "simpo_gamma")),
    "orpo": Needs(reference=False),
    "cpo": Needs(reference=False, reads=(*SMOOTHED, "cpo_alpha")),
    "sft": Needs(reference=False, diverges=True),
    "kto": Needs(unpaired=True, reads=WEIGHTED),
    "apo_zero_unpaired": Needs(unpaired=True, reads=WEIGHTED),
}


def weights_by_loss(loss: str | Mapping[str, float]) -> dict[str, float]:
    """Every loss with its weight, in the order of `NEEDS`, so that another order has no effect.

    >>> weights_by_loss({"sft": 1.0, "sigmoid": 0.8}), weights_by_loss("ipo")
    ({'sigmoid': 0.8, 'sft': 1.0}, {'ipo': 1.0})
    """
    weights = loss if isinstance(loss, Mapping) else {loss: 1.0}
    return {name: weights[name] for name in NEEDS if name in weights}


@dataclass(frozen=True, kw_only=True)
class StopIf:
    """Thresholds of metrics by `metric_below` or `metric_above`, of means over `window` steps, from step `from_step` on."""

    thresholds: Mapping[str, float]
    from_step: int = 1
    window: int = WINDOW


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """The losses of a training by name, with their weights in the order of `NEEDS`, and their parameters, which are TRL's.

    Attributes:
        ld_alpha: weight of the tokens beyond the length of the pair's other completion; None for no weighting.
        external_reference: whether the reference is another model than the one that is trained.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    stop_if: StopIf | None = None
    external_reference: bool = False

    @property
    def needs_reference(self) -> bool:
        return any(NEEDS[name].reference for name in self.weights)

    @property
    def unpaired(self) -> bool:
        """Whether the loss takes labelled single completions."""
        return any(NEEDS[name].unpaired for name in self.weights)
