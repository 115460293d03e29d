"""The context of one plan: the config, the jobs planned so far, and what a run inherits from the SFT runs below it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

from snaketune.config.base import Model
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Lora
from snaketune.config.model_files import model_files
from snaketune.config.training_runs import Dpo, Sft
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.specs import Kind

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The shared argument of all functions of the planner. Those that several runs call are `cached`."""

    config: Workflow
    variants: Variants
    # The jobs planned so far, by stage and name, each after those whose results it reads.
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    # What `cached` functions returned.
    cache: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def add(self, job: Job) -> Job:
        """Add a job and return it, or return the equal job planned before; SnaketuneError if a different one has its name."""
        known = self.jobs.setdefault((job.stage, job.name), job)
        if known != job:
            raise SnaketuneError(
                f"two different {job.stage} jobs would be called {job.name!r}; rename one of the entries of the config that "
                "the name is made of"
            )
        return known

    def plan(self, stage: str, name: str, spec: Model, artifacts: dict[str, tuple[Job, ...]], **more: Any) -> Job:
        """Add the job that a stage's name, spec and inputs make. Args: more: other attributes of `Job`."""
        return self.add(Job(stage=stage, name=name, spec=spec, artifacts=artifacts, **more))


def cached(function: Function) -> Function:
    """Return a function that is computed once per context and (hashable) arguments, as for a corpus that many runs share."""

    @wraps(function)
    def lookup(context: Context, *arguments: Hashable) -> Any:
        key = (function, *arguments)
        if key not in context.cache:
            context.cache[key] = function(context, *arguments)
        return context.cache[key]

    return cast(Function, lookup)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parts of a model, which `models.adapter_stack` assembles: results of jobs, and the base model below them."""

    # All but the last hold adapters only, each for the model that the following ones make.
    results: tuple[Job, ...] = ()
    # The base model, where the last result holds an adapter only, or there are no results.
    base: Pretrained | Scratch | None = None

    @property
    def artifacts(self) -> dict[str, tuple[Job, ...]]:
        """The results by role."""
        return {"model": self.results[:1], "base_layers": self.results[1:]}

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a base in a local folder."""
        return model_files(self.base.path) if isinstance(self.base, Pretrained) else ()

    def with_adapter(self, job: Job) -> "Weights":
        """Return these weights with the adapter that a job trained for them."""
        return Weights(results=(job, *self.results), base=self.base)


def sft_below(name: str, run: Sft | Dpo) -> str:
    """Return the SFT run that a run of this name is, or starts from."""
    return name if isinstance(run, Sft) else run.from_


def first_run(config: Workflow, sft: str) -> str:
    """Return the first SFT run of the chain of `use_base` that ends in this one; for a snapshot, that of its run."""
    previous = config.sft[sft].continues
    return first_run(config, previous) if previous else sft.partition("@")[0]


def base_of(config: Workflow, sft: str) -> Pretrained | Scratch:
    """Return the base model below an SFT run."""
    base = config.sft[first_run(config, sft)].base
    assert base is not None, "the config was checked: a run that continues no other has a base"
    return base


def trusts_remote_code(config: Workflow, sft: str) -> bool:
    """Whether the config allows running the code that comes with the base model below an SFT run."""
    return getattr(base_of(config, sft), "trust_remote_code", False)


def lora_of(config: Workflow, run: Sft | Dpo) -> Lora | None:
    """Return the adapter that a run trains."""
    if run.lora != "continued":
        return run.lora
    # The adapter is part of the reference too, which has no dropout.
    adapter = config.sft[run.from_].lora
    return adapter and adapter.model_copy(update={"dropout": 0.0})


def kind_of(run: Sft | Dpo) -> Kind:
    """Return the kind of rows that a run trains on."""
    if isinstance(run, Sft):
        return "sft"
    return "unpaired" if run.unpaired else "preference"
