"""One path, one job: however it is spelled."""

import copy
from pathlib import Path

import pytest
from pydantic import ValidationError

from snaketune.config.base import normalized_path
from snaketune.config.corpus_sources import Source
from snaketune.config.load import load
from snaketune.stages.graph import JobGraph
from snaketune.stages.specs import canonical

CONFIG = {
    "corpora": {
        "chat": {"kind": "conversations", "sources": [{"files": ["data/chat.jsonl"]}]},
        "pairs": {"kind": "preferences", "sources": [{"files": ["data/pairs.jsonl"]}]},
    },
    "tokenizers": {"own": {"adopt": "data/base", "chat_template": "data/own.jinja"}},
    "sft": {
        "run": {
            "base": {"path": "data/base"},
            "corpus": "chat",
            "tokenizer": "own",
            "training": {"learning_rate": 1e-4},
        }
    },
    "dpo": {"run": {"from": "run", "corpus": "pairs", "training": {"learning_rate": 1e-4}}},
    "eval": {"both": {"models": ["sft:run"], "tasks": {"folder": "data/tasks", "names": ["t"]}}},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    base = ("base/config.json", "base/model.safetensors")
    for name in ("chat.jsonl", "pairs.jsonl", "own.jinja", *base, "tasks/t.yaml", "-x.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_of(config: dict) -> JobGraph:
    return JobGraph(*load(config))


def jobs_of(config: dict) -> dict:
    return {job.manifest: (canonical(job.spec), job.files) for job in plan_of(config).jobs.values()}


SPELLINGS = ["./data/{}", "data//{}", "data/./{}", "data/../data/{}", "{here}/data/{}", "{here}//data/{}"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_path_plans_the_same_jobs(here, spelling):
    def spelled(value):
        if isinstance(value, dict):
            return {key: spelled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spelled(item) for item in value]
        is_path = isinstance(value, str) and value.startswith("data/")
        return spelling.format(value.removeprefix("data/"), here=here) if is_path else value

    assert spelled(CONFIG) != CONFIG
    assert jobs_of(spelled(CONFIG)) == jobs_of(CONFIG)


def test_a_trailing_slash_has_no_effect():
    config = copy.deepcopy(CONFIG)
    config["eval"]["both"]["tasks"]["folder"] = "data/tasks/"
    config["sft"]["run"]["base"]["path"] = config["tokenizers"]["own"]["adopt"] = "./data/base/"
    assert jobs_of(config) == jobs_of(CONFIG)


def test_a_path_through_a_link_keeps_its_meaning(here):
    (here / "deep/er").mkdir(parents=True)
    (here / "link").symlink_to(here / "deep/er")
    (here / "deep/x").write_text("")
    (here / "x").write_text("")
    # Without its links the path would be `x`, which is another file.
    assert normalized_path("link/../x") == "link/../x"
    assert normalized_path("./link/../data/../x") == "./link/../data/../x"


@pytest.mark.parametrize("path", ["owner/model", "./not-there", "", "a\0b", "x" * 5000])
def test_a_path_that_does_not_exist_stays_as_it_is(path):
    assert normalized_path(path) == path


def test_a_name_like_an_option_stays_a_path(here, monkeypatch):
    monkeypatch.chdir(here / "data")
    assert normalized_path("./-x.jsonl") == "./-x.jsonl"


def same_as(edit: dict) -> dict[str, str]:
    config = copy.deepcopy(CONFIG)
    config["dpo"] |= edit
    config["eval"]["both"]["models"] = ["dpo:run", *(f"dpo:{name}" for name in edit)]
    same = {
        manifest: job
        for manifest, job in plan_of(config).same_as.items()
        if job.stage not in ("verification", "reproduction")
    }
    return {manifest: job.manifest for manifest, job in same.items()}


def test_a_variant_that_equals_its_parent_depends_on_it_and_so_do_its_dependents():
    assert same_as({"sweep": {"extends": "run", "grid": {"beta": [0.1, 0.3]}}}) == {
        "results/dpo/sweep-beta0.1/manifest.json": "results/dpo/run/manifest.json",
        "results/eval/both/dpo-sweep-beta0.1/manifest.json": "results/eval/both/dpo-run/manifest.json",
    }
    assert same_as({"other": {"extends": "run", "beta": 0.2}}) == {}
    # How a job is run makes no other result.
    assert len(same_as({"other": {"extends": "run", "operation": {"log_steps": 1}}})) == 2


def test_folders_and_patterns_are_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows/b.jsonl", "rows/a.jsonl", "rows/deep/c.csv", "rows/_SUCCESS", "rows/.hidden", "other/[x].jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    for written, files in {
        ("rows",): ("rows/a.jsonl", "rows/b.jsonl", "rows/deep/c.csv"),
        ("rows/*.jsonl",): ("rows/a.jsonl", "rows/b.jsonl"),
        ("./rows/**/*.csv",): ("rows/deep/c.csv",),
        (f"{tmp_path}/rows/deep/*",): (f"{tmp_path}/rows/deep/c.csv",),
        ("rows/b.jsonl", "rows/*.jsonl"): ("rows/b.jsonl", "rows/a.jsonl"),
        ("other/[x].jsonl",): ("other/[x].jsonl",),
        ("missing.jsonl",): ("missing.jsonl",),
    }.items():
        assert Source(files=written).files == files
    Path("empty").mkdir()
    for written, problem in (("empty", "has no file"), ("rows/*.parquet", "matches no file")):
        with pytest.raises(ValidationError, match=problem):
            Source(files=(written,))
