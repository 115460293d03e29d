"""`teacher:`, `sft.NAME.distill` and `eval.NAME.teacher_of`."""

from copy import deepcopy

import pytest

from snaketune.cluster.estimates import Estimates
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from snaketune.stages.table import STAGES
from tests.stages.plan.large import made_from

from .edits import put


@pytest.fixture
def taught(raw):
    """The default config with a larger run that teaches another one."""
    raw["sft"]["large"] = deepcopy(raw["sft"]["demo"])
    raw["sft"]["small"] = deepcopy(raw["sft"]["demo"]) | {"distill": {"teacher": "large"}}
    raw["teacher"] = {"large": {"model": "sft:large"}}
    raw["eval"]["demo"]["models"] += ["base:small", "sft:small"]
    raw["eval"]["demo"]["teacher_of"] = "small"
    return raw


def _jobs(raw):
    return {job.key: job for job in JobGraph(*load(raw)).jobs.values()}


def test_runs_share_the_tokens_of_a_teacher_for_one_pack_and_temperature(taught):
    taught["sft"]["other"] = taught["sft"]["small"] | {"distill": {"teacher": "large", "weight": 0.9, "loss": "jsd"}}
    taught["sft"]["warm"] = taught["sft"]["small"] | {"distill": {"teacher": "large", "temperature": 2.0}}
    taught["sft"]["long"] = taught["sft"]["small"] | {"packing": {"length": 256}}
    jobs = _jobs(taught)
    names = ("small", "other", "warm", "long")
    (job, other, *different) = (jobs[f"sft/{name}"].artifacts["teacher"][0] for name in names)
    assert job is other and len({id(one) for one in (job, *different)}) == 3
    assert made_from(job)["model"] == ["sft/large"] and made_from(job)["tokenizer"] == ["tokenizer/demo"]
    # All models are compared on the rows that the teacher went over.
    for model in ("base-demo", "sft-small", "dpo-demo"):
        evaluated = jobs[f"eval/demo/{model}"].artifacts
        assert evaluated["teacher"] == (job,) and evaluated["taught_pack"] == job.artifacts["pack"]


def test_a_teacher_in_parts_and_one_from_outside(taught):
    taught["teacher"]["large"] = {"model": {"path": "owner/name"}, "operation": {"parts": 3}}
    taught["sft"]["small"]["base"] = {"path": "owner/small"}
    taught["tokenizers"]["theirs"] = {"adopt": "owner/small"}
    taught["sft"]["small"]["tokenizer"] = "theirs"
    taught["eval"] = {}
    del taught["report"]
    jobs = _jobs(taught)
    parts = [job for job in jobs.values() if job.stage == "teacher_pass"]
    (whole,) = (job for job in jobs.values() if job.stage == "teacher")
    assert [job.spec.part for job in parts] == [1, 2, 3] and {id(job) for job in parts} <= {
        id(job) for job in whole.after
    }
    assert whole.spec.base.path == "owner/name" and whole.artifacts["model"] == ()


def test_in_rounds_the_teacher_goes_over_the_answers_of_each_round(taught):
    taught["corpora"]["demo-chat"]["answer_pattern"] = "Answer: (.*)"
    taught["sft"]["own"] = {
        "use_base": "sft:small",
        "corpus": "demo-chat",
        "tokenizer": "demo",
        "rounds": 2,
        "distill": {"teacher": "large", "weight": 1.0, "loss": "reverse_kl"},
        "sample": {
            "prompts": {"corpora": ["demo-chat"], "limit": 100},
            "responses": 2,
            "generation": {"temperature": 1.0},
        },
        "score": {"by": {"answer": {"pattern": "Answer: ([^\\n]*)"}}},
        "rows": {"rule": "all"},
        "training": {"learning_rate": 1e-3},
    }
    jobs = _jobs(taught)
    for number in (1, 2):
        (teacher,) = jobs[f"sft/own-{number}"].artifacts["teacher"]
        (pack,) = made_from(teacher)["pack"]
        assert f"own-{number}" in pack and made_from(teacher)["model"] == ["sft/large"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sft.small.distill.teacher", "larg", "sft.small.distill.teacher: there is no 'larg' .*large"),
        ("sft.small.loss", "dft", "distill is for packed rows and loss nll; found loss dft"),
        ("sft.small.packing", {"strategy": "none"}, "found packing.strategy none"),
        ("teacher.large.model", "sft:larg", "teacher.large.model: there is no 'larg'"),
        (
            "teacher.large.model",
            "sft:small",
            "teacher.large: is made from itself: teacher.large → sft.small → teacher.large; name another `model`",
        ),
        ("sft.large.distill", {"teacher": "large"}, "teacher.large → sft.large → teacher.large"),
        ("eval.demo.teacher_of", "large", "eval.demo.teacher_of: sft.large has no distill"),
        ("eval.demo.teacher_of", "smal", "eval.demo.teacher_of: there is no 'smal'"),
        ("teacher.large.k", 0, "teacher.large.k"),
        ("sft.small.distill.weight", 0, "sft.small.distill.weight"),
    ],
)
def test_what_cannot_be_distilled_is_refused_by_its_key(taught, key, value, message):
    with pytest.raises(SnaketuneError, match=message):
        load(put(taught, key, value))


def test_the_dry_run_states_the_disk_and_the_memory_of_a_teachers_tokens(taught):
    def of_teacher(k: int, parts: int) -> list[tuple[float, float]]:
        taught["teacher"]["large"] |= {"k": k, "operation": {"parts": parts}}
        jobs = [job for job in JobGraph(*load(taught)).jobs.values() if job.stage.startswith("teacher")]
        estimates = Estimates(jobs)
        return [
            (estimates.disk(job)[0], estimates._computing(job, STAGES[job.stage].cost, None, None)[1]) for job in jobs
        ]

    ((disk, memory),), ((twice, more),) = of_teacher(32, 1), of_teacher(64, 1)
    # 12 bytes for each of the k tokens of each token of the rows.
    assert twice == 2 * disk > 12 * 32 * 100_000
    assert more - memory == pytest.approx(disk / 1e6, rel=0.1)
    (*parts, whole) = of_teacher(32, 4)
    assert [of_part for of_part, _ in parts] == [disk / 4] * 4 and whole[0] == disk
