"""Files that URLs name: listed, identified, read in parts, and refused if they are damaged or changed."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha1, sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snaketune import locations
from snaketune.config.base import files_at
from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.archives import ZSTD_MAGIC
from snaketune.corpus.reading.sources import read_file, read_files
from snaketune.errors import SnaketuneError
from snaketune.locations import RemoteFile, check_url, facts_of, located, size_of
from snaketune.remote_files import HEAD_BYTES, READAHEAD, open_file

from .stores import (
    ObjectStore,
    WebServer,
    forget_stores,
    google_server,
    hub_server,
    moto_server,
    object_store,
    web_server,
)

ROWS = [{"prompt": f"question {number}", "response": f"answer {number} " * 5} for number in range(3)]
# More than the first bytes and what is fetched in advance.
LONG = 120_000


@pytest.fixture(autouse=True)
def nothing_is_known():
    forget_stores()


@pytest.fixture(scope="module")
def moto():
    with moto_server() as url:
        yield url


@pytest.fixture
def store(moto, monkeypatch):
    return object_store(moto, monkeypatch)


@pytest.fixture
def web():
    with web_server() as server:
        yield server


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict], **options) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def zipped(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", lines(rows))
    return buffer.getvalue()


def tarred(rows: list[dict], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        entry = tarfile.TarInfo("a.jsonl")
        entry.size = len(content := lines(rows))
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def arrow(rows: list[dict]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def zstd(rows: list[dict]) -> bytes:
    content = pa.compress(lines(rows), "zstd", asbytes=True)
    assert content.startswith(ZSTD_MAGIC)
    return content


FORMATS = {
    "a.jsonl": lines,
    "a.json": lambda rows: json.dumps(rows).encode(),
    "a.csv": lambda rows: ("prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in rows)).encode(),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "a.jsonl.zst": zstd,
    "a.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
    "a.zip": zipped,
    "a.tar": tarred,
    "a.tar.gz": lambda rows: tarred(rows, "w:gz"),
}


def rows_at(url: str) -> list:
    return [raw.value for raw in read_file(located(url), url)]


def error_of(url: str) -> str:
    with pytest.raises(SnaketuneError) as caught:
        rows_at(url)
    return str(caught.value)


# Formats


@pytest.mark.parametrize("count", [3, LONG])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_an_object_store(store: ObjectStore, name, count):
    rows = [ROWS[number % 3] for number in range(count)]
    store.write(name, FORMATS[name](rows))
    assert rows_at(store.url + name) == rows


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_a_web_server(web: WebServer, name):
    web.files[f"/{name}"] = FORMATS[name](ROWS)
    assert rows_at(f"{web.url}/{name}") == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_a_server_that_sends_whole_files_only_streams_them(web: WebServer, name):
    rows = [{"text": sha256(b"%d" % number).hexdigest()} for number in range(LONG)]
    web.sends_parts, web.files[f"/{name}"] = False, FORMATS[name](rows)
    assert len(web.files[f"/{name}"]) > 2 * HEAD_BYTES
    assert rows_at(f"{web.url}/{name}") == rows


def test_a_zip_archive_needs_a_server_that_sends_parts(web: WebServer):
    web.sends_parts, web.files["/a.zip"] = False, b"PK\x03\x04" + bytes(HEAD_BYTES) + zipped(ROWS)
    assert "sends whole files only; download it" in error_of(f"{web.url}/a.zip")


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


def test_a_file_at_a_commit_is_not_identified_again(monkeypatch):
    url = f"hf://datasets/owner/name@{'0f' * 20}/a.jsonl"
    known = locations.Facts(3, "blob_id:f00 3 bytes")
    monkeypatch.setitem(locations._facts, url, known)
    assert facts_of([url], fresh=True) == {url: known}


# How much is fetched


def test_a_file_is_fetched_once_and_not_at_once(web: WebServer):
    rows = [{"text": "x" * 1000} for _ in range(30_000)]
    web.files["/a.jsonl"] = lines(rows)
    size = len(web.files["/a.jsonl"])
    assert sum(1 for _ in read_file(located(f"{web.url}/a.jsonl"), "a")) == len(rows)
    spans = [asked.removeprefix("bytes=").split("-") for _, _, asked in web.requests if asked]
    fetched = [int(last) + 1 - int(first) for first, last in spans]
    assert max(fetched) <= READAHEAD + HEAD_BYTES
    assert sum(fetched) <= size + HEAD_BYTES


def test_of_a_parquet_file_the_row_groups_before_a_limit_are_fetched(web: WebServer):
    rows = [{"text": f"{number:09}" * 100} for number in range(40_000)]
    content = web.files["/a.parquet"] = parquet(rows, row_group_size=4000, compression="none", use_dictionary=False)
    assert len(content) > 3 * READAHEAD
    raws = read_file(located(f"{web.url}/a.parquet"), "a")
    assert [next(raws).value for _ in range(10)] == rows[:10]
    spans = [asked.removeprefix("bytes=").split("-") for _, _, asked in web.requests if asked]
    assert sum(int(last) + 1 - int(first) for first, last in spans) < len(content) / 2


def test_small_files_take_one_request_for_their_content(web: WebServer):
    web.files["/a.jsonl"] = lines(ROWS)
    rows_at(f"{web.url}/a.jsonl")
    assert [method for method, *_ in web.requests] == ["HEAD", "GET"]


def test_a_file_is_read_at_any_position(store: ObjectStore):
    content = bytes(number % 251 for number in range(3 * HEAD_BYTES))
    store.write("a.bin", content)
    with open_file(RemoteFile(store.url + "a.bin")) as file:
        for offset in (0, HEAD_BYTES - 5, 2 * HEAD_BYTES, 10, len(content) - 7):
            file.seek(offset)
            assert file.read(20) == content[offset : offset + 20]
        file.seek(-3, io.SEEK_END)
        assert file.read() == content[-3:]


# Damage


def test_a_missing_object_is_named(store: ObjectStore):
    assert error_of(f"{store.url}none.jsonl") == (
        "s3://rows/none.jsonl doesn't exist, or isn't visible with these credentials; check the name"
    )
    with pytest.raises(SnaketuneError, match=r"s3://other/a.jsonl doesn't exist"):
        facts_of(["s3://other/a.jsonl"])


def test_a_folder_without_a_slash_is_no_file(store: ObjectStore):
    store.write("d/a.jsonl", lines(ROWS))
    with pytest.raises(SnaketuneError, match="is a folder; to read all files in it, end it with a slash: s3://rows/d/"):
        facts_of([f"{store.url}d"])


def test_an_object_that_changes_while_it_is_read_stops_reading(store: ObjectStore):
    rows = [{"text": "x" * 1000} for _ in range(30_000)]
    store.write("a.jsonl", lines(rows))
    url = f"{store.url}a.jsonl"
    raws = read_file(located(url), url)
    next(raws)
    store.write("a.jsonl", lines(rows[::-1] + ROWS))
    with pytest.raises(SnaketuneError, match=r"s3://rows/a.jsonl changed while it was read; run again"):
        list(raws)


def test_a_page_that_changes_while_it_is_read_stops_reading(web: WebServer):
    """A web server doesn't compare what is asked for with what was."""
    rows = [{"text": "x" * 1000} for _ in range(30_000)]
    web.files["/a.jsonl"] = lines(rows)
    raws = read_file(located(f"{web.url}/a.jsonl"), "a")
    next(raws)
    web.files["/a.jsonl"] = lines([{"text": "y" * 1000} for _ in range(30_000)])
    with pytest.raises(SnaketuneError, match=r"a.jsonl changed while it was read; run again"):
        list(raws)


@pytest.mark.parametrize("count", [3, LONG])
def test_a_transfer_that_is_cut_off_stops_reading(web: WebServer, count):
    web.files["/a.jsonl"] = lines([{"text": "x" * 100}] * count)
    web.cut_off = 150 if count == 3 else 9 << 20
    message = error_of(f"{web.url}/a.jsonl")
    assert f"{web.url}/a.jsonl" in message
    assert "run again" in message


def test_an_object_that_is_a_cut_off_archive_stops_reading(store: ObjectStore):
    store.write("a.jsonl.gz", gzip.compress(lines(ROWS * 1000))[:-100])
    assert "a.jsonl.gz can't be read" in (message := error_of(f"{store.url}a.jsonl.gz"))
    assert "damaged or cut off" in message


def test_a_parquet_file_that_is_cut_off_stops_reading(store: ObjectStore):
    store.write("a.parquet", parquet(ROWS * 1000)[:-100])
    assert "It may be damaged or cut off" in error_of(f"{store.url}a.parquet")


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_names_where_credentials_come_from(web: WebServer, status):
    web.status, web.files["/a.jsonl"] = status, lines(ROWS)
    assert "access is denied, or there are no credentials" in (message := error_of(f"{web.url}/a.jsonl"))
    assert message.endswith("credentials come from the environment: ~/.netrc")


def test_missing_credentials_name_where_they_come_from(store: ObjectStore, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    message = error_of(f"{store.url}a.jsonl")
    assert message.startswith("s3://rows/a.jsonl can't be read: access is denied, or there are no credentials")
    assert "AWS_PROFILE" in message


def test_a_profile_is_used(store: ObjectStore, monkeypatch, tmp_path):
    store.write("a.jsonl", lines(ROWS))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert rows_at(f"{store.url}a.jsonl") == ROWS


def test_a_server_that_cannot_be_reached_is_named():
    message = error_of("http://127.0.0.1:1/a.jsonl")
    assert message.startswith("http://127.0.0.1:1/a.jsonl can't be read")
    assert message.endswith("Check the network, and run again")


def test_a_missing_client_is_named(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(locations, "_filesystem_of", missing)
    with pytest.raises(SnaketuneError, match=r"s3://rows/a is read with s3fs: pip install s3fs \(Install s3fs"):
        facts_of(["s3://rows/a"])
    monkeypatch.undo()


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
        ("s3://b/a b", "blanks"),
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
