"""The `sft:` and `dpo:` sections: training runs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from snaketune.config.base import (
    NAME_PATTERN,
    CorpusName,
    Fraction,
    Model,
    Name,
    PositiveFloat,
    PositiveInt,
    Regex,
    TokenizerName,
    TrainedModel,
    names,
)
from snaketune.config.base_models import Base, Pretrained, Scratch, Seed
from snaketune.config.distillation import Distill
from snaketune.config.held_out import Race, Selection, SnapshotShare, snapshot_name
from snaketune.config.lora import Lora, LoraOrContinued, Quantization
from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import GradientCheckpointing, MicroBatchRows, Operation
from snaketune.config.optimizers import (
    SHARDING,
    OptimizerName,
    ScheduleName,
    check_sharding,
    check_supported,
    checked_options,
)
from snaketune.config.packing import Packing
from snaketune.config.round_keys import RoundPairs, RoundRows, Rounds, check_round_keys
from snaketune.config.sampling import Responses
from snaketune.config.scoring import Scoring

Beta = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["auto", "float32", "bfloat16"]
SaveDtype = Literal["auto", "bfloat16", "float32"]
SftLoss = Literal["nll", "dft"]
License = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$", max_length=60)]


class Optimization(Model):
    """The settings of the optimizer steps."""

    epochs: PositiveFloat = 1.0
    """Number of passes over the rows."""
    batch_rows: PositiveInt = 32
    """Rows per optimizer step, over all GPUs and accumulation steps. With several row lengths, it counts rows of the
    longest."""
    learning_rate: PositiveFloat
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: ScheduleName = "cosine"
    """Learning rate schedule after the warm-up, by its name in transformers: `cosine` and `linear` decay to 0; `constant` has
    neither decay nor warm-up."""
    schedule_options: Annotated[dict[str, Any], Field(validate_default=True)] = {}
    """Options of transformers' function for the schedule, such as `{min_lr_rate: 0.1}` for `cosine_with_min_lr` or
    `{num_decay_steps: 100}` for `warmup_stable_decay`; see below."""
    warmup_fraction: Fraction = 0.03
    """Share of the optimizer steps over which the learning rate rises (warm-up)."""
    optimizer: OptimizerName = "adamw_torch_fused"
    """Optimizer, by its name in transformers; `muon` (torch) trains matrices by Muon (Jordan et al., 2024), with steps of the
    size of AdamW's, and embeddings, output head and all that isn't a matrix by AdamW. The 8-bit and paged ones, whose states
    move to host memory when GPU memory is full, are from bitsandbytes."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay; not applied to biases and norms. Decoupled from the gradient (AdamW), except in `sgd`, `adagrad` and
    `rmsprop`, which add it to the gradient."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square, for optimizers of the Adam and Lion families."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    trainable: Annotated[Regex, Field(min_length=1)] | None = None
    """A regular expression that matches the full names of the parameters to train; the others are frozen. For example
    `model\\.layers\\.(2[0-9])\\..*` trains the layers 20 to 29, and `(?!.*embed_tokens).*` all but the embedding. Not with
    `lora`."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune (Jain et al., 2023): adds uniform noise to the embeddings of training tokens, up to alpha / √(length x width) of
    each document, such as 5. For SFT only."""
    precision: Precision = "auto"
    """Data type of the computation. `auto` is bfloat16 on a GPU that supports it, else float32; on a CPU with matrix units
    (AMX), training steps then multiply in bfloat16, by torch's matmul precision `medium`."""
    compile: Literal["auto"] | bool = "auto"
    """Compiles the layers of packed trainings (`torch.compile`). `auto` does if the run is long enough to make up for the time
    that compiling takes."""
    deterministic: bool = False
    """Makes trainings on CUDA deterministic, so that a resumed run ends with the same bytes as an uninterrupted one. It costs
    speed (docs/benchmarks.md). On a CPU, trainings are always deterministic."""
    save_dtype: SaveDtype = "auto"
    """Data type of the saved weights. `auto` uses bfloat16 if the initial weights are bfloat16 or the training computes in
    bfloat16, else float32, also for float16 models."""
    seed: Seed = 0
    """Seed of the order of rows, of dropout and of new weights."""

    _supported = field_validator("optimizer", "schedule", mode="before")(check_supported)

    @field_validator("schedule_options")
    @classmethod
    def _valid_schedule_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # Errors of these two keys are reported already.
        if "schedule" not in info.data or "learning_rate" not in info.data:
            return options
        return checked_options(info.data["schedule"], options, info.data["learning_rate"])


class Learning(Selection, Optimization):
    """The settings that determine the weights."""


class Training(Learning):
    """Optimization settings, and the batch plan. The batch plan changes only the last bits of sums and which inputs dropout
    zeroes, so edits of `micro_batch_rows` and `gradient_checkpointing` rerun nothing."""

    micro_batch_rows: MicroBatchRows = "auto"
    """Rows per forward pass on one GPU; gradients are accumulated up to `batch_rows`. `auto` measures which number is fastest
    on the device (rule `calibrate`)."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Recomputes activations in the backward pass, which saves memory for about a third more computation. `auto` does if
    `micro_batch_rows: auto` measured that it is faster, or if memory runs out."""
    snapshots: tuple[SnapshotShare, ...] = ()
    """Shares of the run, such as `[0.25, 0.5]`, whose weights become results of their own, `NAME@0.25`, which all sections can
    name. The run resumes from them, so nothing is trained twice."""

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        rows, micro = self.batch_rows, self.micro_batch_rows
        if micro != "auto" and rows % micro:
            raise ValueError(f"batch_rows {rows} is not a multiple of micro_batch_rows {micro}")
        return self


class Sft(Model):
    """Supervised fine-tuning. The initial weights are a `base`, or the result of another run."""

    base: Base | None = None
    """Initial weights: `{path: ...}` of a pretrained model, or the architecture of a new one."""
    use_base: Annotated[str, Field(pattern=f"^sft:{NAME_PATTERN}$"), names("")] | None = None
    """`sft:NAME`, instead of `base`: uses the result of that run as initial weights. Both runs must have the same tokenizer."""
    corpus: CorpusName
    """Corpus to train on, of kind `conversations` or `text`."""
    tokenizer: TokenizerName
    """Tokenizer of the run. For a pretrained model, it must be one that adopts the model's own."""
    packing: Packing = Packing()
    training: Training
    race: Race | None = None
    loss: SftLoss = "nll"
    """Loss of a supervised token: its negative log-probability (`nll`), or that times its probability, without a gradient
    through the latter (`dft`, Dynamic Fine-Tuning, Wu et al., 2025)."""
    distill: Distill | None = None
    lora: Lora | None = None
    quantization: Quantization | None = None
    operation: Operation = Operation()
    license: License | None = None
    """License of the model for model cards, by its Hub identifier, such as `apache-2.0`. Runs that start from this one inherit
    it unless they set their own."""
    rounds: Rounds | None = None
    """Trains in rounds on the model's own responses: each round samples the model so far, scores its responses, and trains on
    the right ones of all rounds so far, and on `corpus`. A number of rounds, or a list with the keys that each round changes:
    `[{}, {training.learning_rate: 1.0e-5}]`."""
    sample: Responses | None = None
    """Of rounds: the prompts and how they are sampled, with the keys of `sample:`. A round takes prompts that earlier rounds
    didn't take, as far as they last."""
    score: Scoring | None = None
    """Of rounds: what responses are worth, with the keys of `score:`."""
    rows: RoundRows | None = None
    """Of rounds: which responses become rows."""

    @property
    def continues(self) -> str | None:
        """Name of the SFT run whose result provides the initial weights; None if there is a `base`."""
        return self.use_base and self.use_base.removeprefix("sft:")

    @property
    def start(self) -> str | None:
        """`sft:NAME` of the run whose result provides the initial weights; None if there is a `base`."""
        return self.use_base

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if (self.base is None) == (self.use_base is None):
            found = "neither" if self.base is None else "both"
            raise ValueError(f"expected either `base` or `use_base: sft:NAME` as the initial weights; found {found}")
        check_round_keys(self, ("sample", "score", "rows"), ())
        if self.lora and isinstance(self.base, Scratch):
            raise ValueError("lora adapts a pretrained model; a model from scratch is trained in full")
        if self.packing.strategy == "none" and self.lora and self.lora.init_lora_weights == "eva":
            raise ValueError(
                "lora.init_lora_weights: eva reads packed rows; choose another, or another packing.strategy"
            )
        if self.distill and (self.loss == "dft" or self.packing.strategy == "none"):
            key, found = ("loss", self.loss) if self.loss == "dft" else ("packing.strategy", "none")
            raise ValueError(f"distill is for packed rows and loss nll; found {key} {found}, so remove one of them")
        if self.training.compile is True and self.packing.strategy == "none":
            raise ValueError(
                "training.compile: unpacked rows have different shapes in every batch, so it isn't supported; remove it"
            )
        return check_together(self)


class ReferencePass(Model):
    """Computation of the reference's log-probabilities, which all runs with the same weights, pairs, data type and kernel
    share. Edits don't recompute existing ones."""

    parts: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of parallel jobs that share the pairs; their results are gathered into one."""
    token_logps: bool = False
    """Also stores the log-probability of every token. Losses that need them enable it automatically."""
    share_kernels: bool = False
    """Accepts log-probabilities in the same data type from another attention kernel (sdpa, varlen, flash) or device, which
    differ by rounding only."""


class Dpo(PreferenceLoss):
    """Preference optimization with DPO (Rafailov et al., 2023) or a related loss. The result of another run provides the
    initial weights and, if the loss needs one, the reference."""

    from_: Annotated[str, Field(alias="from", pattern=f"^(dpo:)?{NAME_PATTERN}$", max_length=84), names("sft")]
    """SFT run whose result provides the initial weights, and is the reference unless `reference` is set; or `dpo:NAME`, another
    run of this section."""
    reference: Pretrained | TrainedModel | Literal["start", "previous"] | None = None
    """Another reference model: `sft:NAME`, `dpo:NAME`, or `{path: ...}` of a pretrained one with the same vocabulary. Of
    rounds: `previous`, the model of the round before (the default), or `start`, the model that the first round starts from."""
    reference_pass: ReferencePass = ReferencePass()
    corpus: Annotated[str, Field(pattern=f"^(?:{NAME_PATTERN})?$", max_length=80), names("corpora")] = ""
    """Corpus to train on, of kind `preferences`; for `kto` and `apo_zero_unpaired`, of kind `unpaired`. Required, except with
    `rounds`, which make their own."""
    packing: Packing = Packing()
    training: Training
    race: Race | None = None
    lora: LoraOrContinued | None = None
    """Adapter settings, or `continued` to train the adapter of the run before further, without dropout; its `lora.merge` then
    also applies to this run's result."""
    quantization: Quantization | None = None
    operation: Operation = Operation()
    rounds: Rounds | None = None
    """Trains in rounds on pairs of the model's own responses: each round samples the model so far, scores its responses, makes
    pairs of them, and trains on these. A number of rounds, or a list with the keys that each round changes:
    `[{}, {beta: 0.05}]`."""
    sample: Responses | None = None
    """Of rounds: as in `sft:`."""
    score: Scoring | None = None
    """Of rounds: what responses are worth, with the keys of `score:`."""
    pairs: RoundPairs | None = None
    """Of rounds: which responses become pairs."""
    mix: dict[Name, Annotated[float, Field(gt=0, le=100)]] = {}
    """Of rounds: other corpora of preferences that each round also trains on, by how often each of their rows is used, such as
    `{votes: 0.2}`."""

    @property
    def start(self) -> str:
        """`sft:NAME` or `dpo:NAME` of the run whose result provides the initial weights."""
        return self.from_ if ":" in self.from_ else f"sft:{self.from_}"

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        check_round_keys(self, ("sample", "score", "pairs"), ("mix",))
        if not self.corpus and not self.rounds:
            raise ValueError("corpus is missing: name a corpus of preferences")
        if self.corpus and self.rounds:
            raise ValueError(
                f"rounds make their own pairs; name {self.corpus} under mix to train on it beside them, or remove it"
            )
        if self.reference in ("start", "previous") and not self.rounds:
            raise ValueError(f"reference {self.reference} belongs to rounds; name a model, or set rounds")
        if not self.needs_reference and (self.reference or self.reference_pass != ReferencePass()):
            raise ValueError(
                f"loss {self.loss} has no reference, so `reference` and `reference_pass` have no effect; remove them"
            )
        check_pair_packing("dpo", self.packing)
        if self.training.neftune_noise_alpha:
            raise ValueError(
                "training.neftune_noise_alpha: noise would change log-probabilities, which are compared with those of the "
                "reference; remove it, or set it in the SFT run"
            )
        return check_together(self)


def check_pair_packing(section: str, packing: Packing) -> None:
    """ValueError if pairs can't be packed like this. Args: section: that of the run."""
    if packing.strategy == "none":
        raise ValueError(f"{section} trains on packed pairs; packing.strategy can't be `none` here")
    if packing.strategy == "wrapped" or packing.overflow == "split":
        raise ValueError("pairs are never split; choose another packing.strategy or packing.overflow")
    if packing.train_on != "assistant":
        raise ValueError("in pairs, completions are supervised; remove packing.train_on")


def snapshots_of(run: Any) -> tuple[float, ...]:
    """The shares at which a run's snapshots end, ascending; the rungs of its race are among them."""
    return tuple(sorted({*run.training.snapshots, *(run.race.rungs if run.race else ())}))


def check_together(run: Any) -> Any:
    """The run; ValueError if its quantization, adapters, optimizer, processes and rows don't fit together."""
    training, processes = run.training, run.operation.processes
    micro = 1 if training.micro_batch_rows == "auto" else training.micro_batch_rows
    snapshots = snapshots_of(run)
    if snapshots and training.keep == "best":
        raise ValueError(
            "training.snapshots, and the rungs of a race, are weights on the way, and keep: best replaces those at the end; "
            "choose one of them"
        )
    if len({snapshot_name("", share) for share in snapshots}) < len(snapshots):
        raise ValueError(
            f"two snapshots (or rungs of a race) would have one name, of {list(snapshots)}; remove one of them"
        )
    if run.quantization and not run.lora:
        raise ValueError("quantization freezes the base weights, so it needs `lora`")
    if training.trainable and run.lora:
        raise ValueError(
            "training.trainable: with lora only adapters are trained; choose them by lora.target_modules and "
            "lora.modules_to_save"
        )
    if isinstance(run.lora, Lora):
        if run.quantization and run.lora.changes_base:
            raise ValueError(
                f"lora.init_lora_weights: {run.lora.init_lora_weights} changes the base weights, which are in 4 bits; remove "
                "it, or quantization"
            )
        if run.lora.init_lora_weights == "eva" and processes > 1 and run.operation.launch in SHARDING:
            raise ValueError(
                f"lora.init_lora_weights: eva doesn't work with models sharded by {run.operation.launch}; choose another"
            )
        if run.lora.loraplus_lr_ratio and training.optimizer == "muon":
            raise ValueError(
                "lora.loraplus_lr_ratio: muon scales its steps by the shapes of matrices; choose one of them"
            )
    if processes > 1:
        check_sharding(training.optimizer, run.operation.launch)
    if processes > 1 and training.batch_rows % (micro * processes):
        raise ValueError(
            f"training.batch_rows: {training.batch_rows} rows can't be divided into micro-batches of {micro} in {processes} "
            f"processes (operation.gpus x nodes); expected a multiple of {micro * processes}"
        )
    return run
