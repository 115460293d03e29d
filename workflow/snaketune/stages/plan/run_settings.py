"""Settings that a run inherits from the SFT runs below it: the base model, and whether remote code is trusted."""

from collections.abc import Iterator

from snaketune.config.evaluations import Evaluation
from snaketune.config.training_runs import Dpo, Learning, Lora, Pretrained, Scratch, Sft
from snaketune.config.workflow import Workflow
from snaketune.stages.plan.context import Variants
from snaketune.stages.specs import Kind


def first_run(config: Workflow, sft: str) -> str:
    """Return the first SFT run of the chain of `use_base` that ends in this one."""
    previous = config.sft[sft].continues
    return first_run(config, previous) if previous else sft


def base_of(config: Workflow, sft: str) -> Pretrained | Scratch:
    """Return the base model of an SFT run, found by following the runs that it continues."""
    return config.sft[first_run(config, sft)].base


def trusts_remote_code(config: Workflow, sft: str) -> bool:
    """Whether the config allows running the code that comes with the base model of an SFT run."""
    base = base_of(config, sft)
    return isinstance(base, Pretrained) and base.trust_remote_code


def lora_of(config: Workflow, run: Sft | Dpo) -> Lora | None:
    """Return the adapter that a run trains."""
    if run.lora != "continued":
        return run.lora
    # The adapter is part of the reference too, which has no dropout.
    return config.sft[run.from_].lora.model_copy(update={"dropout": 0.0})


def learning_of(run: Sft | Dpo) -> Learning:
    """Return the keys of `training` that shape the weights."""
    return Learning(**run.training.model_dump(include=set(Learning.model_fields)))


def kind_of(run: Sft | Dpo) -> Kind:
    """Return the kind of rows that a run trains on."""
    if isinstance(run, Sft):
        return "sft"
    return "unpaired" if run.unpaired else "preference"


def evaluated_models(evaluation: Evaluation, variants: Variants) -> Iterator[str]:
    """Yield the models of an evaluation, such as `dpo:demo`, with every run of a grid."""
    for reference in evaluation.models:
        kind, name = reference.split(":")
        for variant in variants["dpo" if kind == "dpo" else "sft"].get(name, (name,)):
            yield f"{kind}:{variant}"
