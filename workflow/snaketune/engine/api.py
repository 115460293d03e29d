"""The trainers as a user of TRL calls them: a model or its name, TRL's or transformers' arguments, packed rows.

    trainer = PackedDPOTrainer(model="Qwen/Qwen2.5-0.5B", args=DPOConfig(...), train_dataset=pack_pairs(...))
    trainer.train()

They load the model, prove by the self-test that packed logits equal separate ones, add adapters, and for DPO compute the
reference log-probabilities once, so that no reference model is in memory. Arguments that mean nothing on packed rows, or can't
be followed, are refused by name.
"""

import copy
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from snaketune.engine.checkpoints import complete_checkpoints, damaged_file, step_of
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.features import Options
from snaketune.engine.held_out import HeldOut, why_not_measurable
from snaketune.engine.measurements import HeldOutSettings
from snaketune.engine.model.adapters import add_adapters, leave_casts_to_autocast
from snaketune.engine.model.attention import usable_kernels
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.forward import without_dropout
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.pair_logps import reference_logps
from snaketune.engine.preference_settings import NEEDS, PreferenceSettings
from snaketune.engine.sft import SftTrainer
from snaketune.engine.throughput import LogCallback
from snaketune.errors import SnaketuneError

PACKED = "rows are packed already: see pack_conversations and pack_pairs"
OWN_WAY = "packed batches have a way of their own"
# Arguments that have to stay at their defaults, and why.
REFUSED = {
    "fp16": "float16 isn't supported; use bf16, or neither",
    "torch_compile": "use options=Options(compile=True), which compiles layers without recompiling for each batch",
    "label_smoothing_factor": "it isn't part of these losses",
    "load_best_model_at_end": "the weights of the last step are the result",
    "metric_for_best_model": "the weights of the last step are the result",
    "save_total_limit": "the newest checkpoint is kept",
    "save_only_model": "checkpoints hold all that an exact resume needs",
    "data_seed": "the order of rows is a function of the seed",
    "eval_delay": "held-out rows are measured from the start",
    "eval_on_start": "held-out rows are measured from the start",
    "include_num_input_tokens_seen": "tokens are counted in every log line",
    "push_to_hub": "call model.push_to_hub after the training",
    "train_sampling_strategy": "the order of rows is a function of the seed",
    "max_steps": "use num_train_epochs",
    "use_liger_kernel": "the head runs in chunks already",
    "packing": PACKED,
    "packing_strategy": PACKED,
    "padding_free": OWN_WAY,
    "pad_to_multiple_of": OWN_WAY,
    "eval_packing": PACKED,
    "max_length": PACKED,
    "truncation_mode": PACKED,
    "shuffle_dataset": PACKED,
    "dataset_text_field": PACKED,
    "dataset_kwargs": PACKED,
    "dataset_num_proc": PACKED,
    "eos_token": PACKED,
    "chat_template_path": PACKED,
    "completion_only_loss": "pack rows of prompt and completion",
    "assistant_only_loss": "pass it to pack_conversations",
    "router_aux_loss_coef": "set it in the model's config",
    "disable_dropout": "DPO compares with log-probabilities that were computed without dropout",
    "use_weighting": "WPO isn't among these losses",
    "sync_ref_model": "the reference log-probabilities are computed once",
    "ref_model_mixup_alpha": "the reference log-probabilities are computed once",
    "ref_model_sync_steps": "the reference log-probabilities are computed once",
}


def _check_arguments(args: TrainingArguments) -> None:
    """Raise SnaketuneError if an argument is set that has no effect here."""
    if not isinstance(args, TrainingArguments):
        raise SnaketuneError(
            f"args: expected TRL's config or transformers' TrainingArguments, found {type(args).__name__}"
        )
    for field in fields(args):
        if field.name not in REFUSED:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        # TRL resolves some defaults to None.
        if getattr(args, field.name) not in (default, None):
            raise SnaketuneError(
                f"args.{field.name}: found {getattr(args, field.name)!r}, which has no effect here: {REFUSED[field.name]}"
            )
    for name, refused in (("save_strategy", "best"), ("lr_scheduler_type", "reduce_lr_on_plateau")):
        if getattr(args, name) == refused:
            raise SnaketuneError(f"args.{name}: found {refused!r}, which depends on evaluations; choose another")
    if args.n_gpu > 1:
        raise SnaketuneError(
            f"{args.n_gpu} GPUs are visible to one process; start one per GPU (accelerate launch), or set CUDA_VISIBLE_DEVICES"
        )
    if (launched := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) != ("bf16" if args.bf16 else "no"):
        raise SnaketuneError(
            f"accelerate's mixed precision is {launched}, and args.bf16 is {args.bf16}; launch with --mixed_precision no"
        )


def _check_rows(name: str, rows: Any, *, pairs: bool) -> None:
    function = "pack_pairs" if pairs else "pack_conversations"
    if not isinstance(rows, PackedRows) or bool(rows.pairs) != pairs:
        found = ("pairs" if rows.pairs else "conversations") if isinstance(rows, PackedRows) else type(rows).__name__
        raise SnaketuneError(f"{name}: expected rows of {function}, found {found}")


def _followed(args: TrainingArguments, steps_per_epoch: int) -> tuple[TrainingArguments, float | int | None]:
    """The arguments as the engine needs them, and the interval of measurements of held-out rows."""
    interval = {"steps": args.eval_steps or args.logging_steps, "epoch": steps_per_epoch}.get(
        str(args.eval_strategy.value)
    )
    args = copy.copy(args)
    # Epochs are filled with blank items; accelerate would repeat rows from their start.
    args.accelerator_config = copy.copy(args.accelerator_config)
    args.accelerator_config.even_batches = args.accelerator_config.use_seedable_sampler = False
    args.dataloader_num_workers, args.remove_unused_columns, args.ddp_find_unused_parameters = 0, False, False
    # Measured by `HeldOut` instead.
    args.eval_strategy, args.do_eval = type(args.eval_strategy)("no"), False
    if args.gradient_checkpointing:
        args.gradient_checkpointing_kwargs = {"use_reentrant": False} | (args.gradient_checkpointing_kwargs or {})
    return args, interval


def _compute_of(args: TrainingArguments) -> Compute:
    compute = resolve_compute("bfloat16" if args.bf16 else "float32", training=True)
    if args.device.type == compute.device.type:
        return compute
    kernel = usable_kernels(args.device, compute.dtype)[0]
    return replace(compute, device=args.device, kernel=kernel)


class _CheckedModel:
    """A model on its device that has passed its self-test, and how it computes.

    Args:
        dropout: whether its dropout is active in training.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TrainingArguments,
        rows: Sequence[PackedRows],
        peft_config: LoraConfig | None,
        dropout: bool,
    ):
        compute = _compute_of(args)
        if isinstance(model, PeftModel):
            raise SnaketuneError("model: found one with adapters; merge them, or pass the model and peft_config")
        if isinstance(model, str):
            loading = dict(getattr(args, "model_init_kwargs", None) or {})
            loading.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
            dtype = compute.weights_dtype(frozen=peft_config is not None)
            model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": dtype, "use_safetensors": True} | loading)
        model = model.to(compute.device)
        longest = max(packed.longest[0] for packed in rows)
        prefixes = any(packed.has_prefixes for packed in rows)
        compute = choose_kernel(compute, model.config, longest, prefixes=prefixes, dropout=dropout)
        self.compute = self_test(model, list(rows), compute, training=True).compute
        self.model = model

    def add_adapters(self, peft_config: LoraConfig | None, args: TrainingArguments) -> None:
        if peft_config is None:
            return
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.model = add_adapters(self.model, peft_config)
        if self.compute.dtype != torch.float32:
            leave_casts_to_autocast(self.model)
        if args.gradient_checkpointing:
            self.model.enable_input_require_grads()


def _options(args: TrainingArguments, options: Options | None, peft_config: LoraConfig | None) -> Options:
    options = options or Options()
    return replace(
        options,
        offload=options.offload or getattr(args, "activation_offloading", False),
        neftune_noise_alpha=args.neftune_noise_alpha or options.neftune_noise_alpha,
        eva=peft_config is not None and peft_config.init_lora_weights == "eva",
    )


class _Standalone:
    """`train` and `save_model` for scripts, a mixin of both trainers. Stages call the same steps one by one
    (`training.pipeline.fit`), and look for checkpoints and describe the training in between."""

    trained = False

    def _add_callbacks(
        self, eval_dataset: PackedRows | None, interval: float | int | None, callbacks: list[TrainerCallback] | None
    ) -> None:
        """Add the measurements of held-out rows, and then the user's callbacks, which find checkpoints complete."""
        if interval is not None and eval_dataset is None:
            raise SnaketuneError("args.eval_strategy: it needs an eval_dataset, found None")
        if interval is not None:
            if why_not := why_not_measurable(self.model, self.compute.kernel, eval_dataset, None):
                raise SnaketuneError(f"eval_dataset: it can't be measured while training: {why_not}")
            settings = HeldOutSettings(every=interval, rows=len(eval_dataset), samples=0)
            self.held_out = HeldOut(self, eval_dataset, settings, Path(self.args.output_dir) / "best")
            self.add_callback(self.held_out)
        if self.args.disable_tqdm:
            self.add_callback(LogCallback())
        for callback in callbacks or ():
            self.add_callback(callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, **keywords: Any) -> Any:
        """Train, once. Args: resume_from_checkpoint: a folder, or True for the newest complete one in `output_dir`, if any."""
        if self.trained:
            raise SnaketuneError("train: a trainer trains once; make another one from the trained model")
        self.trained = True
        folder = self._checkpoint_of(resume_from_checkpoint) if resume_from_checkpoint else None
        if folder is None:
            self.initialize_adapters()
            self.check_start()
        self.compile()
        result = super().train(resume_from_checkpoint=folder and str(folder), **keywords)
        # The moving average, if there is one.
        self.use_final_weights()
        return result

    def _checkpoint_of(self, wanted: str | bool) -> Path | None:
        if isinstance(wanted, bool):
            found = sorted(complete_checkpoints(Path(self.args.output_dir)), key=step_of, reverse=True)
            return next((folder for folder in found if damaged_file(folder) is None), None)
        if (wrong := damaged_file(Path(wanted))) is not None:
            raise SnaketuneError(f"resume_from_checkpoint: {wrong} is missing or damaged")
        return Path(wanted)

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        raise SnaketuneError(
            "evaluate: pass eval_dataset and args.eval_strategy, by which it is measured while training"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as transformers and peft read them; the Trainer's own calls write checkpoints."""
        if _internal_call:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            folder = output_dir or self.args.output_dir
            self.accelerator.unwrap_model(self.model).save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)


def _steps_per_epoch(args: TrainingArguments, rows: PackedRows) -> int:
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return math.ceil(len(rows) / per_step)


class PackedSFTTrainer(_Standalone, SftTrainer):
    """Supervised fine-tuning on packed rows.

    Args:
        model: a model, or a folder or Hub repository.
        args: TRL's SFTConfig, or transformers' TrainingArguments. A batch is of rows, each with several conversations; the loss
            of a step is the mean over its learned tokens.
        train_dataset, eval_dataset: rows of `pack_conversations`; the latter are measured at `args.eval_strategy`.
        processing_class: a tokenizer, saved beside the model.
        peft_config: adapters to train; the model's own weights are then frozen.
        options: what TrainingArguments don't say, such as compilation, Muon, or a moving average of the weights.
    Raises:
        SnaketuneError: an argument has no effect here, or the model can't compute packed documents as it computes each alone.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TrainingArguments,
        train_dataset: PackedRows,
        eval_dataset: PackedRows | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: LoraConfig | None = None,
        options: Options | None = None,
    ):
        _check_arguments(args)
        _check_rows("train_dataset", train_dataset, pairs=False)
        if eval_dataset is not None:
            _check_rows("eval_dataset", eval_dataset, pairs=False)
        loss = getattr(args, "loss_type", "nll")
        if loss not in ("nll", "chunked_nll", "dft"):
            raise SnaketuneError(f"args.loss_type: found {loss!r}, expected nll or dft")
        set_seed(args.seed)
        rows = [train_dataset] if eval_dataset is None else [train_dataset, eval_dataset]
        checked = _CheckedModel(model, args, rows, peft_config, dropout=True)
        checked.add_adapters(peft_config, args)
        followed, interval = _followed(args, _steps_per_epoch(args, train_dataset))
        super().__init__(
            model=checked.model,
            args=followed,
            train_dataset=train_dataset,
            compute=checked.compute,
            options=_options(args, options, peft_config),
            loss="dft" if loss == "dft" else "nll",
            processing_class=processing_class,
        )
        self._add_callbacks(eval_dataset, interval, callbacks)


class PackedDPOTrainer(_Standalone, DpoTrainer):
    """Preference optimization on packed pairs: the prompt of pairs in one row is computed once, the reference before training.

    Args:
        model: a model, or a folder or Hub repository.
        ref_model: the reference; None for the model as it is now, without adapters.
        args: TRL's DPOConfig, or transformers' TrainingArguments for the sigmoid loss with beta 0.1. A batch is of rows, each
            with several pairs; the loss of a step is the mean over its pairs.
        train_dataset, eval_dataset: rows of `pack_pairs`; the latter are measured at `args.eval_strategy`.
        processing_class, peft_config, options: as for PackedSFTTrainer.
    Raises:
        SnaketuneError: an argument has no effect here, or the model can't compute packed documents as it computes each alone.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        train_dataset: PackedRows | None = None,
        eval_dataset: PackedRows | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: LoraConfig | None = None,
        options: Options | None = None,
    ):
        if args is None or train_dataset is None:
            raise SnaketuneError("args and train_dataset: expected a DPOConfig and rows of pack_pairs, found None")
        _check_arguments(args)
        _check_rows("train_dataset", train_dataset, pairs=True)
        if eval_dataset is not None:
            _check_rows("eval_dataset", eval_dataset, pairs=True)
        settings = settings_of(args, external_reference=ref_model is not None)
        set_seed(args.seed)
        rows = [train_dataset] if eval_dataset is None else [train_dataset, eval_dataset]
        checked = _CheckedModel(model, args, rows, peft_config, dropout=False)
        if settings.needs_reference:
            reference = (
                checked if ref_model is None else _CheckedModel(ref_model, args, rows, peft_config, dropout=False)
            )
            rows = [_with_reference(packed, reference, settings) for packed in rows]
            del reference
        # While it is trained: policy and reference are compared. Adapters that are added now keep theirs.
        self.base, self.dropout_off = checked.model, ExitStack()
        self.dropout_off.enter_context(without_dropout(self.base))
        checked.add_adapters(peft_config, args)
        followed, interval = _followed(args, _steps_per_epoch(args, train_dataset))
        super().__init__(
            model=checked.model.train(),
            args=followed,
            train_dataset=rows[0],
            compute=checked.compute,
            options=_options(args, options, peft_config),
            settings=settings,
            processing_class=processing_class,
        )
        self._add_callbacks(rows[1] if eval_dataset is not None else None, interval, callbacks)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Its config has the model's dropout.
        self.dropout_off.close()
        super().save_model(output_dir, _internal_call)
        self.dropout_off.enter_context(without_dropout(self.base))


def _with_reference(rows: PackedRows, reference: _CheckedModel, settings: PreferenceSettings) -> PackedRows:
    """The rows with reference log-probabilities of their pairs; those that are passed stay as they are."""
    logps = reference_logps(reference.model, rows, reference.compute, settings.ld_alpha)
    rows = copy.copy(rows)
    rows.documents = replace(rows.documents, values={**rows.documents.values, "reference": logps})
    return rows


def settings_of(args: TrainingArguments, external_reference: bool = False) -> PreferenceSettings:
    """The losses that a DPOConfig asks for; SnaketuneError if one isn't known."""
    names = getattr(args, "loss_type", ["sigmoid"])
    names = [names] if isinstance(names, str) else list(names)
    weights = getattr(args, "loss_weights", None) or [1.0] * len(names)
    for name in names:
        if name not in NEEDS or NEEDS[name].unpaired:
            known = ", ".join(loss for loss, needs in NEEDS.items() if not needs.unpaired)
            raise SnaketuneError(f"args.loss_type: found {name!r}, expected one or several of {known}")
    weight_of = dict(zip(names, weights, strict=True))
    read = {field.name for field in fields(PreferenceSettings)} & {field.name for field in fields(args)}
    values = {name: getattr(args, name) for name in read}
    values |= {"ld_alpha": None} if values.get("ld_alpha") == 1 else {}
    ordered = {name: weight_of[name] for name in NEEDS if name in weight_of}
    settings = PreferenceSettings(weights=ordered, external_reference=external_reference, **values)
    if "exo_pair" in weight_of and not settings.label_smoothing:
        raise SnaketuneError("args.label_smoothing: exo_pair is infinite without it; its authors use 0.001")
    if settings.f_divergence_type != "reverse_kl" and not all(NEEDS[name].diverges for name in weight_of):
        raise SnaketuneError(
            f"args.f_divergence_type: found {settings.f_divergence_type!r}, undefined for these losses"
        )
    return settings
