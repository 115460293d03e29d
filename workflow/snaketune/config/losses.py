"""The losses of `dpo:` and the keys that they read: what a config may say of them, refused where no chosen loss looks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Fraction, Model, PositiveFloat, PositiveInt
from snaketune.config.suggestions import unknown

LossName = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
    "sigmoid_norm", "aot", "simpo", "orpo", "cpo", "sft", "kto", "apo_zero_unpaired",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a loss needs.

    Attributes:
        reference: log-probabilities of a reference model.
        unpaired: single completions, each good or bad, in the place of pairs.
        diverges: it is of the difference of two scores, so it is defined for other divergences than the reverse KL.
        reads: keys that say something to it, besides `beta`.
    """

    reference: bool = True
    unpaired: bool = False
    diverges: bool = False
    reads: tuple[str, ...] = ()


NEEDS: dict[str, Needs] = {
    "sigmoid": Needs(diverges=True, reads=("label_smoothing",)),
    "ipo": Needs(diverges=True),
    "hinge": Needs(diverges=True),
    "robust": Needs(diverges=True, reads=("label_smoothing",)),
    "exo_pair": Needs(diverges=True, reads=("label_smoothing",)),
    "nca_pair": Needs(),
    "bco_pair": Needs(),
    "sppo_hard": Needs(),
    "apo_zero": Needs(),
    "apo_down": Needs(),
    "discopop": Needs(diverges=True, reads=("discopop_tau",)),
    "sigmoid_norm": Needs(diverges=True),
    "aot": Needs(reads=("label_smoothing",)),
    "simpo": Needs(reference=False, reads=("label_smoothing", "simpo_gamma")),
    "orpo": Needs(reference=False),
    "cpo": Needs(reference=False, reads=("label_smoothing", "cpo_alpha")),
    "sft": Needs(reference=False, diverges=True),
    "kto": Needs(unpaired=True, reads=("desirable_weight", "undesirable_weight")),
    "apo_zero_unpaired": Needs(unpaired=True, reads=("desirable_weight", "undesirable_weight")),
}
# Names that TRL, papers or other trainers have, and what there is of them.
SUGGESTIONS = {
    "aot_unpaired": "it compares good with bad completions of any prompts; `aot` is its form for pairs",
    "kto_pair": "TRL dropped it: `kto` on a corpus of kind unpaired, or `bco_pair` on pairs",
    "bco": "`bco_pair` on pairs",
    "dpo": "it is `sigmoid`",
    "cdpo": "it is `sigmoid` with label_smoothing",
    "slic": "it is `hinge`",
    "alphapo": "`simpo` is its case alpha = 0",
    "rpo": "it is {sigmoid: 1, sft: 1}",
    "mpo": "it is {sigmoid: 0.8, bco_pair: 0.2, sft: 1}",
    "dpop": "{sigmoid: 1, sft: 1} holds up the chosen completions too",
    "wpo": "it weights pairs by the policy's own probabilities, which no loss here does; `sigmoid` is what it weights",
    "nca": "`nca_pair` on pairs",
    "exo": "`exo_pair` on pairs",
    "sppo": "`sppo_hard`",
    "apo": "`apo_zero` or `apo_down`",
}  # fmt: skip
# A threshold looks at as many steps as are needed to tell it from the noise of single batches.
WINDOW = 20


class StopIf(Model):
    """Ends a training that is hopeless. The model up to there is the result, and the manifest, run.json and the report say at
    which step and why. Looked at after every step, whatever is logged, and the same after a resume."""

    margin_below: float | None = None
    """Ends it when the mean margin of the window's pairs is lower: the reward of the chosen completion less that of the
    rejected one."""
    chosen_reward_below: float | None = None
    """Ends it when the mean reward of chosen completions is lower."""
    kl_above: PositiveFloat | None = None
    """Ends it when `kl` is higher: nats per completion that the model has moved away from its reference, see below."""
    from_step: PositiveInt = 1
    """The first step after which it may end."""
    window: PositiveInt = WINDOW
    """The steps that the means are over, the newest ones; before there are as many, nothing ends."""

    @model_validator(mode="after")
    def _says_when(self) -> "StopIf":
        if not self.thresholds:
            raise ValueError("expected margin_below, chosen_reward_below or kl_above; found none of them")
        return self

    @property
    def thresholds(self) -> dict[str, float]:
        """Those that are set."""
        names = ("margin_below", "chosen_reward_below", "kl_above")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class PreferenceLoss(Model):
    """A loss, or several with weights, and what they are told."""

    loss: LossName | dict[LossName, PositiveFloat] = "sigmoid"
    """As TRL names it, or several with their weights, such as `{sigmoid: 0.8, bco_pair: 0.2, sft: 1.0}`; see below."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to its reference; IPO's tau, the scale of SimPO's and CPO's rewards, the weight of ORPO's
    odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the labels taken to be wrong, by `sigmoid`, `robust`, `exo_pair` (which needs one: its authors take 0.001),
    `aot`, `cpo` and `simpo`."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """What holds the model to its reference (Wang et al., 2023), where the loss is of a difference of scores: `sigmoid`,
    `sigmoid_norm`, `hinge`, `ipo`, `exo_pair`, `robust`, `discopop`."""
    f_alpha_divergence_coef: float = 0.5
    """Alpha of `alpha_divergence`."""
    ld_alpha: Fraction | None = None
    """Weight of what a completion says beyond the length of the other one (LD-DPO, Liu et al., 2024), of losses with a
    reference; 1 is as without it."""
    discopop_tau: PositiveFloat = 0.05
    """Temperature at which `discopop` goes from one of its halves to the other."""
    simpo_gamma: Annotated[float, Field(ge=0)] = 0.5
    """The margin that `simpo` wants."""
    cpo_alpha: Annotated[float, Field(ge=0)] = 1.0
    """Weight in `cpo` of the chosen completion's negative log-likelihood."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good completions in `kto` and `apo_zero_unpaired`."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad ones."""
    stop_if: StopIf | None = None
    """Ends a hopeless training early."""

    @field_validator("ld_alpha")
    @classmethod
    def _whole_tails(cls, alpha: float | None) -> float | None:
        # So that nobody keeps log-probabilities by token for it.
        return None if alpha == 1 else alpha

    @property
    def weights(self) -> dict[str, float]:
        """Every loss with its weight, in the order of `LossName`, so that the order of a mapping says nothing."""
        given = self.loss if isinstance(self.loss, Mapping) else {self.loss: 1.0}
        return {name: given[name] for name in get_args(LossName) if name in given}

    @property
    def needs_reference(self) -> bool:
        return any(NEEDS[name].reference for name in self.weights)

    @property
    def unpaired(self) -> bool:
        """Whether it learns from single completions."""
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
        if isinstance(loss, Mapping):
            for name, weight in loss.items():
                if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
                    raise ValueError(f"found {weight!r} as the weight of {name}; expected a number above 0")
            # One loss with weight 1 is that loss.
            return next(iter(loss)) if len(loss) == 1 and next(iter(loss.values())) == 1 else dict(sorted(loss.items()))
        return loss

    @model_validator(mode="after")
    def _losses_fit(self) -> "PreferenceLoss":
        names = list(self.weights)
        if names == ["sft"]:
            raise ValueError(
                "loss sft alone learns chosen completions and prefers nothing: add a loss of pairs, or train with `sft:`"
            )
        if self.unpaired and len(names) > 1:
            raise ValueError(
                f"{_first(names, 'unpaired')} learns from single completions, so it stands alone; found {names}"
            )
        self._refuse_unread(names)
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError(
                "loss exo_pair needs a label_smoothing above 0 (its authors take 0.001), or it is infinite"
            )
        return self

    def _refuse_unread(self, names: Iterable[str]) -> None:
        """A key that no chosen loss reads would say something that isn't done."""
        read = {key for name in names for key in NEEDS[name].reads}
        if all(NEEDS[name].diverges for name in names):
            read.add("f_divergence_type")
        if self.f_divergence_type == "alpha_divergence":
            read.add("f_alpha_divergence_coef")
        if self.needs_reference and not self.unpaired:
            read.add("ld_alpha")
        for key in (
            "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "discopop_tau", "simpo_gamma",
            "cpo_alpha", "desirable_weight", "undesirable_weight",
        ):  # fmt: skip
            value = getattr(self, key)
            if key not in read and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} says nothing to {_listed(names)}; {_who_reads(key)}, found {value}")
        stop = self.stop_if
        if stop and stop.kl_above is not None and not self.needs_reference:
            raise ValueError(f"stop_if.kl_above needs a loss with a reference, and {_listed(names)} has none")


def _first(names: Iterable[str], what: str) -> str:
    return next(name for name in names if getattr(NEEDS[name], what))


def _listed(names: Iterable[str]) -> str:
    return "loss " + " and ".join(names)


def _who_reads(key: str) -> str:
    if key == "f_alpha_divergence_coef":
        return "it belongs to f_divergence_type alpha_divergence"
    if key == "ld_alpha":
        return "it belongs to losses of pairs with a reference"
    owners = [
        name for name, needs in NEEDS.items() if key in needs.reads or (key == "f_divergence_type" and needs.diverges)
    ]
    return f"it belongs to {', '.join(owners)}"
