"""The context of a plan: one job of each name, and nothing computed twice."""

from functools import cache

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context

CONFIG_OF_ONE = {
    "corpora": {"chat": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "f00"}}]}}
}


def context() -> Context:
    config, variants = load(CONFIG_OF_ONE)
    return Context(config=config, variants=variants)


def test_two_jobs_of_one_name_are_refused():
    plan = context()
    spec = plan.config.corpora["chat"]
    first = plan.add(Job(stage="corpus", name="chat", spec=spec))
    assert plan.add(Job(stage="corpus", name="chat", spec=spec)) is first
    with pytest.raises(SnaketuneError, match="two different corpus jobs would be called 'chat'"):
        plan.add(Job(stage="corpus", name="chat", spec=spec.model_copy(update={"split_seed": 1})))


def test_a_cached_function_is_computed_once_for_each_plan():
    calls = []

    @cache
    def double(plan: Context, number: int) -> int:
        calls.append(number)
        return 2 * number

    one, other = context(), context()
    assert [double(one, 1), double(one, 1), double(one, 2), double(other, 1)] == [2, 2, 4, 2]
    assert calls == [1, 2, 1]
