"""Previews of files by URL."""

import pytest

from snaketune.__main__ import main
from tests.corpus.reading.remote_rows import FORMATS, ROWS
from tests.corpus.reading.stores import forget_stores, web_server


@pytest.fixture
def web():
    forget_stores()
    with web_server() as server:
        yield server


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_a_web_server_is_shown(web, name, capsys):
    web.files[f"/{name}"] = FORMATS[name](ROWS)
    assert main(["preview", f"{web.url}/{name}"]) == 0
    shown = capsys.readouterr().out
    assert f"{web.url}/{name}" in shown
    assert "conversations: reads all 3 rows" in shown


def test_a_missing_file_is_named(web, capsys):
    assert main(["preview", f"{web.url}/none.jsonl"]) == 1
    assert f"{web.url}/none.jsonl doesn't exist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "files are read from s3://"),
        ("https://host/x?sig=word-of-mine", "credentials come from the environment"),
        ("https://me:word-of-mine@host/x", "credentials come from the environment"),
        ("https://word-of-mine@host/x", "a user before the server"),
        ("https://host/*.jsonl", "name each file"),
    ],
)
def test_a_url_that_is_not_read_is_refused(url, message, capsys):
    assert main(["preview", url]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert "word-of-mine" not in said.err + said.out
