"""The context of one plan: the config, and the jobs planned so far."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job

# By section and name, the names of the runs that a written name stands for: those of a grid, or itself.
Variants = dict[str, dict[str, tuple[str, ...]]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What all functions of the planner take.

    Attributes:
        config, variants: from `config.load`.
        jobs: the jobs planned so far, by stage and name; a job stands behind those whose results it reads.
        cache: what `cached` functions returned, by function and arguments.
    """

    config: Workflow
    variants: Variants
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    cache: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)

    def add(self, job: Job) -> Job:
        """The job itself, or the equal one that is planned already; SnaketuneError if another one has its name."""
        known = self.jobs.setdefault((job.stage, job.name), job)
        if known != job:
            raise SnaketuneError(
                f"two different {job.stage} jobs would be called {job.name!r}; rename what they are made of"
            )
        return known


def cached(function: Function) -> Function:
    """A function that is computed once for a context and (hashable) arguments, as the job of a corpus that many runs share."""

    @wraps(function)
    def lookup(context: Context, *arguments: Hashable) -> Any:
        key = (function, *arguments)
        if key not in context.cache:
            context.cache[key] = function(context, *arguments)
        return context.cache[key]

    return lookup


def planned(function: Function) -> Function:
    """A `cached` function whose result, a job, becomes one of the plan."""

    @cached
    @wraps(function)
    def plan(context: Context, *arguments: Hashable) -> Job:
        return context.add(function(context, *arguments))

    return plan
