"""Archives: what a member is called or links to leads nowhere, and what it unpacks to is never held as a whole."""

import gzip
import io
import tarfile
import tempfile
import tracemalloc
import zipfile

import pytest

from snaketune.corpus.reading.sources import read_file
from snaketune.errors import SnaketuneError

ROW = b'{"prompt": "a", "response": "b"}\n'
PLACES = ("../../evil.jsonl", "/tmp/evil.jsonl", "data/../../evil.jsonl", "\x1b[31mevil.jsonl", "C:\\evil.jsonl")


def tarred(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for info, content in members:
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return made.getvalue()


def rows(folder, content: bytes):
    (folder / "a").write_bytes(content)
    return [raw.value for raw in read_file(folder / "a", "data/a")]


@pytest.mark.parametrize("name", PLACES)
def test_what_an_archive_holds_is_never_written_anywhere(tmp_path, monkeypatch, name, capsys):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    # A compressed tar is copied to a file without a name.
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(tmp_path.rglob("*"))
    plain = tarred((tarfile.TarInfo(name), ROW))
    for content in (zipped(name, ROW), plain, gzip.compress(plain)):
        rows_or_nothing = []
        try:
            rows_or_nothing = rows(folder, content)
        except SnaketuneError as error:
            assert "\x1b" not in str(error)
        assert all(row == {"prompt": "a", "response": "b"} for row in rows_or_nothing)
        assert set(tmp_path.rglob("*")) == before | {folder / "a"}
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("type_", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_in_an_archive_lead_nowhere(tmp_path, type_, capsys):
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(ROW.replace(b"a", b"secret"))
    link = tarfile.TarInfo("link.jsonl")
    link.type, link.linkname = type_, str(secret)
    for pack in (bytes, gzip.compress):
        assert rows(tmp_path, pack(tarred((link, b""), (tarfile.TarInfo("b.jsonl"), ROW)))) == [
            {"prompt": "a", "response": "b"}
        ]
        assert "data/a: not read: link.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    "pack", [zipped, lambda name, content: gzip.compress(tarred((tarfile.TarInfo(name), content)))]
)
def test_a_member_that_unpacks_to_much_is_read_a_little_at_a_time(tmp_path, pack):
    content = pack("a.jsonl", ROW * 6_000_000)
    assert len(content) < 2_000_000
    (tmp_path / "a").write_bytes(content)
    del content
    tracemalloc.start()
    try:
        raws = read_file(tmp_path / "a", "data/a")
        for _ in range(1000):
            next(raws)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
