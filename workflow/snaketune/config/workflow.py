"""Model of the whole config file, and of its sections `merge:`, `push:` and `gguf:`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from snaketune.config.base import NAME_PATTERN, Model, Name, PositiveFloat, Revision, TrainedModel, names
from snaketune.config.corpora import Corpus
from snaketune.config.doctor import Doctor
from snaketune.config.evaluations import Evaluation, Report
from snaketune.config.lora import Lora
from snaketune.config.reward_runs import Reward, Run
from snaketune.config.sampling import Sample
from snaketune.config.scoring import Score
from snaketune.config.teachers import Teacher
from snaketune.config.tokenizers import Tokenizer
from snaketune.config.tracking import Tracking
from snaketune.config.training_runs import Dpo, Sft
from snaketune.config.verify import Verify

# The Hub's rules: letters, digits, `-`, `_` and `.`; the last three neither repeated nor at an end.
HUB_NAME = r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*"

# By section and name, the names of the runs that a name in the config refers to: those of a grid, or itself.
Variants = dict[str, dict[str, tuple[str, ...]]]


class Merge(Model):
    """A model whose weights are averaged from those of trained models, without training: variants of one base, or snapshots
    of one run. Evaluations and `gguf` name it `merge:NAME`."""

    models: Annotated[dict[TrainedModel, PositiveFloat], Field(min_length=2)]
    """Weight of each model, such as `{"sft:demo@0.5": 1, "sft:demo": 1}`; they are divided by their sum."""
    method: Literal["linear", "slerp"] = "linear"
    """`linear` is the weighted mean (model soups, Wortsman et al., 2022); `slerp` interpolates two models on the sphere, tensor
    by tensor, which retains their norms (Shoemake, 1985). Adapters are applied to their base first."""

    @model_validator(mode="after")
    def _two_for_slerp(self) -> Self:
        if self.method == "slerp" and len(self.models) != 2:
            raise ValueError(f"slerp interpolates between two models; found {len(self.models)}")
        return self


class Push(Model):
    """A model that `snakemake push` pushes to the Hub, with its model card. No other command pushes."""

    model: Annotated[str, Field(pattern=f"^(sft|dpo|reward):{NAME_PATTERN}$"), names("")]
    """Model to push: `sft:NAME`, `dpo:NAME` or `reward:NAME`."""
    repository: Annotated[str, Field(pattern=f"^{HUB_NAME}/{HUB_NAME}$", max_length=96)]
    """Repository on the Hub, `owner/name`; created if it doesn't exist."""
    private: bool = True
    """Creates a private repository, and refuses to push to an existing public one. Set `false` for a public repository."""
    branch: Revision = "main"
    """Branch of the repository; created if it doesn't exist."""


class Gguf(Model):
    """A model that `snakemake gguf` converts to GGUF, with llama.cpp's converter."""

    model: Annotated[str, Field(pattern=f"^(sft|dpo|merge):{NAME_PATTERN}$"), names("")]
    """Model to convert: `sft:NAME`, `dpo:NAME` or `merge:NAME`. A LoRA run needs `lora.merge: true`."""
    type: Literal["f16", "bf16", "q8_0"] = "f16"
    """Data type of the weights: 16-bit floats, or 8-bit blocks (`q8_0`)."""


class Workflow(Model):
    """A snaketune config: named corpora, tokenizers, trainings and evaluations."""

    corpora: Annotated[dict[Name, Corpus], Field(min_length=1)]
    tokenizers: dict[Name, Tokenizer] = {}
    sft: dict[Name, Sft] = {}
    dpo: dict[Name, Dpo] = {}
    reward: dict[Name, Reward] = {}
    teacher: dict[Name, Teacher] = {}
    merge: dict[Name, Merge] = {}
    sample: dict[Name, Sample] = {}
    score: dict[Name, Score] = {}
    eval: dict[Name, Evaluation] = {}
    doctor: Doctor = Doctor()
    verify: Verify = Verify()
    tracking: Tracking = Tracking()
    report: Report = Report()
    push: dict[Name, Push] = {}
    gguf: dict[Name, Gguf] = {}
    reruns_on: dict[str, Literal["code", "versions"]] = {}
    """Additional reasons to rerun a stage, by the name of its rule: `code` reruns it when its code changes; `versions` also
    when versions of its libraries change."""

    def tokenizer_of(self, run: Run) -> str:
        return (run if isinstance(run, Sft) else self.sft[self.sft_below(run)]).tokenizer

    def run_of(self, model: str) -> Sft | Dpo:
        """The run of `sft:NAME` or `dpo:NAME`."""
        section, _, name = model.partition(":")
        return self.dpo[name] if section == "dpo" else self.sft[name]

    def lora_of(self, run: Run) -> Lora | None:
        """The adapter settings of a run; those of the run before if it continues that one's adapter."""
        while isinstance(run, Dpo) and run.lora == "continued":
            run = self.run_of(run.start)
        return run.lora if isinstance(run.lora, Lora) else None

    def sft_below(self, run: Dpo | Reward) -> str:
        """Name of the SFT run that a run starts from, directly or by way of DPO runs."""
        section, _, name = run.start.partition(":")
        return name if section == "sft" else self.sft_below(self.dpo[name])
