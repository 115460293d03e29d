"""Files that URLs name: read in parts, and refused if they are damaged or changed."""

import gzip
import io
from hashlib import sha256

import pytest

from snaketune import locations
from snaketune.corpus.reading.sources import read_file
from snaketune.errors import SnaketuneError
from snaketune.locations import RemoteFile, facts_of, located
from snaketune.remote_files import HEAD_BYTES, READAHEAD, open_file

from .remote_rows import FORMATS, ROWS, error_of, lines, parquet, rows_at, zipped
from .stores import ObjectStore, WebServer, forget_stores

# More than the first bytes and what is fetched in advance.
LONG = 120_000


@pytest.fixture(autouse=True)
def nothing_is_known():
    forget_stores()


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
    """A web server doesn't compare a request with the one before."""
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
