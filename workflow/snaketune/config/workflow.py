"""The whole config file as one model, with the references between its sections checked."""

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
    """By stage (a rule's name), what besides its spec and inputs reruns it: `code`, or `versions` for other versions of its
    libraries too."""


def check_references(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Raise SnaketuneError if a section names something that isn't there, or is of the wrong kind.

    Args:
        config: the validated config, grids already expanded.
        variants: per section, the names that each grid stands for.
    """
    for name, tokenizer in config.tokenizers.items():
        for corpus in tokenizer.train.corpora if tokenizer.train else ():
            _known(f"tokenizers.{name}.train.corpora", corpus, config.corpora, "corpora")
    for name, run in config.sft.items():
        _known_corpus(f"sft.{name}.corpus", run.corpus, config, "conversations", "text")
        if config.corpora[run.corpus].kind == "text":
            _suits_documents(f"sft.{name}.packing", run.packing)
        _trains(f"sft.{name}.corpus", run.corpus, config)
        _known(f"sft.{name}.tokenizer", run.tokenizer, config.tokenizers, "tokenizers")
        _fits(f"sft.{name}", run.packing, _first(name, config))
        _check_training(f"sft.{name}.training", run.training)
        if isinstance(run.base, Pretrained) and config.tokenizers[run.tokenizer].train:
            raise SnaketuneError(
                f"sft.{name}.tokenizer: {run.tokenizer!r} is trained here, but {run.base.path!r} knows another vocabulary; "
                "use a tokenizer that adopts the model's"
            )
    for name, run in config.dpo.items():
        _known(f"dpo.{name}.from", run.from_, config.sft, "sft")
        _known_corpus(f"dpo.{name}.corpus", run.corpus, config, "unpaired" if run.unpaired else "preferences")
        _trains(f"dpo.{name}.corpus", run.corpus, config)
        _fits(f"dpo.{name}", run.packing, _first(run.from_, config))
        if run.lora == "continued" and not config.sft[run.from_].lora:
            raise SnaketuneError(
                f"dpo.{name}.lora: continued trains the adapter of sft:{run.from_} further, which has none (no `lora`); give "
                "this run a lora of its own, or leave it out"
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
            _suits_documents(f"eval.{name}.packing", evaluation.packing)
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
                "in an entry of their own"
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
    """The run at the beginning of those that continue each other up to this one.

    Raises:
        SnaketuneError: `use_base` names no run, runs in a circle, or the two have not the same tokenizer.
    """
    run, names = config.sft[name], [name]
    while run.continues:
        key = f"sft.{names[-1]}"
        _known(f"{key}.use_base", run.continues, config.sft, "sft")
        names.append(run.continues)
        if run.continues in names[:-1]:
            raise SnaketuneError(f"{key}.use_base: {' → '.join(names)} runs in a circle")
        before = config.sft[run.continues]
        if before.tokenizer != run.tokenizer:
            raise SnaketuneError(
                f"{key}.tokenizer: found {run.tokenizer!r}, but {run.use_base!r}, from which the run starts, has "
                f"{before.tokenizer!r}; a model goes on with the tokenizer that it knows"
            )
        run = before
    return run


def _fits(key: str, packing: Packing, run: Sft) -> None:
    if isinstance(run.base, Scratch) and packing.longest > run.base.max_positions:
        raise SnaketuneError(
            f"{key}.packing.length: {packing.longest} tokens, but the model's base.max_positions is "
            f"{run.base.max_positions}; raise the one or lower the other"
        )


def _holds_out(key: str, corpus: str, config: Workflow) -> None:
    if config.corpora[corpus].held_out == 0:
        raise SnaketuneError(
            f"{key}: corpora.{corpus}.held_out is 0, so there is nothing to measure on; hold some of it out, or name another"
        )


def _has_answers(key: str, corpora: tuple[str, ...], config: Workflow) -> None:
    if not any(config.corpora[corpus].may_have_answers for corpus in corpora):
        raise SnaketuneError(f"{key}: {missing_answers_hint(corpora, config)}, or leave exact_match out")


def missing_answers_hint(corpora: tuple[str, ...], config: Workflow) -> str:
    """Why exact match has nothing to compare there, and what would be something."""
    asking = [corpus for corpus in corpora if config.corpora[corpus].kind != "text"]
    if not asking:
        return f"no row of {' and '.join(corpora)} can have a checkable answer, as documents ask nothing: name others"
    return (
        f"no row of {' and '.join(asking)} can have a checkable answer: set fields.answer of corpora.{asking[0]}.sources to "
        f"the column that holds it, or corpora.{asking[0]}.answer_pattern to what finds it in the last assistant turn"
    )


def _check_training(key: str, training: Training) -> None:
    """That the optimizer's package is there, and nothing was set that optimizer or schedule never look at."""
    optimizer, schedule = training.optimizer, training.schedule
    if missing := missing_package(optimizer):
        raise SnaketuneError(f"{key}.optimizer: {missing}")
    if training.warmup_fraction and "warmup_fraction" in training.model_fields_set and not SCHEDULES[schedule].warms_up:
        raise SnaketuneError(
            f"{key}.warmup_fraction: found {training.warmup_fraction:g}, but schedule {schedule!r} has no warm-up; choose "
            "constant_with_warmup, or 0 here"
        )
    ordinary = Training.model_fields["betas"].default
    if training.betas != ordinary and not OPTIMIZERS[optimizer].betas:
        raise SnaketuneError(
            f"{key}.betas: found {list(training.betas)}, but optimizer {optimizer!r} has none; leave them out, or at "
            f"{list(ordinary)}"
        )


def _known(key: str, name: str, section: Iterable[str], section_name: str) -> None:
    if name not in section:
        raise SnaketuneError(f"{key}: there is no {name!r} under `{section_name}:`{unknown(name, section)}")


def _trains(key: str, name: str, config: Workflow) -> None:
    if config.corpora[name].held_out == 1:
        raise SnaketuneError(f"{key}: {name!r} holds out all its rows (held_out: 1), so there are none to train on")


def _known_corpus(key: str, name: str, config: Workflow, *kinds: str) -> None:
    _known(key, name, config.corpora, "corpora")
    if config.corpora[name].kind not in kinds:
        raise SnaketuneError(f"{key}: {name!r} holds {config.corpora[name].kind}, expected {' or '.join(kinds)}")


def _suits_documents(key: str, packing: Packing) -> None:
    if "train_on" in packing.model_fields_set and packing.train_on != "all":
        raise SnaketuneError(
            f"{key}.train_on: every token of a document is supervised, so there is nothing to choose; leave it out"
        )
    if packing.strategy == "none":
        raise SnaketuneError(
            f"{key}.strategy: `none` has TRL's trainer write a chat template around each row, and documents have none; "
            "choose best-fit-decreasing or wrapped"
        )
