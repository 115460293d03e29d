"""Corpora from URLs in whole runs: when stores are asked, what is stale, and what stops a job."""

import json
import subprocess
import sys

import pytest

from tests.corpus.reading.stores import forget_stores, moto_server, object_store, web_server

from .conftest import ROOT

pytestmark = pytest.mark.workflow
MADE = ("corpus/chat", "tokenizer/small")


@pytest.fixture(autouse=True)
def nothing_is_known():
    forget_stores()


@pytest.fixture
def web(fresh):
    with web_server() as server:
        server.files["/chat.jsonl"] = (fresh.folder / "data/chat.jsonl").read_bytes()
        yield server


@pytest.fixture
def store(monkeypatch):
    with moto_server() as url:
        yield object_store(url, monkeypatch)


def manifest(project, name: str) -> dict:
    return json.loads(project.read(f"results/{name}/manifest.json"))


def test_a_run_asks_a_server_once_and_the_jobs_below_do_not(fresh, web):
    local = fresh.copy_to(fresh.folder.parent / "local")
    local.snakemake("results/corpus/chat/manifest.json")
    url = f"{web.url}/chat.jsonl"
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [url]
    assert "corpus" in fresh.stale("results/corpus/chat/manifest.json")
    assert [method for method, *_ in web.requests] == ["HEAD"]
    web.requests.clear()
    fresh.snakemake("results/corpus/chat/manifest.json")
    # The plan; the job, before and after it reads.
    assert [method for method, *_ in web.requests].count("GET") == 1
    assert len(web.requests) <= 6
    made, from_disk = manifest(fresh, "corpus/chat"), manifest(local, "corpus/chat")
    assert made["payload"] == from_disk["payload"]
    ((identity,),) = [made["inputs"]["files"]]
    assert identity.startswith('ETag:"')
    web.requests.clear()
    fresh.snakemake("results/tokenizer/small/manifest.json")
    assert [method for method, *_ in web.requests] == ["HEAD"]


def test_what_is_stale_follows_the_content_of_an_object(fresh, store):
    content = (fresh.folder / "data/chat.jsonl").read_bytes()
    half = len(content.splitlines()) // 2
    first, second = (b"".join(part) for part in (content.splitlines(True)[:half], content.splitlines(True)[half:]))
    store.write("chat/a.jsonl", first)
    store.write("chat/b.jsonl", second)
    target = "results/corpus/chat/manifest.json"
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [f"{store.url}chat/"]
    fresh.snakemake(target)
    assert manifest(fresh, "corpus/chat")["counts"]["sources"][0]["files"] == [
        f"{store.url}chat/a.jsonl",
        f"{store.url}chat/b.jsonl",
    ]
    assert fresh.stale(target) == set()
    store.write("chat/b.jsonl", second)
    assert fresh.stale(target) == set()
    store.write("chat/b.jsonl", second + first.splitlines(True)[0])
    said = fresh.snakemake("--dry-run", target)
    assert f"stale: corpus/chat: changed input ({store.url}chat/b.jsonl)" in said
    store.write("chat/b.jsonl", second)
    assert fresh.stale(target) == set()
    store.write("chat/c.jsonl", first)
    assert "stale: corpus/chat: spec differs" in fresh.snakemake("--dry-run", target)
    store.remove("chat/c.jsonl")
    store.write("chat/_temporary/0/c.jsonl", first)
    said = fresh.snakemake("--dry-run", target, check=False)
    assert "corpora.chat.sources.0.files" in said
    assert "Spark or Hadoop is writing to it" in said
    for path in fresh.made():
        assert b"secret-of-a-test" not in path.read_bytes()
        assert b"key-of-a-test" not in path.read_bytes()


def test_a_missing_object_stops_the_plan_with_its_key(fresh, store):
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [f"{store.url}none.jsonl"]
    said = fresh.snakemake("--dry-run", check=False)
    assert "corpora.chat.sources.0.files: s3://rows/none.jsonl doesn't exist" in said


def run_job(project) -> str:
    """Run the corpus' job as its rule does."""
    command = [sys.executable, "-m", "snaketune", "corpus", "results/.jobs/corpus/chat.json"]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_an_object_that_changed_since_the_plan_stops_the_job(fresh, web):
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [f"{web.url}/chat.jsonl"]
    fresh.stale()
    web.files["/chat.jsonl"] += web.files["/chat.jsonl"]
    assert f"{web.url}/chat.jsonl changed since this run was planned; run again" in run_job(fresh)
    del web.files["/chat.jsonl"]
    assert f"{web.url}/chat.jsonl doesn't exist" in run_job(fresh)
    assert not (fresh.folder / "results/corpus/chat/manifest.json").exists()


def test_a_transfer_that_is_cut_off_stops_the_job(fresh, web):
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [f"{web.url}/chat.jsonl"]
    fresh.stale()
    web.cut_off = 5000
    assert f"{web.url}/chat.jsonl" in (said := run_job(fresh))
    assert "run again" in said
    assert not (fresh.folder / "results/corpus/chat/manifest.json").exists()


def test_a_preview_reads_the_beginning(fresh, web):
    line = json.dumps({"prompt": "question", "response": "answer " * 100}).encode() + b"\n"
    web.files["/chat.jsonl"] = line * 40_000
    fresh.config["corpora"]["chat"]["sources"][0]["files"] = [f"{web.url}/chat.jsonl"]
    said = fresh.snakemake("preview")
    assert f"chat: {web.url}/chat.jsonl\n  JSON lines" in said
    spans = [asked.removeprefix("bytes=").split("-") for _, _, asked in web.requests if asked]
    assert sum(int(last) + 1 - int(first) for first, last in spans) < len(web.files["/chat.jsonl"]) / 2


def test_planning_without_urls_loads_no_client():
    """And so touches no network."""
    code = (
        "import sys, yaml; from snaketune.stages.planner import Planner\n"
        "config = yaml.safe_load(open('config/config.yaml'))\n"
        "Planner(config, is_forced=lambda job: False, deploys=False)\n"
        "assert not {'fsspec', 'aiohttp', 's3fs', 'huggingface_hub'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
