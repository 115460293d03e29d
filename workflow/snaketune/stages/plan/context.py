"""The context of one plan: the config, and the jobs planned so far."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job

# By section and name, the names of the runs that a name in the config refers to: those of a grid, or itself.
Variants = dict[str, dict[str, tuple[str, ...]]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The shared argument of all functions of the planner.

    Attributes:
        config, variants: from `config.load`.
        jobs: the jobs planned so far, by stage and name, each after those whose results it reads.
        cache: results of `cached` functions, by function and arguments.
    """

    config: Workflow
    variants: Variants
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    cache: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)

    def add(self, job: Job) -> Job:
        """Add a job and return it, or return the equal job planned before; SnaketuneError if a different one has its name."""
        known = self.jobs.setdefault((job.stage, job.name), job)
        if known != job:
            raise SnaketuneError(
                f"two different {job.stage} jobs would be called {job.name!r}; rename one of the entries of the config that "
                "the name is made of"
            )
        return known


def cached(function: Function) -> Function:
    """Return a function that is computed once per context and (hashable) arguments, as for a corpus that many runs share."""

    @wraps(function)
    def lookup(context: Context, *arguments: Hashable) -> Any:
        key = (function, *arguments)
        if key not in context.cache:
            context.cache[key] = function(context, *arguments)
        return context.cache[key]

    return lookup


def planned(function: Function) -> Function:
    """Return a `cached` function that also adds the job it returns to the plan."""

    @cached
    @wraps(function)
    def plan(context: Context, *arguments: Hashable) -> Job:
        return context.add(function(context, *arguments))

    return plan
