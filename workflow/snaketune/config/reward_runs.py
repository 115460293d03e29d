"""The `reward:` section: trainings of reward models."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from snaketune.config.base import CorpusName, Model, PositiveFloat, SftName
from snaketune.config.lora import Lora, Quantization
from snaketune.config.operation import Operation
from snaketune.config.packing import Packing
from snaketune.config.training_runs import Dpo, Sft, Training, check_pair_packing, check_together


class Reward(Model):
    """A reward model: a model with one output for a whole conversation, trained on pairs (Bradley-Terry), by the loss of TRL's
    RewardTrainer. The result of an SFT run provides the initial weights; the output is new."""

    from_: Annotated[SftName, Field(alias="from")]
    """SFT run whose result provides the initial weights."""
    corpus: CorpusName
    """Corpus to train on, of kind `preferences`."""
    center_rewards_coefficient: PositiveFloat | None = None
    """Adds this times the mean square of the sum of a pair's two rewards, which keeps rewards near zero, such as 0.01
    (Eisenstein et al., 2023). Default: not added."""
    margin: bool = False
    """Subtracts the difference of a pair's two ratings from that of its rewards (Llama 2, Touvron et al., 2023), so that
    clearly better responses get clearly higher rewards. Needs ratings: a corpus of `layout: rated`, or of `scores`."""
    packing: Packing = Packing()
    training: Training
    lora: Lora | None = None
    quantization: Quantization | None = None
    operation: Operation = Operation()

    # Its variants are compared by evaluations.
    race: ClassVar[None] = None

    @property
    def start(self) -> str:
        """`sft:NAME` of the run whose result provides the initial weights."""
        return f"sft:{self.from_}"

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        check_pair_packing("reward", self.packing)
        if self.training.neftune_noise_alpha:
            raise ValueError("training.neftune_noise_alpha: it is for runs of `sft:`; remove it")
        if self.lora and not self.lora.merge:
            raise ValueError(
                "lora.merge: a reward model is saved with its adapter merged, so that it loads like any other; remove it"
            )
        return check_together(self)


Run = Sft | Dpo | Reward
