"""Jobs that ask a judge: a model of the config or a server, for the responses of a sample or the pairs of an evaluation."""

from snaketune.cluster.estimates import Estimates
from snaketune.snakemake_adapter.terminal import leaving_lines
from tests.stages.plan.large import made_from


def test_a_judge_of_the_config_is_loaded_and_a_server_gets_no_gpu(jobs):
    judged = jobs["judge/judged"]
    assert made_from(judged)["model"] == ["sft/chatty"] and judged.operation.gpus == 1
    assert judged.spec.server_model is None and judged.files["rubric"] == ("books.txt",)
    compared = jobs["compare/all/sft-chatty"]
    assert made_from(compared) == {"evaluated": ["eval/all/sft-chatty"], "opponent": ["eval/all/base-scratch"]}
    assert (compared.spec.server_model, compared.operation.gpus) == ("m", 0)
    # Every other model, and each variant of a grid; reward models write nothing.
    names = {name.partition("/")[2] for name in jobs if name.startswith("eval/all/")} - {"all/base-scratch"}
    names = {name for name in names if not name.startswith("all/reward-")}
    assert {name.partition("/")[2] for name in jobs if name.startswith("compare/")} == names


def test_a_judge_s_scores_are_summed_like_others(jobs):
    assert set(made_from(jobs["score/both"])["scores"]) == {"score/checked", "judge/judged"}


def test_a_dry_run_says_what_leaves_the_machine(planned):
    (line,) = leaving_lines(planned)
    assert line.startswith("Sent to http://localhost:1, ") and "compare/all/sft-chatty" in line and "judge/" not in line


def test_a_job_that_asks_a_server_requests_neither_memory_for_a_model_nor_a_gpu(planned, jobs):
    estimates = Estimates(planned)
    asking, loading = (estimates.of(jobs[name]) for name in ("compare/all/sft-chatty", "judge/judged"))
    assert (asking.mem_mb, asking.gpus) == (2000, 0) and loading.mem_mb > 3000
    # Two verdicts on each of up to 100 prompts per corpus.
    corpora = len(jobs["eval/all/sft-chatty"].spec.conversations)
    assert asking.runtime == 5 + round(200 * corpora / 60)
