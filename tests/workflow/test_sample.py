"""The `sample` stage: the same table for any number of parts and after kills, and only what is missing is generated."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.tokenization.chat import ChatTokenizer
from tests.sampling.stand_in import MODEL, StandIn, serving

from .conftest import Project, made_once
from .reruns import SAMPLED

pytestmark = pytest.mark.workflow
TABLE = "results/sample/tries/responses/responses.arrow"
MANIFEST = "results/sample/tries/manifest.json"
# Batches of one response, of which a kill finds many.
MANY = SAMPLED | {
    "prompts": {"corpora": ["chat"], "limit": 40},
    "generation": {"temperature": 0.5, "max_new_tokens": 40, "batch_size": 1},
}


def rows(project: Project) -> list[dict]:
    return pa.ipc.open_file(project.folder / TABLE).read_all().to_pylist()


def digest(project: Project) -> str:
    return json.loads(project.read(MANIFEST))["payload"]["responses.arrow"]["digest"]


def generated(project: Project, *parts: str) -> list[int]:
    return [
        json.loads(project.read(f"results/generate/tries/{part}/run.json"))["responses_generated"] for part in parts
    ]


def forget(project: Project) -> None:
    """Remove the table, its parts, and all that was kept of them."""
    for path in ("sample", "generate", ".work/sample", ".work/generate", ".work/.rows"):
        shutil.rmtree(project.folder / "results" / path)


@pytest.fixture(scope="module")
def sampled(finished, tmp_path_factory) -> Project:
    """A project with a table of 6 prompts and 2 responses, from one part. Tests copy it and don't change it."""
    config = finished.config | {"sample": {"tries": json.loads(json.dumps(SAMPLED))}}

    def make(folder: Path) -> None:
        Project(finished.copy_to(folder).folder, config).snakemake(MANIFEST)

    return Project(made_once(tmp_path_factory, "sampled", make), config)


@pytest.fixture
def project(sampled, tmp_path) -> Project:
    return sampled.copy_to(tmp_path / "project")


def test_the_table_has_a_row_per_prompt_and_index(sampled):
    table = rows(sampled)
    assert len(table) == 12 and [row["index"] for row in table] == [0, 1] * 6
    chat = ChatTokenizer.load(sampled.folder / "results/tokenizer/small/tokenizer")
    corpus = pa.ipc.open_file(sampled.folder / "results/corpus/chat/rows/train-00000.arrow").read_all().to_pylist()
    by_id = {row["id"]: row for row in corpus}
    assert [row["id"] for row in table[::2]] == sorted(by_id)[:6]
    for row in table:
        assert row["reference"] == by_id[row["id"]]["messages"][-1]["content"]
        assert row["answer"] == by_id[row["id"]]["answer"]
        assert row["text"] == row["content"] == chat.decode(row["tokens"]) and row["logp"] < 0
        assert row["ended"] == "length" or row["tokens"][-1] in chat.stop_ids
    manifest = json.loads(sampled.read(MANIFEST))
    assert manifest["engine"]["name"] == "transformers" and manifest["reproducible"]
    assert manifest["counts"]["responses"] == 12 and sum(manifest["counts"]["ended"].values()) == 12


def test_any_number_of_parts_gives_the_same_table_and_edits_of_how_rerun_nothing(project, sampled):
    for operation in ({"parts": 3}, {"gpus": 1}, {"engine": "vllm", "vllm": "data"}):
        project.config["sample"]["tries"]["operation"] = operation
        assert project.stale(MANIFEST) == set()
    forget(project)
    project.config["sample"]["tries"]["operation"] = {"gpus": 0, "parts": 2}
    project.config["sample"]["tries"]["generation"]["batch_size"] = 4
    project.snakemake(MANIFEST)
    assert sum(generated(project, *(f"{part}-of-2" for part in (1, 2)))) == 12
    divided = digest(project)
    # With batches of another size, log-probabilities differ by rounding.
    assert [row["tokens"] for row in rows(project)] == [row["tokens"] for row in rows(sampled)]
    forget(project)
    project.config["sample"]["tries"]["operation"] = {"gpus": 0}
    project.snakemake(MANIFEST)
    assert digest(project) == divided


@pytest.mark.slow
def test_a_batch_size_that_is_edited_between_two_parts_makes_both_anew_from_kept_rows(project, sampled):
    forget(project)
    entry = project.config["sample"]["tries"]
    entry["operation"] = {"gpus": 0, "parts": 2}
    project.snakemake("results/generate/tries/1-of-2/manifest.json")
    (first,) = generated(project, "1-of-2")
    entry["generation"]["batch_size"] = 4
    project.snakemake(MANIFEST)
    assert sum(generated(project, "1-of-2", "2-of-2")) == 12 - first
    assert [row["tokens"] for row in rows(project)] == [row["tokens"] for row in rows(sampled)]


def test_more_responses_and_edited_prompts_compute_only_themselves(project, sampled):
    project.config["sample"]["tries"] |= {"responses": 3, "prompts": {"corpora": ["chat"], "limit": 8}}
    project.snakemake(MANIFEST)
    # 6 more to 6 prompts, and 3 each to two new ones.
    assert generated(project, "1-of-1") == [12]
    before = {(row["id"], row["index"]): row for row in rows(sampled)}
    after = {(row["id"], row["index"]): row for row in rows(project)}
    assert len(after) == 24 and all(after[key] == row for key, row in before.items())


@pytest.mark.slow
def test_an_evaluation_with_equal_settings_finds_the_same_responses(project):
    evaluation = project.config["eval"]["both"]
    sample = {"model": "sft:run", "prompts": {"corpora": ["chat"], "split": "held_out"}, "operation": {"gpus": 0}}
    project.config["sample"] = {"tries": sample | {"generation": {"max_new_tokens": 6}}}
    project.snakemake(MANIFEST)
    answered = len((project.folder / "results/eval/both/sft-run/scores/responses.jsonl").read_text().splitlines())
    table = {row["id"]: row for row in rows(project)}
    assert answered and generated(project, "1-of-1") == [len(table) - answered]
    evaluation["exact_match"]["limit"] = 99
    project.snakemake("results/eval/both/sft-run/manifest.json")
    run = json.loads(project.read("results/eval/both/sft-run/run.json"))
    assert run["responses_generated"] == 0
    for line in project.read("results/eval/both/sft-run/scores/responses.jsonl").splitlines():
        row = json.loads(line)
        assert row["response"] == table[row["id"]]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_table_whose_part_was_killed_equals_the_undisturbed_one(project, number):
    project.config["sample"] = {"tries": MANY}
    project.snakemake(MANIFEST)
    undisturbed = digest(project)
    forget(project)
    project.snakemake("results/prompts/tries/manifest.json")
    # Its job file, as a dry run leaves it.
    project.stale(MANIFEST)
    job = next((project.folder / "results/.jobs/generate").rglob("1-of-1*.json"))
    command = [sys.executable, "-m", "snaketune", "generate", str(job.relative_to(project.folder))]
    process = subprocess.Popen(command, cwd=project.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept, until = project.folder / "results/.work/.rows", time.monotonic() + 60
    while len(list(kept.glob("*/*.arrow"))) < 5 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.wait()
    assert not (project.folder / "results/generate/tries").exists()
    project.snakemake(MANIFEST)
    (count,) = generated(project, "1-of-1")
    assert 0 < count <= 80 - 5 and digest(project) == undisturbed


def test_a_server_generates_for_samples_and_evaluations(project, monkeypatch):
    chat = ChatTokenizer.load(project.folder / "results/tokenizer/small/tokenizer")
    monkeypatch.setenv("SERVER_KEY", "word-of-a-server")
    about = StandIn(chat, "500", "cut", key="word-of-a-server")
    before = json.loads(project.read("results/eval/both/sft-run/scores/scores.json"))
    with serving(about) as url:
        engine = {"url": url, "model": MODEL, "key_variable": "SERVER_KEY"}
        project.config["sample"]["tries"] |= {"operation": {"engine": engine}, "responses": 3}
        project.config["eval"]["both"] |= {"operation": {"engine": engine}, "samples": 3, "models": ["sft:run"]}
        said = project.snakemake(MANIFEST, "results/eval/both/sft-run/manifest.json")
    assert "Traceback" not in said and f"prompts are sent to {url}" in said
    manifest = json.loads(project.read(MANIFEST))
    # None is taken from the engine before, and none is asked for twice.
    assert manifest["engine"] == {"name": "server", "model": MODEL} and not manifest["reproducible"]
    assert url not in json.dumps(manifest) + project.read("results/generate/tries/1-of-1/manifest.json")
    assert json.loads(project.read("results/generate/tries/1-of-1/run.json"))["url"] == url
    assert set(about.answered.values()) == {1}
    evaluated = json.loads(project.read("results/eval/both/sft-run/manifest.json"))
    assert evaluated["generation"]["engine"] == manifest["engine"]
    responses = project.read("results/eval/both/sft-run/scores/responses.jsonl").splitlines()
    assert len(about.answered) == 18 + len(responses)
    after = json.loads(project.read("results/eval/both/sft-run/scores/scores.json"))
    for scores in (before, after):
        del scores["conversations"]["chat"]["exact_match"]
    assert after == before
    files = [path for path in project.made() if path.stat().st_size < 1e6]
    assert not any(b"word-of-a-server" in path.read_bytes() for path in files)


def test_the_report_shows_the_sample(project):
    project.snakemake("results/report/manifest.json")
    page = project.read("results/report/pages/sampling.html")
    assert "transformers" in page and "distinct responses per prompt" in page
    assert page.count('<article class="sample">') == 6 and page.count("<svg") == 2
    assert 'href="sampling.html"' in project.read("results/report/pages/index.html")
    assert "Responses by transformers" in project.read("results/report/pages/index.html")
