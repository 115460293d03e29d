"""Checks of what trainings name, and of keys that have to fit what is named."""

from collections.abc import Sequence
from typing import get_args

from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.held_out import NEEDS_REFERENCE, OF_SFT, RaceMetric
from snaketune.config.named_entries import check_corpus, first_run
from snaketune.config.optimizers import OPTIMIZERS, SCHEDULES, missing_package
from snaketune.config.packing import Packing
from snaketune.config.reward_runs import Reward, Run
from snaketune.config.training_runs import Dpo, Sft, Training
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError


def check_sft(key: str, name: str, run: Sft, config: Workflow) -> None:
    _check_train_corpus(key, run.corpus, config, "conversations", "text")
    if config.corpora[run.corpus].kind == "text":
        check_document_packing(key, run.packing)
    if run.packing.strategy == "none" and any(
        source.template_variables or source.fields.template_variables for source in config.corpora[run.corpus].sources
    ):
        raise SnaketuneError(
            f"{key}.packing.strategy: with `none`, TRL's trainer would render corpora.{run.corpus} without its "
            "template_variables; choose best-fit-decreasing"
        )
    if run.continues and (before := config.sft[run.continues].tokenizer) != run.tokenizer:
        raise SnaketuneError(
            f"{key}.tokenizer: found {run.tokenizer!r}, but {run.use_base!r}, from which the run starts, has {before!r}; use "
            "the same tokenizer"
        )
    check_length(key, run.packing, name, config)
    _check_order(key, run, config)
    check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)
    if isinstance(run.base, Pretrained) and config.tokenizers[run.tokenizer].train:
        raise SnaketuneError(
            f"{key}.tokenizer: {run.tokenizer!r} is trained here, but {run.base.path!r} has another vocabulary; use a "
            "tokenizer that adopts the model's own"
        )


def check_dpo(key: str, run: Dpo, config: Workflow) -> None:
    _check_train_corpus(key, run.corpus, config, "unpaired" if run.unpaired else "preferences")
    check_length(key, run.packing, config.sft_below(run), config)
    _check_order(key, run, config)
    adapter = config.lora_of(config.run_of(run.start))
    if run.lora == "continued" and not adapter:
        raise SnaketuneError(
            f"{key}.lora: `continued` trains the adapter of {run.start} further, but that run has no `lora`; set the keys "
            "of a new adapter, or remove lora"
        )
    if run.lora == "continued" and adapter and adapter.changes_base:
        raise SnaketuneError(
            f"{key}.lora: `continued` can't train the adapter of {run.start} further, since its lora.init_lora_weights "
            f"{adapter.init_lora_weights} changed the base weights; set the keys of a new adapter"
        )
    if isinstance(run.reference, str):
        of_reference = config.tokenizer_of(config.run_of(run.reference))
        if of_reference != (tokenizer := config.tokenizer_of(run)):
            raise SnaketuneError(
                f"{key}.reference: {run.reference} has the tokenizer {of_reference!r}, and this run has {tokenizer!r}; name a "
                "run with the same tokenizer"
            )
    check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)


def check_reward(key: str, run: Reward, config: Workflow) -> None:
    _check_train_corpus(key, run.corpus, config, "preferences")
    check_length(key, run.packing, run.from_, config)
    _check_order(key, run, config)
    if run.margin and not any(source.may_have_ratings for source in config.corpora[run.corpus].sources):
        raise SnaketuneError(
            f"{key}.margin: it is the difference of the ratings of a pair, and no source of corpora.{run.corpus} has ratings; "
            "name a corpus with `layout: rated`, fields.ratings or `scores`, or remove margin"
        )
    check_training(f"{key}.training", run.training)
    _check_selection(f"{key}.training", run, config)


def check_race(key: str, runs: Sequence[Sft | Dpo], config: Workflow) -> None:
    """Raise SnaketuneError if the variants of a grid can't be compared on the same held-out rows. Args: runs: the variants."""
    race = runs[0].race
    if race is None and not any(run.race for run in runs):
        return
    if race is None or any(run.race != race for run in runs):
        raise SnaketuneError(f"{key}: the grid varies it, but it compares all variants; remove it from `grid`")
    if len(runs) <= race.keep:
        many = f"the grid has {len(runs)} variants" if len(runs) > 1 else "there is no grid whose variants it compares"
        raise SnaketuneError(f"{key}.keep: found {race.keep}, but {many}; expected fewer than there are variants")
    if any(run.training.until for run in runs):
        raise SnaketuneError(f"{key}: variants of a race aren't cut by training.until; remove one of them")
    is_sft = isinstance(runs[0], Sft)
    if (race.metric in OF_SFT) != is_sft:
        expected = OF_SFT if is_sft else [name for name in get_args(RaceMetric) if name not in OF_SFT]
        raise SnaketuneError(f"{key}.metric: found {race.metric}; expected {', '.join(expected)}")
    for run in runs:
        if isinstance(run, Dpo) and run.unpaired:
            raise SnaketuneError(
                f"{key}: loss {run.loss} trains on single completions, and a race compares pairs; remove it"
            )
        has_reference = isinstance(run, Dpo) and run.needs_reference and not run.quantization
        if race.metric in NEEDS_REFERENCE and not has_reference:
            raise SnaketuneError(
                f"{key}.metric: {race.metric} needs the reference's log-probabilities, which a variant doesn't have (its loss "
                "has no reference, or its weights are in 4 bits); choose logp_accuracy or logp_margin_nats"
            )
        first = runs[0].corpus, runs[0].packing, config.tokenizer_of(runs[0])
        if (run.corpus, run.packing, config.tokenizer_of(run)) != first:
            raise SnaketuneError(
                f"{key}: variants have different held-out rows; vary neither corpus, packing nor tokenizer"
            )
    if config.corpora[runs[0].corpus].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{runs[0].corpus}.held_out is 0, so there are no rows to compare on; raise it"
        )
    if runs[0].packing.strategy == "none":
        raise SnaketuneError(
            f"{key}: unpacked rows (packing.strategy: none) can't be evaluated; choose another strategy"
        )


def check_length(key: str, packing: Packing, sft: str, config: Workflow) -> None:
    """Raise SnaketuneError if rows are longer than what the model below the SFT run `sft` supports."""
    base = config.sft[first_run(config, sft)].base
    if isinstance(base, Scratch) and packing.longest > base.max_positions:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but the model's base.max_positions is {base.max_positions}; "
            "lower packing.length or raise max_positions"
        )
    # Without `original_max_position_embeddings`, the model's own config has to be read; then the preflight checks it.
    rope = base.rope if isinstance(base, Pretrained) else None
    if rope and rope.longest and packing.longest > rope.longest:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but base.rope makes {rope.longest} positions (factor "
            f"{rope.factor:g} x {rope.original_max_position_embeddings}); lower packing.length or raise the factor"
        )


def check_training(key: str, training: Training) -> None:
    """Check that the optimizer's package is installed, and that no key is set that optimizer or schedule don't use."""
    optimizer, schedule = training.optimizer, training.schedule
    if missing := missing_package(optimizer):
        raise SnaketuneError(f"{key}.optimizer: {missing}")
    if training.warmup_fraction and "warmup_fraction" in training.model_fields_set and not SCHEDULES[schedule].warms_up:
        raise SnaketuneError(
            f"{key}.warmup_fraction: found {training.warmup_fraction:g}, but schedule {schedule!r} has no warm-up; choose "
            "constant_with_warmup, or 0 here"
        )
    default = Training.model_fields["betas"].default
    if training.betas != default and not OPTIMIZERS[optimizer].betas:
        raise SnaketuneError(
            f"{key}.betas: found {list(training.betas)}, but optimizer {optimizer!r} has none; remove them, or use the "
            f"default, {list(default)}"
        )


def check_document_packing(key: str, packing: Packing) -> None:
    if "train_on" in packing.model_fields_set and packing.train_on != "all":
        raise SnaketuneError(
            f"{key}.packing.train_on: every token of a document is supervised, so the only value is `all`; remove it"
        )
    if packing.strategy == "none":
        raise SnaketuneError(
            f"{key}.packing.strategy: with `none`, TRL's trainer applies a chat template, which documents don't have; choose "
            "best-fit-decreasing or wrapped"
        )


def _check_order(key: str, run: Run, config: Workflow) -> None:
    if run.packing.order == "column" and not config.corpora[run.corpus].order_column:
        raise SnaketuneError(
            f"{key}.packing.order: column, but corpora.{run.corpus} has no `order_column`; name a column of its rows that "
            "holds a number, such as a difficulty"
        )


def _check_selection(key: str, run: Run, config: Workflow) -> None:
    """Check that weights can be averaged, and that held-out rows can decide which are kept and when to stop, if they are to."""
    training = run.training
    if training.average and run.operation.launch == "deepspeed":
        raise SnaketuneError(f"{key}.average isn't supported with operation.launch: deepspeed; use fsdp, or remove it")
    if not training.selects:
        return
    decides = f"{key}.{'keep' if training.keep == 'best' else 'stop_if'}"
    if config.corpora[run.corpus].held_out == 0:
        raise SnaketuneError(
            f"{decides}: it decides by held-out rows, and corpora.{run.corpus}.held_out is 0; raise it, or remove this key"
        )
    if run.packing.strategy == "none":
        raise SnaketuneError(
            f"{decides}: unpacked rows (packing.strategy: none) aren't measured during training; choose another strategy"
        )
    if training.keep == "best" and run.operation.launch == "deepspeed":
        raise SnaketuneError(
            f"{key}.keep: best isn't supported with operation.launch: deepspeed; use fsdp, or keep: last"
        )
    has = ("loss",) if isinstance(run, Sft) else ("loss", "accuracy", "margin")
    if isinstance(run, Dpo) and run.unpaired:
        has = ("loss", "margin")
    if training.metric not in has:
        raise SnaketuneError(f"{key}.metric: found {training.metric}, but this run has only {', '.join(has)}; use loss")


def _check_train_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    check_corpus(f"{key}.corpus", name, config, *kinds)
    if config.corpora[name].held_out == 1:
        raise SnaketuneError(f"{key}.corpus: {name!r} holds out all rows (held_out: 1), so there are none to train on")
