"""`sft:` and `dpo:`, the trainings."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from snaketune.config.base import NAME_PATTERN, Fraction, Model, Name, PositiveFloat, PositiveInt, Revision
from snaketune.config.corpus_sources import regex
from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import GradientCheckpointing, MicroBatchRows, Operation
from snaketune.config.optimizers import OptimizerName, check_optimizer, check_shared
from snaketune.config.packing import Packing
from snaketune.config.paths import LocalPath
from snaketune.config.schedules import ScheduleName, check_schedule, checked_options

Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Precision = Literal["auto", "float32", "bfloat16"]
SaveDtype = Literal["auto", "bfloat16", "float32"]
ModuleName = Annotated[str, Field(min_length=1)]
License = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$", max_length=60)]


class Scratch(Model):
    """A model made here, with random weights, for the vocabulary of the run's tokenizer."""

    architecture: Literal["llama", "qwen2", "mistral", "phi3"] = "llama"
    """Model type, as transformers names it. Of a `qwen2` folder AutoTokenizer takes that family's own class, which cuts texts
    otherwise than a tokenizer trained here."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width of the feed-forward layers."""
    layers: PositiveInt
    """Transformer blocks."""
    heads: PositiveInt
    """Attention heads."""
    key_value_heads: PositiveInt | None = None
    """Grouped-query attention; default: as many as heads."""
    tie_embeddings: bool = True
    """The output head is the transposed embedding."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions."""
    max_positions: PositiveInt = 2048
    """Longest sequence that the model is meant for."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    seed: Seed = 0
    """Of the initial weights."""

    @model_validator(mode="after")
    def _divides(self) -> "Scratch":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} can't be divided among {self.heads} heads")
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.heads} heads is odd; rotary positions need it even"
            )
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"{self.heads} heads can't be shared by {self.key_value_heads} key_value_heads")
        return self


class Pretrained(Model):
    """Weights to start from."""

    path: LocalPath
    """Local folder (with safetensors) or Hub id."""
    revision: Revision | None = None
    """Commit, tag or branch of a Hub model. It stands for the weights: a branch that moves reruns nothing."""
    trust_remote_code: bool = False
    """Runs Python code that comes with the model. Leave it off unless you have read that code."""


def _kind_of_base(base: Any) -> str:
    """A base with a path is there already; anything else describes a new one."""
    return "Pretrained" if isinstance(base, Pretrained) or (isinstance(base, dict) and "path" in base) else "Scratch"


class Lora(Model):
    """Low-rank adapters (Hu et al., 2021), by peft. The result has them in its weights, and in `adapter/` beside these."""

    rank: PositiveInt = 16
    """Rank of the two matrices of an adapter."""
    alpha: PositiveFloat = 32
    """An adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that a training step leaves out."""
    target_modules: str | Annotated[tuple[ModuleName, ...], Field(min_length=1)] = "all-linear"
    """Layers that get an adapter: the ends of their names as a list, or one regular expression that fits whole names;
    `all-linear` is all linear layers but the output head, and the experts of the mixtures that peft knows."""
    rslora: bool = False
    """Scales by alpha / √rank (Kalajdzievski, 2023), so that high ranks learn as fast as low ones."""
    dora: bool = False
    """Learns the length of each weight column apart from its direction (Liu et al., 2024): slower, better at low ranks."""
    modules_to_save: tuple[ModuleName, ...] = ()
    """Modules that are trained whole beside the adapters, by the ends of their names, such as `[embed_tokens, lm_head]` for
    new tokens; of an embedding that is the output head too, one name stands for both."""
    merge: bool = True
    """`false` writes no merged weights: the result is the adapter and the tokenizer, for those who serve adapters. What comes
    after it computes with the same weights either way."""

    @field_validator("target_modules")
    @classmethod
    def _compiles(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(targets, str):
            regex(targets)
        return targets


class Quantization(Model):
    """4-bit base weights for QLoRA (Dettmers et al., 2023). Needs a GPU and `lora`."""

    type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit data type."""
    double: bool = True
    """Quantizes the quantization constants too."""


def _kind_of_lora(lora: Any) -> str:
    """Text can only be the one word that there is."""
    return "continued" if isinstance(lora, str) else "Lora"


class Learning(Model):
    """What of a training shapes the weights."""

    epochs: PositiveFloat = 1.0
    """How often the rows are gone through."""
    batch_rows: PositiveInt = 32
    """Rows per optimizer step, over all GPUs and accumulation steps; of several lengths, the longest counts."""
    learning_rate: PositiveFloat
    """The highest one, at the end of the warm-up."""
    schedule: ScheduleName = "cosine"
    """How the learning rate falls after the warm-up, as transformers names it: `cosine` and `linear` to 0, `constant` not at
    all, and without a warm-up."""
    schedule_options: Annotated[dict[str, Any], Field(validate_default=True)] = {}
    """What else transformers' function for the schedule takes, such as `{min_lr_rate: 0.1}` of `cosine_with_min_lr` or
    `{num_decay_steps: 100}` of `warmup_stable_decay`; see below."""
    warmup_fraction: Fraction = 0.03
    """Share of the steps over which the learning rate rises."""
    optimizer: OptimizerName = "adamw_torch_fused"
    """As transformers names it. Those in 8 bits and the paged ones, whose states move to the host's memory when the GPU's is
    full, are bitsandbytes'."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled from the gradient (AdamW), but added to it by `sgd`, `adagrad` and `rmsprop`; biases and norms have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, in optimizers of the Adam and Lion families."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to it."""
    precision: Precision = "auto"
    """`auto` takes bfloat16 where the device has it, float32 elsewhere."""
    compile: Literal["auto"] | bool = "auto"
    """Compiles the layers of packed trainings (`torch.compile`); `auto` does where the run is long enough to earn that back."""
    deterministic: bool = False
    """On CUDA, adds gradients up in one order, so that a resumed run ends with the bytes of one that wasn't interrupted; it
    costs speed (docs/benchmarks.md). On a CPU that holds without it."""
    save_dtype: SaveDtype = "auto"
    """Data type of the weights that are written; `auto` takes bfloat16 for a model that came in bfloat16 or was trained with
    bfloat16 products, float32 for all others, float16 ones too."""
    seed: Seed = 0
    """Of the order of the rows, of dropout and of new weights."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_can_be_had(cls, name: Any) -> Any:
        check_optimizer(name)
        return name

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_can_be_had(cls, name: Any) -> Any:
        check_schedule(name)
        return name

    @field_validator("schedule_options")
    @classmethod
    def _options_of_the_schedule(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # What these two lack is told already.
        if "schedule" not in info.data or "learning_rate" not in info.data:
            return options
        return checked_options(info.data["schedule"], options, info.data["learning_rate"])


class Training(Learning):
    """The optimization, and in what portions a device computes it. The portions move sums in their last bits,
    and which inputs dropout hits; editing `micro_batch_rows` and `gradient_checkpointing` reruns nothing."""

    micro_batch_rows: MicroBatchRows = "auto"
    """Rows per forward pass on one GPU; a step of `batch_rows` is made of as many as it takes. `auto` measures what is fastest
    on the device (rule `calibrate`)."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Recomputes activations in the backward pass: less memory, about a third more work. `auto` does where `micro_batch_rows:
    auto` found that it pays, or where memory runs out."""

    @model_validator(mode="after")
    def _whole_steps(self) -> "Training":
        if self.micro_batch_rows != "auto" and self.batch_rows % self.micro_batch_rows:
            raise ValueError(f"batch_rows {self.batch_rows} is no multiple of micro_batch_rows {self.micro_batch_rows}")
        return self


class Sft(Model):
    """Supervised fine-tuning. It starts from a `base`, or from another run's result."""

    base: (
        Annotated[
            Annotated[Pretrained, Tag("Pretrained")] | Annotated[Scratch, Tag("Scratch")], Discriminator(_kind_of_base)
        ]
        | None
    ) = None
    """`{path: ...}` for a model to start from, or the shape of a new one."""
    use_base: Annotated[str, Field(pattern=f"^sft:{NAME_PATTERN}$")] | None = None
    """`sft:NAME` in the place of `base`: starts from that run's result, with the same tokenizer."""
    corpus: Name
    """Conversations or documents to train on."""
    tokenizer: Name
    """Of a model to start from, its own, adopted."""
    packing: Packing = Packing()
    training: Training
    lora: Lora | None = None
    quantization: Quantization | None = None
    operation: Operation = Operation()
    license: License | None = None
    """Of the model, as the Hub names it, such as `apache-2.0`, for model cards; runs that go on from this one have the same
    unless they name another."""

    @property
    def continues(self) -> str | None:
        """The SFT run that it starts from."""
        return self.use_base and self.use_base.removeprefix("sft:")

    @model_validator(mode="after")
    def _one_start(self) -> "Sft":
        if (self.base is None) == (self.use_base is None):
            found = "neither" if self.base is None else "both"
            raise ValueError(
                f"a run starts from a `base` or, with `use_base: sft:NAME`, from another run; found {found}"
            )
        return self

    @model_validator(mode="after")
    def _adapters(self) -> "Sft":
        if self.lora and isinstance(self.base, Scratch):
            raise ValueError("lora adapts a pretrained model; a model from scratch is trained in full")
        if self.training.compile is True and self.packing.strategy == "none":
            raise ValueError(
                "training.compile: rows that aren't packed have other shapes in every batch; leave it out here"
            )
        return _possible_together(self)


class ReferencePass(Model):
    """How the reference's log-probabilities are computed: once for all runs that agree on weights, pairs, data type and kernel.
    Editing these recomputes none that are there already."""

    parts: Annotated[int, Field(ge=1, le=128)] = 1
    """Jobs that share the pairs; their results are gathered into one."""
    token_logps: bool = False
    """Keeps the log-probability of every token too. A loss that needs them asks for them by itself."""
    share_kernels: bool = False
    """Takes log-probabilities in the same data type that another attention kernel computed (sdpa, varlen, flash; on a CPU or a
    GPU), which are the same but for rounding."""


class Dpo(PreferenceLoss):
    """Preference optimization, direct (Rafailov et al., 2023) and of its kin, starting from an SFT run and, where the loss has
    a reference, measured against it."""

    from_: Annotated[Name, Field(alias="from")]
    """The SFT run whose model is the start, and the reference too unless `reference` names another."""
    reference: Pretrained | None = None
    """Another model as the reference, whose tokens have the same ids."""
    reference_pass: ReferencePass = ReferencePass()
    corpus: Name
    """Preferences to train on; of `kto` and `apo_zero_unpaired`, a corpus of kind `unpaired`."""
    packing: Packing = Packing()
    training: Training
    lora: (
        Annotated[
            Annotated[Lora, Tag("Lora")] | Annotated[Literal["continued"], Tag("continued")],
            Discriminator(_kind_of_lora),
        ]
        | None
    ) = None
    """`continued` trains the adapter of the SFT run further, without its dropout; what comes out is as its `lora` says."""
    quantization: Quantization | None = None
    operation: Operation = Operation()

    @model_validator(mode="after")
    def _possible(self) -> "Dpo":
        if not self.needs_reference and (self.reference or self.reference_pass != ReferencePass()):
            raise ValueError(
                f"loss {self.loss} has no reference, so `reference` and `reference_pass` say nothing; leave them out"
            )
        if self.packing.strategy == "none":
            raise ValueError("dpo trains on packed pairs; packing.strategy can't be `none` here")
        if self.packing.strategy == "wrapped" or self.packing.overflow == "split":
            raise ValueError("pairs are never split; choose another packing.strategy or packing.overflow")
        if self.packing.train_on != "assistant":
            raise ValueError("pairs are supervised from their completions; leave packing.train_on out here")
        return _possible_together(self)


def _possible_together(run):
    if run.quantization and not run.lora:
        raise ValueError("quantization freezes the base weights, so it needs `lora`")
    if run.operation.processes > 1:
        check_shared(run.training.optimizer, run.operation.launch)
    rows, micro, processes = run.training.batch_rows, run.training.micro_batch_rows, run.operation.processes
    micro = 1 if micro == "auto" else micro
    if processes > 1 and rows % (micro * processes):
        raise ValueError(
            f"training.batch_rows: {rows} rows can't be divided into micro-batches of {micro} in {processes} processes "
            f"(operation.gpus x nodes); expected a multiple of {micro * processes}"
        )
    return run
