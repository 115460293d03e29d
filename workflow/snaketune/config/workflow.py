"""Model of the whole config file, and checks of the references between its sections."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from snaketune.config.base import Model, Name
from snaketune.config.corpus_sources import Corpus
from snaketune.config.diagnose import Diagnosis
from snaketune.config.evaluations import Evaluation, Report
from snaketune.config.optimizers import OPTIMIZERS, missing_package
from snaketune.config.packing import Packing
from snaketune.config.publishing import Gguf, Push
from snaketune.config.schedules import SCHEDULES
from snaketune.config.suggestions import unknown
from snaketune.config.tokenizers import Tokenizer
from snaketune.config.tracking import Tracking
from snaketune.config.training_runs import Dpo, Pretrained, Scratch, Sft, Training
from snaketune.errors import SnaketuneError


class Workflow(Model):
    """A snaketune config: named corpora, tokenizers, trainings and evaluations."""

    corpora: Annotated[dict[Name, Corpus], Field(min_length=1)]
    tokenizers: dict[Name, Tokenizer] = {}
    sft: dict[Name, Sft] = {}
    dpo: dict[Name, Dpo] = {}
    eval: dict[Name, Evaluation] = {}
    diagnose: dict[Name, Diagnosis] = {}
    tracking: Tracking = Tracking()
    report: Report = Report()
    push: dict[Name, Push] = {}
    gguf: dict[Name, Gguf] = {}
    reruns_on: dict[str, Literal["code", "versions"]] = {}
    """Additional reasons to rerun a stage, by the name of its rule: `code` reruns it when its code changes; `versions` also
    when versions of its libraries change."""


def check_references(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Raise SnaketuneError if a section names something that doesn't exist, is of the wrong kind or doesn't fit.

    Args:
        config: the validated config, with grids expanded.
        variants: per section, the names of the runs that each configured name expands to.
    """
    for name, tokenizer in config.tokenizers.items():
        for corpus in tokenizer.train.corpora if tokenizer.train else ():
            _known(f"tokenizers.{name}.train.corpora", corpus, config.corpora, "corpora")
    for name, run in config.sft.items():
        _known_corpus(f"sft.{name}.corpus", run.corpus, config, "conversations", "text")
        if config.corpora[run.corpus].kind == "text":
            _check_document_packing(f"sft.{name}.packing", run.packing)
        _trains(f"sft.{name}.corpus", run.corpus, config)
        _known(f"sft.{name}.tokenizer", run.tokenizer, config.tokenizers, "tokenizers")
        _fits(f"sft.{name}", run.packing, _first(name, config))
        _check_training(f"sft.{name}.training", run.training)
        if isinstance(run.base, Pretrained) and config.tokenizers[run.tokenizer].train:
            raise SnaketuneError(
                f"sft.{name}.tokenizer: {run.tokenizer!r} is trained here, but {run.base.path!r} has another vocabulary; "
                "use a tokenizer that adopts the model's own"
            )
    for name, run in config.dpo.items():
        _known(f"dpo.{name}.from", run.from_, config.sft, "sft")
        _known_corpus(f"dpo.{name}.corpus", run.corpus, config, "unpaired" if run.unpaired else "preferences")
        _trains(f"dpo.{name}.corpus", run.corpus, config)
        _fits(f"dpo.{name}", run.packing, _first(run.from_, config))
        if run.lora == "continued" and not config.sft[run.from_].lora:
            raise SnaketuneError(
                f"dpo.{name}.lora: `continued` trains the adapter of sft:{run.from_} further, but that run has no `lora`; set "
                "the keys of a new adapter, or remove lora"
            )
        _check_training(f"dpo.{name}.training", run.training)
    for name, diagnosis in config.diagnose.items():
        _check_diagnosis(name, diagnosis, config)
    for name, evaluation in config.eval.items():
        for reference in evaluation.models:
            kind, model = reference.split(":")
            section = "dpo" if kind == "dpo" else "sft"
            for variant in variants[section].get(model, (model,)):
                _known(f"eval.{name}.models", variant, getattr(config, section), section)
                _fits(
                    f"eval.{name}",
                    evaluation.packing,
                    _first(config.dpo[variant].from_ if kind == "dpo" else variant, config),
                )
        for corpus in evaluation.conversations:
            _known_corpus(f"eval.{name}.conversations", corpus, config, "conversations", "text")
            _holds_out(f"eval.{name}.conversations", corpus, config)
        if evaluation.conversations and "exact_match" in evaluation.model_fields_set:
            _has_answers(f"eval.{name}.exact_match", evaluation.conversations, config)
        if evaluation.conversations and all(config.corpora[c].kind == "text" for c in evaluation.conversations):
            _check_document_packing(f"eval.{name}.packing", evaluation.packing)
        for corpus in evaluation.preferences:
            _known_corpus(f"eval.{name}.preferences", corpus, config, "preferences")
            _holds_out(f"eval.{name}.preferences", corpus, config)
        if evaluation.packing.strategy == "none":
            raise SnaketuneError(f"eval.{name}.packing.strategy: `none` has no packed rows to evaluate on")
        if evaluation.preferences and (
            evaluation.packing.strategy == "wrapped" or evaluation.packing.overflow == "split"
        ):
            raise SnaketuneError(
                f"eval.{name}.packing: pairs are never split; choose another strategy and overflow, or evaluate preferences "
                "in a separate entry of `eval:`"
            )


def _check_diagnosis(name: str, diagnosis: Diagnosis, config: Workflow) -> None:
    section, _, run = diagnosis.run.partition(":")
    runs = config.sft if section == "sft" else config.dpo
    _known(f"diagnose.{name}.run", run, runs, section)
    for change, variant in diagnosis.variants(name, runs[run]).items():
        _fits(
            f"diagnose.{name}.changes.{change}",
            variant.packing,
            _first(run if section == "sft" else variant.from_, config),
        )
        _check_training(f"diagnose.{name}.changes.{change}.training", variant.training)


def _first(name: str, config: Workflow) -> Sft:
    """The first run in the chain of `use_base` that ends in this run.

    Raises:
        SnaketuneError: `use_base` names an unknown run, is circular, or two runs of the chain differ in their tokenizer.
    """
    run, names = config.sft[name], [name]
    while run.continues:
        key = f"sft.{names[-1]}"
        _known(f"{key}.use_base", run.continues, config.sft, "sft")
        names.append(run.continues)
        if run.continues in names[:-1]:
            raise SnaketuneError(f"{key}.use_base: {' → '.join(names)} is circular")
        before = config.sft[run.continues]
        if before.tokenizer != run.tokenizer:
            raise SnaketuneError(
                f"{key}.tokenizer: found {run.tokenizer!r}, but {run.use_base!r}, from which the run starts, has "
                f"{before.tokenizer!r}; use the same tokenizer"
            )
        run = before
    return run


def _fits(key: str, packing: Packing, run: Sft) -> None:
    if isinstance(run.base, Scratch) and packing.longest > run.base.max_positions:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but the model's base.max_positions is "
            f"{run.base.max_positions}; lower packing.length or raise max_positions"
        )


def _holds_out(key: str, corpus: str, config: Workflow) -> None:
    if config.corpora[corpus].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{corpus}.held_out is 0, so it has no held-out rows; raise held_out, or name another corpus"
        )


def _has_answers(key: str, corpora: tuple[str, ...], config: Workflow) -> None:
    if not any(config.corpora[corpus].may_have_answers for corpus in corpora):
        raise SnaketuneError(f"{key}: {missing_answers_hint(corpora, config)}, or remove exact_match")


def missing_answers_hint(corpora: tuple[str, ...], config: Workflow) -> str:
    """An error message for corpora without checkable answers for exact match, with what to configure."""
    chats = [corpus for corpus in corpora if config.corpora[corpus].kind != "text"]
    if not chats:
        return f"no row of {' and '.join(corpora)} can have a checkable answer, as documents have no questions: name others"
    return (
        f"no row of {' and '.join(chats)} can have a checkable answer: set fields.answer of corpora.{chats[0]}.sources to the "
        f"column that holds it, or corpora.{chats[0]}.answer_pattern to a pattern that finds it in the last assistant turn"
    )


def _check_training(key: str, training: Training) -> None:
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


def _known(key: str, name: str, section: Iterable[str], section_name: str) -> None:
    if name not in section:
        raise SnaketuneError(f"{key}: there is no {name!r} under `{section_name}:`{unknown(name, section)}")


def _trains(key: str, name: str, config: Workflow) -> None:
    if config.corpora[name].held_out == 1:
        raise SnaketuneError(f"{key}: {name!r} holds out all rows (held_out: 1), so there are none to train on")


def _known_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    _known(key, name, config.corpora, "corpora")
    if config.corpora[name].kind not in kinds:
        raise SnaketuneError(f"{key}: {name!r} is of kind {config.corpora[name].kind}, expected {' or '.join(kinds)}")


def _check_document_packing(key: str, packing: Packing) -> None:
    if "train_on" in packing.model_fields_set and packing.train_on != "all":
        raise SnaketuneError(
            f"{key}.train_on: every token of a document is supervised, so the only value is `all`; remove it"
        )
    if packing.strategy == "none":
        raise SnaketuneError(
            f"{key}.strategy: with `none`, TRL's trainer applies a chat template, which documents don't have; choose "
            "best-fit-decreasing or wrapped"
        )
