"""What each kind of store says of files: lists, identities, revisions; and which URLs are read."""

import gzip
import json
import os
import subprocess
import sys
from hashlib import sha1

import pytest
from pydantic import ValidationError

from snaketune import locations
from snaketune.config.base import files_at
from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.sources import read_files
from snaketune.errors import SnaketuneError
from snaketune.locations import check_url, facts_of, located, size_of

from .cloud_stores import azure_server, google_server, hub_server
from .remote_rows import ROWS, error_of, lines, parquet, rows_at, zipped
from .stores import ObjectStore, WebServer, forget_stores


@pytest.fixture(autouse=True)
def nothing_is_known():
    forget_stores()


ON_THE_HUB = """
import json
from snaketune.config.base import files_at
from snaketune.corpus.reading.sources import read_file
from snaketune.errors import SnaketuneError
from snaketune.locations import facts_of, located

url = "hf://datasets/owner/name@main/"
assert files_at(f"{url}data/*") == files_at(f"{url}data/")
urls = files_at(f"{url}data/")
facts = facts_of(urls)
assert facts_of(urls, fresh=True) == facts
try:
    facts_of([f"{url}data/c.jsonl"])
except SnaketuneError as error:
    message = str(error)
rows = [[raw.value for raw in read_file(located(one), one)] for one in urls]
print(json.dumps([urls, [list(facts[one]) for one in urls], rows, message]))
"""


def test_files_of_a_dataset_on_the_hub_are_read_by_revision():
    with hub_server() as hub:
        # huggingface_hub reads the environment when it is imported.
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}

        def read() -> list:
            done = subprocess.run([sys.executable, "-c", ON_THE_HUB], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        hub.files = {"data/a.jsonl": lines(ROWS), "data/b.parquet": parquet(ROWS * 2), "README.md": b"#"}
        url = "hf://datasets/owner/name@main/data"
        urls, facts, rows, message = read()
        assert urls == [f"{url}/a.jsonl", f"{url}/b.parquet"]
        assert facts[0] == [size := len(lines(ROWS)), f"blob_id:{sha1(lines(ROWS)).hexdigest()} {size} bytes"]
        assert rows == [ROWS, ROWS * 2]
        assert message.startswith(f"{url}/c.jsonl doesn't exist")
        hub.files["data/a.jsonl"] = lines(ROWS[::-1])
        assert read()[1][0] != facts[0]
        assert read()[1][1] == facts[1]


def test_objects_of_google_are_read(monkeypatch):
    with google_server(monkeypatch) as google:
        google.files = {"d/a.jsonl": lines(ROWS), "d/b.parquet": parquet(ROWS * 2), "c.jsonl": lines(ROWS)}
        urls = ["gs://rows/d/a.jsonl", "gs://rows/d/b.parquet"]
        assert files_at("gs://rows/d/") == files_at("gs://rows/d/*") == urls
        facts = facts_of(urls)
        assert facts_of(urls, fresh=True) == facts
        assert facts[urls[0]].identity.startswith("md5Hash:")
        assert [rows_at(url) for url in urls] == [ROWS, ROWS * 2]
        assert "gs://rows/e.jsonl doesn't exist" in error_of("gs://rows/e.jsonl")
        google.files["d/a.jsonl"] = lines(ROWS[::-1])
        assert facts_of(urls, fresh=True)[urls[0]] != facts[urls[0]]


def test_blobs_of_azure_are_read(monkeypatch):
    with azure_server(monkeypatch) as azure:
        azure.files = {"d/a.jsonl": lines(ROWS), "d/b.parquet": parquet(ROWS * 2), "c.jsonl": lines(ROWS)}
        urls = ["az://rows/d/a.jsonl", "az://rows/d/b.parquet"]
        assert files_at("az://rows/d/") == files_at("az://rows/d/*") == urls
        facts = facts_of(urls)
        assert facts_of(urls, fresh=True) == facts
        assert facts[urls[0]].identity.startswith("etag:")
        assert [rows_at(url) for url in urls] == [ROWS, ROWS * 2]
        assert "az://rows/e.jsonl doesn't exist" in error_of("az://rows/e.jsonl")
        azure.files["d/a.jsonl"] = lines(ROWS[::-1])
        assert facts_of(urls, fresh=True)[urls[0]] != facts[urls[0]]


def test_a_file_at_a_commit_is_not_identified_again(monkeypatch):
    url = f"hf://datasets/owner/name@{'0f' * 20}/a.jsonl"
    known = locations.Facts(3, "blob_id:f00 3 bytes")
    monkeypatch.setitem(locations._facts, url, known)
    assert facts_of([url], fresh=True) == {url: known}


# Identity


def test_the_identity_is_that_of_the_content(store: ObjectStore):
    url = f"{store.url}a.jsonl"
    store.write("a.jsonl", lines(ROWS))
    first = facts_of([url])[url]
    assert first.size == size_of(located(url)) == len(lines(ROWS))
    store.write("a.jsonl", lines(ROWS[::-1]))
    assert facts_of([url])[url] == first
    assert facts_of([url], fresh=True)[url] != first
    store.write("a.jsonl", lines(ROWS))
    assert facts_of([url], fresh=True)[url] == first


def test_many_files_of_a_folder_are_identified_by_one_listing(store: ObjectStore):
    for number in range(locations.LISTED):
        store.write(f"d/{number:03}.jsonl", lines(ROWS[:1]) * (number + 1))
    urls = files_at(f"{store.url}d/")
    listed = facts_of(urls)
    locations.forget()
    assert (
        facts_of(urls) == listed == {url: facts for one in urls for url, facts in facts_of([one], fresh=True).items()}
    )
    store.remove("d/007.jsonl")
    with pytest.raises(SnaketuneError, match=r"s3://rows/d/007.jsonl doesn't exist"):
        facts_of(urls, fresh=True)


def test_a_server_that_does_not_identify_files_is_refused(web: WebServer):
    web.identifies, web.files["/a.jsonl"] = False, lines(ROWS)
    assert "neither an ETag nor a time of the last change" in error_of(f"{web.url}/a.jsonl")


def test_a_server_that_does_not_state_the_length_is_refused(web: WebServer):
    web.states_length, web.files["/a.jsonl"] = False, lines(ROWS)
    assert "doesn't state the length" in error_of(f"{web.url}/a.jsonl")


@pytest.mark.parametrize(
    ("url", "entry", "identity"),
    [
        ("s3://b/k", {"ETag": '"f00-2"', "VersionId": "v"}, 'ETag:"f00-2" 3 bytes'),
        ("gs://b/k", {"md5Hash": "x==", "generation": "17", "etag": "CJ"}, "md5Hash:x== 3 bytes"),
        ("gs://b/k", {"generation": "17", "etag": "CJ"}, "generation:17 3 bytes"),
        ("az://b/k", {"etag": '"0x8D"'}, 'etag:"0x8D" 3 bytes'),
        ("hf://datasets/a/b@main/k", {"blob_id": "f00", "lfs": None}, "blob_id:f00 3 bytes"),
        ("https://h/k", {"Last-Modified": "Sat, 28 Nov 2026"}, "Last-Modified:Sat, 28 Nov 2026 3 bytes"),
    ],
)  # fmt: skip
def test_each_store_identifies_content_in_its_way(url, entry, identity):
    assert locations._facts_from(url, {"type": "file", "size": 3} | entry).identity == identity


def test_processes_that_plan_nothing_recall_what_the_plan_has_seen(store: ObjectStore, tmp_path):
    store.write("d/a.jsonl", lines(ROWS))
    urls = files_at(f"{store.url}d/")
    known = facts_of(urls)
    locations.remember(tmp_path / "known.json")
    store.write("d/b.jsonl", lines(ROWS))
    store.remove("d/a.jsonl")
    locations.forget()
    locations.recall(tmp_path / "known.json")
    assert files_at(f"{store.url}d/") == urls
    assert facts_of(urls) == known
    (tmp_path / "known.json").write_text("[]")
    locations.forget()
    locations.recall(tmp_path / "known.json")
    assert files_at(f"{store.url}d/") == [f"{store.url}d/b.jsonl"]


# Folders and patterns


def test_folders_and_patterns_are_those_of_local_files(store: ObjectStore):
    for key in ("d/b.jsonl", "d/a.jsonl", "d/sub/c.jsonl", "d/_SUCCESS", "d/.hidden", "d/_logs/x.jsonl", "e.jsonl"):
        store.write(key, lines(ROWS))
    url = store.url
    assert files_at(f"{url}d/") == [f"{url}d/{name}" for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl")]
    assert files_at(f"{url}d/*.jsonl") == [f"{url}d/a.jsonl", f"{url}d/b.jsonl"]
    assert files_at(url) == [f"{url}{name}" for name in ("d/a.jsonl", "d/b.jsonl", "d/sub/c.jsonl", "e.jsonl")]
    assert files_at(f"{url}**/*.jsonl")[0] == f"{url}d/_logs/x.jsonl"
    assert files_at(f"{url}d/[ab].jsonl") == [f"{url}d/a.jsonl", f"{url}d/b.jsonl"]
    with pytest.raises(ValueError, match=r"'s3://rows/x/' has no file"):
        files_at(f"{url}x/")
    with pytest.raises(ValueError, match=r"'s3://rows/\*.csv' matches no file"):
        files_at(f"{url}*.csv")


def test_names_are_taken_as_they_are_but_for_patterns(store: ObjectStore):
    store.write("d/a b ä.jsonl", lines(ROWS))
    url = f"{store.url}d/a b ä.jsonl"
    assert files_at(f"{store.url}d/") == [url]
    assert rows_at(url) == ROWS
    store.write("d/a[1].jsonl", lines(ROWS))
    with pytest.raises(
        ValueError, match=r"the name 's3://rows/d/a\[1\].jsonl' has braces, or characters of a pattern; rename"
    ):
        Source(files=(f"{store.url}d/*",))


def test_a_folder_that_cannot_be_listed_is_an_error_of_its_key(store: ObjectStore):
    with pytest.raises(ValidationError, match=r"(?s)files.*s3://other/d/"):
        Source(files=("s3://other/d/",))


def test_an_unfinished_folder_of_a_store_is_refused(store: ObjectStore):
    store.write("d/part-00000.parquet", parquet(ROWS))
    store.write("d/_temporary/0/part-00001.parquet", parquet(ROWS))
    with pytest.raises(ValueError, match=r"'s3://rows/d/' holds _temporary.*Spark or Hadoop is writing to it"):
        Source(files=(f"{store.url}d/",))
    assert len(Source(files=(f"{store.url}d/*.parquet",)).files) == 1


def test_a_partition_of_a_finished_table_is_finished(store: ObjectStore):
    part = "part-00000-0123abcd-0123-0123-0123-0123456789ab.c000.parquet"
    store.write(f"t/lang=de/{part}", parquet(ROWS))
    with pytest.raises(ValueError, match="no _SUCCESS"):
        files_at(f"{store.url}t/lang=de/")
    store.write("t/_SUCCESS", b"")
    assert files_at(f"{store.url}t/lang=de/") == [f"{store.url}t/lang=de/{part}"]


def test_datatrove_tasks_of_a_store_are_counted(store: ObjectStore):
    store.write("d/logs/executor.json", b'{"world_size": 2}')
    store.write("d/logs/completions/00000", b"")
    store.write("d/00000.jsonl.gz", gzip.compress(lines(ROWS)))
    with pytest.raises(ValueError, match=r"'s3://rows/d/': 1 of 2 tasks of datatrove haven't finished"):
        files_at(f"{store.url}d/")
    store.write("d/logs/completions/00001", b"")
    assert files_at(f"{store.url}d/") == [f"{store.url}d/00000.jsonl.gz"]


def test_members_of_an_archive_are_named_by_its_url(store: ObjectStore):
    store.write("a.zip", zipped(ROWS))
    url = f"{store.url}a.zip"
    assert [name for name, _ in read_files(located(url), url)] == [f"{url}/a.jsonl"]


# URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "files are read from s3://"),
        ("file:///etc/passwd", "files are read from s3://"),
        ("simplecache::s3://b/x", "files are read from s3://"),
        ("S3://b/x", "files are read from s3://"),
        ("s3://b", "expected s3://BUCKET/PATH"),
        ("s3:///x", "expected s3://BUCKET/PATH"),
        ("https://host", "expected https://SERVER/PATH"),
        ("https://me@host/x", "a user before the server"),
        ("https://host/d/", "web servers have no lists of files"),
        ("https://host/d/*.jsonl", "web servers have no lists of files"),
        ("s3://b/{x}", "braces"),
        ("https://host/a b", "write it as %20"),
        ("hf://datasets/a/b/x.parquet", "with a commit, tag or branch"),
        ("hf://a/b@main/x.parquet", "expected hf://datasets/OWNER/NAME@REVISION/PATH"),
        ("hf://buckets/a/b/x", "expected hf://datasets/OWNER/NAME@REVISION/PATH"),
    ],
)
def test_other_urls_are_refused(url, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("*", r"\*")):
        check_url(url)


@pytest.mark.parametrize(
    "url",
    ["s3://b/d/", "s3://b/", "hf://datasets/a/b@main/", "gs://b/**/*.jsonl.zst", "az://container/x.parquet", "https://host/x.jsonl?download=true",
     "hf://datasets/a/b@main/data/*.parquet", "hf://datasets/a/b@refs%2Fconvert%2Fparquet/d/"],
)  # fmt: skip
def test_urls_keep_their_slashes(url):
    assert check_url(url) == str(located(url)) == url
