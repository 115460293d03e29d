"""The losses of `dpo:` and their keys. A key that none of the configured losses uses is refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Fraction, Model, PositiveFloat, PositiveInt
from snaketune.engine.preference_settings import NEEDS, WEIGHTED, WINDOW, weights_by_loss
from snaketune.suggestions import unknown

LossName = Literal[tuple(NEEDS)]  # pyrefly: ignore[invalid-literal]
# Keys that only some losses use.
SPECIAL_KEYS = (
    "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "discopop_tau", "simpo_gamma", "cpo_alpha",
    *WEIGHTED,
)  # fmt: skip
# Names of losses in TRL, papers or other trainers, and the equivalent or nearest loss here, for error messages.
SUGGESTIONS = {
    "aot_unpaired": "it compares good with bad completions of any prompts; `aot` is its form for pairs",
    "kto_pair": "TRL removed it; use `kto` on a corpus of kind unpaired, or `bco_pair` on pairs",
    "bco": "`bco_pair` on pairs",
    "dpo": "it is `sigmoid`",
    "cdpo": "it is `sigmoid` with label_smoothing",
    "slic": "it is `hinge`",
    "alphapo": "`simpo` is its case alpha = 0",
    "rpo": "it is {sigmoid: 1, sft: 1}",
    "mpo": "it is {sigmoid: 0.8, bco_pair: 0.2, sft: 1}",
    "dpop": "{sigmoid: 1, sft: 1} also keeps the probability of chosen completions up",
    "wpo": "it weights pairs by the policy's own probabilities, which no loss here does; it weights the loss `sigmoid`",
    "nca": "`nca_pair` on pairs",
    "exo": "`exo_pair` on pairs",
    "sppo": "`sppo_hard`",
    "apo": "`apo_zero` or `apo_down`",
}


class StopIf(Model):
    """Ends a training early if a metric passes a threshold. The model at that step is the result; manifest, run.json and report
    record the step and the reason. Thresholds are checked after every step, independent of logging, and a resumed training
    stops at the same step."""

    margin_below: float | None = None
    """Stops if the mean margin of the window's pairs, the reward of the chosen minus that of the rejected completion, is
    lower."""
    chosen_reward_below: float | None = None
    """Stops if the mean reward of the window's chosen completions is lower."""
    kl_above: PositiveFloat | None = None
    """Stops if the window's `kl`, the distance of the model from its reference in nats per completion, is higher; see below."""
    from_step: PositiveInt = 1
    """First step after which the training may stop."""
    window: PositiveInt = WINDOW
    """Number of latest steps over which means are taken. The training doesn't stop before that many steps."""

    @model_validator(mode="after")
    def _has_threshold(self) -> Self:
        if (self.margin_below, self.chosen_reward_below, self.kl_above) == (None, None, None):
            raise ValueError("expected margin_below, chosen_reward_below or kl_above; found none of them")
        return self


class PreferenceLoss(Model):
    """A preference loss, or several with weights, and their parameters."""

    loss: LossName | dict[LossName, PositiveFloat] = "sigmoid"
    """Name of the loss, as in TRL, or several names with weights, such as `{sigmoid: 0.8, bco_pair: 0.2, sft: 1.0}`; see
    below."""
    beta: PositiveFloat = 0.1
    """Strength of the regularization towards the reference. For `ipo` it is tau, for `simpo` and `cpo` the scale of the
    rewards, for `orpo` the weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the labels assumed to be wrong; for `sigmoid`, `robust`, `exo_pair` (which requires a value above 0; its authors
    use 0.001), `aot`, `cpo` and `simpo`."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence that regularizes the model towards its reference (Wang et al., 2023); for losses of a difference of scores:
    `sigmoid`, `sigmoid_norm`, `hinge`, `ipo`, `exo_pair`, `robust`, `discopop`."""
    f_alpha_divergence_coef: float = 0.5
    """Alpha of `f_divergence_type: alpha_divergence`."""
    ld_alpha: Fraction | None = None
    """Weight of the tokens of a completion beyond the length of the other one (LD-DPO, Liu et al., 2024); for losses of pairs
    with a reference. 1, like the default, weights all tokens equally."""
    discopop_tau: PositiveFloat = 0.05
    """Temperature of the sigmoid by which `discopop` mixes its two terms."""
    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """Target margin of `simpo`."""
    cpo_alpha: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the negative log-likelihood of chosen completions in `cpo`."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good completions in `kto` and `apo_zero_unpaired`."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad completions in `kto` and `apo_zero_unpaired`."""
    stop_if: StopIf | None = None
    """Thresholds at which the training ends early."""

    @field_validator("ld_alpha")
    @classmethod
    def _none_if_one(cls, alpha: float | None) -> float | None:
        # So that no log-probabilities per token are stored for it.
        return None if alpha == 1 else alpha

    @property
    def weights(self) -> dict[str, float]:
        return weights_by_loss(self.loss)

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses needs a reference model."""
        return any(NEEDS[name].reference for name in self.weights)

    @property
    def unpaired(self) -> bool:
        """Whether the loss takes labelled single completions."""
        return any(NEEDS[name].unpaired for name in self.weights)

    @field_validator("loss", mode="before")
    @classmethod
    def _known_losses(cls, loss: Any) -> Any:
        if loss == {}:
            raise ValueError("found {}; expected a loss, or several with their weights")
        for name in loss if isinstance(loss, Mapping) else [loss]:
            if not isinstance(name, str) or name not in NEEDS:
                near = SUGGESTIONS.get(str(name).lower())
                raise ValueError(f"there is no loss {name!r}" + (f": {near}" if near else unknown(str(name), NEEDS)))
        if not isinstance(loss, Mapping):
            return loss
        for name, weight in loss.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
                raise ValueError(f"found {weight!r} as the weight of {name}; expected a number above 0")
        # One loss with weight 1 is that loss.
        return next(iter(loss)) if [*loss.values()] == [1] else dict(sorted(loss.items()))

    @model_validator(mode="after")
    def _losses_fit(self) -> Self:
        names = list(self.weights)
        if names == ["sft"]:
            raise ValueError("loss sft alone has no preference term: add a loss of pairs, or use a run of `sft:`")
        if self.unpaired and len(names) > 1:
            unpaired = next(name for name in names if NEEDS[name].unpaired)
            raise ValueError(f"{unpaired} takes single completions, so it can't be combined; found {names}")
        _refuse_unread(self, names)
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError(
                "loss exo_pair is infinite without label_smoothing; set it above 0 (its authors use 0.001)"
            )
        return self


def _refuse_unread(settings: PreferenceLoss, names: list[str]) -> None:
    """Raise ValueError if a key is set that none of the losses uses."""
    losses = f"loss {' and '.join(names)}"
    diverging = [name for name, needs in NEEDS.items() if needs.diverges]
    owners = {key: [name for name, needs in NEEDS.items() if key in needs.reads] for key in SPECIAL_KEYS}
    owners |= {
        "f_divergence_type": diverging,
        "f_alpha_divergence_coef": ["f_divergence_type alpha_divergence"],
        "ld_alpha": ["losses of pairs with a reference"],
    }
    read = {key for name in names for key in NEEDS[name].reads}
    if set(names) <= set(diverging):
        read.add("f_divergence_type")
    if settings.f_divergence_type == "alpha_divergence":
        read.add("f_alpha_divergence_coef")
    if settings.needs_reference and not settings.unpaired:
        read.add("ld_alpha")
    for key, owner in owners.items():
        value = getattr(settings, key)
        if key not in read and value != type(settings).model_fields[key].default:
            raise ValueError(f"{key} has no effect on {losses}; it belongs to {', '.join(owner)}, found {value}")
    if settings.stop_if and settings.stop_if.kl_above is not None and not settings.needs_reference:
        raise ValueError(f"stop_if.kl_above needs a loss with a reference, and {losses} has none")
