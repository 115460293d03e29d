"""A list of sources in a file of its own, and URLs in a config."""

from pathlib import Path

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph

SOURCES = """
- files: [data/a.jsonl]
  weight: 2
- {files: ["data/b*.jsonl"], max_rows: 3}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a", "b1", "b2"):
        (tmp_path / f"data/{name}.jsonl").write_text("{}\n")
    (tmp_path / "data/sources.yaml").write_text(SOURCES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(sources) -> dict:
    return {"corpora": {"chat": {"kind": "conversations", "sources": sources}}}


def jobs_of(sources) -> dict:
    return {key: (job.plain_spec, job.files) for key, job in JobGraph(*load(config_of(sources))).jobs.items()}


def error_of(sources) -> str:
    with pytest.raises(SnaketuneError) as caught:
        load(config_of(sources))
    return str(caught.value)


def test_a_list_in_a_file_is_the_list(here):
    written_out = [{"files": ["data/a.jsonl"], "weight": 2}, {"files": ["data/b*.jsonl"], "max_rows": 3}]
    assert jobs_of("data/sources.yaml") == jobs_of(written_out)
    (here / "moved.yaml").write_text("# the same\n" + SOURCES)
    assert jobs_of("moved.yaml") == jobs_of(written_out)
    (here / "moved.yaml").write_text(SOURCES.replace("weight: 2", "weight: 3"))
    assert jobs_of("moved.yaml") != jobs_of(written_out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("files: [data/a.jsonl]\n", "holds no list; expected what `sources` takes"),
        ("[]\n", "a list of at least 1"),
        ("- {files: [data/a.jsonl], weigth: 2}\n", "corpora.chat.sources.0.weigth"),
        ("- {files: [data/none.jsonl]}\n", "corpora.chat.sources.0.files: 'data/none.jsonl' is not a file"),
        ("- files: [a]\n  files: [b]\n", "line 2: the key 'files' occurs twice"),
        ("- !!python/object:os.system {}\n", "a config takes only texts, numbers, lists and mappings"),
        (
            "- {files: ['s3://me:word-of-mine@b/x']}\n",
            "entry 0.files.0: contains what looks like a key, a token or a password",
        ),
        ("- {files: [\n", "can't be read"),
    ],
)
def test_a_file_that_holds_no_list_of_sources_is_refused(here, content, message):
    (here / "data/sources.yaml").write_text(content)
    said = error_of("data/sources.yaml")
    assert message in said
    assert "corpora.chat.sources" in said
    assert "word-of-mine" not in said


def test_a_missing_list_is_named():
    assert "'none.yaml' doesn't exist; it names a YAML file with a list of sources" in error_of("none.yaml")


@pytest.mark.parametrize(
    "url",
    [
        "https://host/x?X-Amz-Credential=AK&X-Amz-Signature=word-of-mine",
        "https://a.blob.core.windows.net/c/x?sv=2024&sig=word-of-mine%3D",
        "https://host/x?a=b&access_token=word-of-mine",
        "s3://key:word-of-mine@b/x",
    ],
)
def test_a_url_with_a_credential_is_refused_unquoted(url):
    said = error_of([{"files": [url]}])
    assert "corpora.chat.sources.0.files.0: contains what looks like a key, a token or a password" in said
    assert "word-of-mine" not in said


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "found ftp://"),
        ("https://word-of-mine@host/x", "a user before the server doesn't belong in a config"),
        ("hf://datasets/a/b/x.parquet", "with a commit, tag or branch"),
        ("https://host/*.jsonl", "web servers have no lists of files"),
    ],
)
def test_a_url_that_is_not_read_is_refused_by_its_key(url, message):
    said = error_of([{"files": [url]}])
    assert message in said
    assert "corpora.chat.sources.0.files" in said
    assert "found 'http" not in said or "word-of-mine" not in said


def test_the_key_of_a_url_that_cannot_be_reached_is_named():
    assert "corpora.chat.sources.0.files: http://127.0.0.1:1/x can't be read" in error_of(
        [{"files": ["http://127.0.0.1:1/x"]}]
    )
