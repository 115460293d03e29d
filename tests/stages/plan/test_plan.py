"""Which jobs are planned for a config, in which order, and which of them each is made from."""

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph, plan_jobs
from snaketune.stages.job import Job
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES
from tests.stages.plan.large import CONFIG, keys, made_from, of_stage, write_files


def test_every_stage_has_jobs(planned):
    assert {job.stage for job in planned} == set(STAGES)
    assert len({job.key for job in planned}) == len(planned) > 200


def test_a_job_is_behind_all_that_it_waits_for(planned):
    before: set[str] = set()
    for job in planned:
        waits_for = {other.key for some in (*job.artifacts.values(), job.after) for other in some}
        assert waits_for <= before, job.key
        before.add(job.key)
    assert planned[-1].stage == "report"


def test_a_job_that_several_others_read_is_one_object(planned):
    by_key = {job.key: job for job in planned}
    for job in planned:
        for read in (*job.artifacts.values(), job.after):
            assert all(by_key[other.key] is other for other in read), job.key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # Against the corpora of all evaluations, but none that is decontaminated itself.
        ("read/chat/2-of-2", {"against": ["corpus/maths", "corpus/pairs"]}),
        ("decide/chat", {"read": ["read/chat/1-of-2", "read/chat/2-of-2"]}),
        ("filter/chat/1-of-2", {"decided": ["decide/chat"], "read": ["read/chat/1-of-2", "read/chat/2-of-2"]}),
        ("corpus/chat", {"decided": ["decide/chat"], "filtered": ["filter/chat/1-of-2", "filter/chat/2-of-2"]}),
        ("corpus/books", {"against": ["corpus/maths", "corpus/pairs"]}),
        ("corpus/maths", {}),
        ("tokenizer/own", {"corpora": ["corpus/pairs", "corpus/books"]}),
        ("tokenizer/adopted", {}),
        ("tokenize/chat-own/3-of-3", {"corpus": ["corpus/chat"], "tokenizer": ["tokenizer/own"]}),
        ("tokenize/books-own/1-of-1", {"corpus": ["corpus/books"], "tokenizer": ["tokenizer/own"]}),
        ("plan/pairs-own-1024", {"tokens": ["tokenize/pairs-own/1-of-2", "tokenize/pairs-own/2-of-2"]}),
        (
            "write/pairs-own-1024/2-of-2",
            {
                "plan": ["plan/pairs-own-1024"],
                "tokens": ["tokenize/pairs-own/1-of-2", "tokenize/pairs-own/2-of-2"],
            },
        ),
        (
            "pack/pairs-own-1024",
            {
                "plan": ["plan/pairs-own-1024"],
                "shards": ["write/pairs-own-1024/1-of-2", "write/pairs-own-1024/2-of-2"],
            },
        ),
        ("sft/scratch", {"pack": ["pack/books-own-1024"], "tokenizer": ["tokenizer/own"]}),
        ("sft/chatty", {"model": ["sft/scratch"], "pack": ["pack/chat-own-512"], "tokenizer": ["tokenizer/own"]}),
        ("sft/again", {"model": ["sft/apart"], "pack": ["pack/chat-adopted-1024"], "tokenizer": ["tokenizer/adopted"]}),
        (
            "dpo/plain",
            {
                "model": ["sft/chatty"],
                "pack": ["pack/pairs-own-1024"],
                "ref_logps": ["ref_logps/chatty-pairs-own-1024"],
            },
        ),
        # SimPO has no reference.
        ("dpo/free", {"model": ["sft/chatty"], "pack": ["pack/pairs-own-1024"]}),
        (
            "dpo/stacked",
            {
                "model": ["sft/again"],
                "base_layers": ["sft/apart"],
                "pack": ["pack/pairs-adopted-1024"],
                "ref_logps": ["ref_logps/again-pairs-adopted-1024"],
            },
        ),
        (
            "bottleneck/sft-merged",
            {
                "pack": ["pack/chat-adopted-1024"],
                "preflight": ["preflight/merged"],
                "calibrate": ["calibrate/chat-adopted-1024"],
                "timings": [f"timing/sft-merged/{name}/{n}" for n in (1, 2) for name in ("baseline", "wide", "few")],
            },
        ),
        ("convert/chatty", {"model": ["sft/chatty"]}),
        ("convert/best", {"model": ["dpo/plain"]}),
        (
            "card/dpo-single",
            {
                "results": [
                    "dpo/single",
                    "sft/merged",
                    "pack/votes-adopted-1024",
                    "pack/chat-adopted-1024",
                    "eval/texts/dpo-single",
                    "verification/dpo-single",
                    "reproduction/dpo-single",
                    "corpus/books",
                    "corpus/chat",
                    "corpus/pairs",
                    "corpus/votes",
                ]
            },
        ),
    ],
)
def test_what_a_job_is_made_from(jobs, key, expected):
    assert made_from(jobs[key]) == expected


def test_only_of_conversations_it_is_chosen_what_is_supervised(planned):
    supervised = {(job.name.split("-")[0], job.spec.kind, job.spec.train_on) for job in of_stage(planned, "tokenize")}
    assert supervised == {
        ("chat", "sft", "assistant"),
        ("chat", "sft", "last"),
        ("maths", "sft", "assistant"),
        ("books", "text", "all"),
        ("pairs", "preference", "assistant"),
        ("votes", "unpaired", "assistant"),
    }


def test_rows_that_are_not_packed_are_written_from_their_corpus(planned):
    by_corpus = {bool(job.artifacts["corpus"]): job for job in of_stage(planned, "write")}
    raw, packed = by_corpus[True], by_corpus[False]
    assert raw.artifacts["plan"][0].spec.strategy == "none"
    assert packed.artifacts["plan"][0].spec.strategy == "best-fit-decreasing"
    assert keys(raw.artifacts["corpus"]) == ["corpus/chat"]


def test_files_from_outside(jobs):
    base = ("base/config.json", "base/model.safetensors")
    assert jobs["read/chat/1-of-2"].files == {"files": ("rows.jsonl",), "against_files": ("tasks/choice.jsonl",)}
    assert jobs["read/chat/2-of-2"].files == {"files": (), "against_files": ("tasks/choice.jsonl",)}
    assert not any(jobs["corpus/chat"].files.values())
    (template,) = jobs["tokenizer/own"].files["chat_template"]
    assert template.endswith("tokenization/chat_templates/chatml.jinja")
    assert jobs["tokenizer/own"].files == {
        "chat_template": (template,),
        "base": (),
    }
    assert jobs["tokenizer/adopted"].files == {"chat_template": ("template.jinja",), "base": base}
    assert jobs["sft/merged"].files == jobs["preflight/merged"].files == {"base": base}
    assert jobs["sft/apart"].files == {"base": ()}
    assert jobs["eval/all/sft-chatty"].files["tasks"] == ("tasks/choice.jsonl", "tasks/choice.yaml")


def test_cards_are_of_every_model_and_inherit_the_license(jobs, planned):
    # But the rungs of a race.
    kinds = ("sft", "dpo", "reward")
    trained = {f"{job.stage}-{job.name}" for job in planned if job.stage in kinds and "@" not in job.name}
    assert {job.name for job in of_stage(planned, "card")} == trained
    licenses = {name: jobs[f"card/{name}"].spec.license for name in ("sft-scratch", "sft-chatty", "dpo-plain")}
    assert licenses == {"sft-scratch": None, "sft-chatty": "apache-2.0", "dpo-plain": "apache-2.0"}
    assert jobs["card/dpo-plain"].spec.corpora["pairs"].license == "mit"


def test_the_report_is_on_results_and_names_their_grids(planned):
    report = planned[-1]
    shown = {job.stage for job in report.artifacts["results"]}
    assert shown == set(STAGES) - {
        "report",
        "preflight",
        "calibrate",
        "ref_pass",
        "teacher_pass",
        "prompts",
        "generate",
        "timing",
        "bottleneck",
        "card",
        "convert",
        "merge",
    }
    grids = {job.name: job.config_key for job in report.spec.jobs if job.stage == "dpo"}
    assert {grid for name, grid in grids.items() if name.startswith("losses")} == {"dpo.losses"}
    assert grids["plain"] == ""


def test_a_race_decides_whether_the_variants_of_a_grid_go_on(planned, jobs):
    names = [f"rates-learning_rate{rate}" for rate in ("1e-05", "2e-05")]
    first, second = (jobs[f"race/sft-rates@{rung}"] for rung in (0.2, 0.5))
    assert made_from(first) == {
        "snapshots": [f"sft/{name}@0.2" for name in names],
        "evaluated": [f"eval/race-sft-rates/sft-{name}@0.2" for name in names],
    }
    assert made_from(second) == {
        "snapshots": [f"sft/{name}@0.5" for name in names],
        "evaluated": [f"eval/race-sft-rates/sft-{name}@0.5" for name in names],
        "before": [first.key],
    }
    assert second.spec.runs == tuple(f"sft/{name}" for name in names)
    for name in names:
        assert [jobs[f"sft/{name}{at}"].race for at in ("@0.2", "@0.5", "")] == [None, first, second]
        assert jobs[f"sft/{name}"].operation.race == second.manifest
    # The report shows races, and neither rungs nor what is compared at them.
    shown = {job.key for job in planned[-1].artifacts["results"]}
    assert {first.key, second.key} <= shown
    assert not {name for name in shown if "@" in name} - {first.key, second.key}


def test_the_order_of_the_config_changes_no_job(planned, tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    reversed_config = {
        section: dict(reversed(entries.items())) if section != "report" else entries
        for section, entries in CONFIG.items()
    }
    other = plan_jobs(*load(reversed_config))
    assert described(other) == described(planned)


def described(planned: tuple[Job, ...]) -> dict[str, tuple[str, dict[str, list[str]]]]:
    return {job.key: (canonical(job.spec), made_from(job)) for job in planned}


def test_jobs_that_make_the_same_are_known(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = CONFIG | {"dpo": CONFIG["dpo"] | {"twin": {"extends": "plain"}}}
    graph = JobGraph(*load(config))
    assert graph.same_as[graph.job("dpo", "twin").manifest] is graph.job("dpo", "plain")
    assert graph.job("dpo", "other").manifest not in graph.same_as
