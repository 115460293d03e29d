"""Files without rows: each error names what the file is, and what to do about it."""

import io
import pickle
import sqlite3
import zipfile

import pytest

from snaketune.corpus.reading.sources import read_file
from snaketune.errors import SnaketuneError

JSON = '{"prompt": "x", "response": "y"}\n'


def refused(tmp_path, name, content, **keys):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SnaketuneError) as error:
        list(read_file(path, f"data/{name}", **keys))
    assert f"data/{name}" in str(error.value)
    return str(error.value)


def workbook(inside: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("[Content_Types].xml", "<Types/>")
        file.writestr(inside, "<x/>")
    return made.getvalue()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["\ufeff", ""])
@pytest.mark.parametrize("text", [JSON * 20, "prompt,response\nx,y\n"])
def test_other_unicode_names_its_encoding(tmp_path, encoding, mark, text):
    message = refused(tmp_path, "a.jsonl", (mark + text).encode(encoding))
    named = encoding[:6] if mark else encoding
    assert f"`encoding: {named}`" in message and f"iconv -f {named.upper()} -t UTF-8" in message


def test_zero_bytes_are_no_text(tmp_path):
    message = refused(tmp_path, "a.jsonl", bytes(5000))
    assert "nothing but zero bytes" in message and "fetch it again" in message and "UTF-16" not in message


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["a.pkl", "a.jsonl", "a.parquet"])
def test_a_pickle(tmp_path, protocol, name):
    message = refused(tmp_path, name, pickle.dumps([{"prompt": "x"}] * 3, protocol))
    assert "is a Python pickle" in message and "to_parquet" in message


def test_a_database(tmp_path):
    with sqlite3.connect(tmp_path / "made.db") as database:
        database.execute("create table rows (prompt text)")
    message = refused(tmp_path, "a.db", (tmp_path / "made.db").read_bytes())
    assert "is an SQLite database" in message and "sqlite3 -csv -header" in message


@pytest.mark.parametrize("plain", [False, True])
def test_a_pdf(tmp_path, plain):
    message = refused(tmp_path, "a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", plain=plain)
    assert "is a PDF" in message and "pdftotext" in message


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html>\n<html>",
        b"\n\n  <!doctype HTML>",
        b"\xef\xbb\xbf<html lang='en'>",
        b"<!-- served by x -->\n<html>",
        b"<head><title>Sign in</title>",
        b'<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC>',
    ],
)
def test_a_web_page(tmp_path, content):
    assert (
        "is a web page and not the data" in (message := refused(tmp_path, "a.jsonl", content)) and "log in" in message
    )


def test_workbooks(tmp_path):
    message = refused(tmp_path, "a.xlsx", workbook("xl/workbook.xml"))
    assert "is an Excel workbook" in message and "CSV" in message and "read_excel(...).to_parquet(...)" in message
    assert "unpack" not in message
    assert "is a Word document" in refused(tmp_path, "a.docx", workbook("word/document.xml"))
    old = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(5000)
    assert "read_excel(...).to_parquet(...)" in refused(tmp_path, "a.xls", old)


def test_a_pointer_of_git_lfs(tmp_path):
    message = refused(tmp_path, "a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "Git LFS pointer" in message and "git lfs pull" in message
