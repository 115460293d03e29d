"""Compressed files and archives: each member is read like a file of the source, in order of name."""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snaketune.corpus.reading import archives, tables
from snaketune.corpus.reading.sources import read_file, read_files
from snaketune.errors import SnaketuneError


def lines(*names: str) -> bytes:
    return "".join(json.dumps({"prompt": name, "response": "x"}) + "\n" for name in names).encode()


def table() -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["p"], "response": ["x"]}), made)
    return made.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return made.getvalue()


def tarred(members: dict[str, bytes], format_: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format_) as file:
        for name, content in members.items():
            if name.endswith("/"):
                info = tarfile.TarInfo(name)
                info.type = tarfile.DIRTYPE
                file.addfile(info)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


ARCHIVES = {
    "zip": zipped,
    "tar": tarred,
    "tar of GNU": lambda members: tarred(members, tarfile.GNU_FORMAT),
    "tar.gz": lambda members: gzip.compress(tarred(members)),
    "tar.xz": lambda members: lzma.compress(tarred(members)),
    "tar.zst": lambda members: zstd(tarred(members)),
}


def read(tmp_path, content: bytes, name: str = "a.bin", **keys):
    (tmp_path / name).write_bytes(content)
    files = [(name_, list(raws)) for name_, raws in read_files(tmp_path / name, f"data/{name}", **keys)]
    return {name_: [getattr(raw.value, "reason", raw.value) for raw in raws] for name_, raws in files}


def prompts(files) -> list[str]:
    return [row["prompt"] for rows in files.values() for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.jsonl", "a.xz"])
def test_xz(tmp_path, name):
    assert prompts(read(tmp_path, lzma.compress(lines("a", "b")), name)) == ["a", "b"]
    (tmp_path / name).write_bytes(lzma.compress(lines("a") * 999)[:-30])
    with pytest.raises(SnaketuneError, match=rf"data/{name} can't be read.*cut off; fetch it again"):
        list(read_file(tmp_path / name, f"data/{name}"))


@pytest.mark.parametrize("archive", ARCHIVES)
def test_members_are_files_of_the_source_in_order_of_name(tmp_path, capsys, archive):
    members = {
        "data/": b"",
        "data/c.csv": b"prompt;response\nc1;x\nc2;y\n",
        "data/b.json": json.dumps([{"prompt": "b1"}, {"prompt": "b2"}], indent=1).encode(),
        "data/d.jsonl.gz": gzip.compress(lines("d")),
        "README.md": b"# Data\n\nText, and more.\n",
        "data/e.parquet": table(),
        "LICENSE": b"a,b\nc,d\n",
        "__MACOSX/data/._a.jsonl": b"\0\5\x16\7junk",
        ".DS_Store": b"\0\0\0\1Bud1",
        "data/picture.png": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "data/a.jsonl": lines("a1", "a2"),
    }
    files = read(tmp_path, ARCHIVES[archive](members))
    assert list(files) == [
        f"data/a.bin/data/{name}" for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl.gz", "e.parquet")
    ]
    assert prompts(files) == ["a1", "a2", "b1", "b2", "c1", "c2", "d", "p"]
    output = capsys.readouterr().out
    assert "data/a.bin: not read: .DS_Store, LICENSE, README.md, __MACOSX/data/._a.jsonl, data/picture.png" in output


@pytest.mark.parametrize("archive", ARCHIVES)
def test_the_order_and_size_of_members_do_not_matter(tmp_path, archive):
    names = [f"{i * 7 % 30:02}" for i in range(30)]
    members = {f"{name}.jsonl": lines(*[name] * (60 if int(name) % 5 == 0 else 3)) for name in names}
    rows = prompts(read(tmp_path, ARCHIVES[archive](members)))
    assert rows == [name for name in sorted(names) for _ in range(60 if int(name) % 5 == 0 else 3)]


@pytest.mark.parametrize("archive", ARCHIVES)
def test_rows_say_which_member_they_are_of(make, archive):
    content = ARCHIVES[archive]({"x/a.jsonl": lines("a"), "x/b.jsonl": b'{"prompt": "cut\n' + lines("b")})
    built = make(content, max_quarantined_fraction=1.0)
    (bad,) = built.quarantine
    assert (bad["file"], bad["line"]) == ("data/0.jsonl/x/b.jsonl", 1)
    assert sorted(built.prompts()) == ["a", "b"] and built.counts["read"] == 3


@pytest.mark.parametrize("archive", ARCHIVES)
def test_plain_texts_in_an_archive_are_documents(make, archive):
    members = {"b.txt": b"second, text\n", "a.md": b"first\n", "README": b"about\n", "c.bin": b"\x00\x01\xff\xfe" * 50}
    built = make(ARCHIVES[archive](members), kind="text")
    assert sorted(row["messages"][0]["content"] for row in built.train) == ["first\n", "second, text\n"]


@pytest.mark.parametrize("archive", ARCHIVES)
def test_an_archive_without_data(tmp_path, archive):
    with pytest.raises(
        SnaketuneError, match=r"data/a\.bin holds no file in a supported format.*README.md, x\.png.*unpack"
    ):
        read(tmp_path, ARCHIVES[archive]({"README.md": b"hello\n", "x.png": b"\x89PNG\r\n\x1a\n"}))


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize(
    "content, says", [(b"", "holds no rows"), ("{}".encode("utf-16"), "utf-16"), (b"Not found", "JSON")]
)
def test_a_member_with_a_data_suffix_but_no_data(tmp_path, archive, content, says):
    with pytest.raises(SnaketuneError, match=rf"data/a\.bin/b\.json.*{says}"):
        read(tmp_path, ARCHIVES[archive]({"a.json": lines("a"), "b.json": content}))


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_archive(tmp_path, archive, share):
    import random

    generator = random.Random(1)
    members = {f"{i}.jsonl": lines(*(str(generator.random()) for _ in range(500))) for i in range(5)}
    content = ARCHIVES[archive](members)
    with pytest.raises(SnaketuneError, match=r"data/a\.bin.*fetch it again"):
        read(tmp_path, content[: int(len(content) * share)])


def test_a_damaged_header_in_a_tar_hides_no_member(tmp_path):
    content = bytearray(tarred({"a.jsonl": lines("a"), "b.jsonl": lines("b")}))
    content[content.index(b"b.jsonl")] = ord("x")
    with pytest.raises(SnaketuneError, match=r"data/a\.tar.*damaged.*after a\.jsonl"):
        read(tmp_path, bytes(content), "a.tar")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_of_members_with_one_name_the_last_is_read(tmp_path, pack):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for name in ("first", "second"):
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(lines(name))
            file.addfile(info, io.BytesIO(lines(name)))
    assert prompts(read(tmp_path, pack(made.getvalue()))) == ["second"]


@pytest.mark.parametrize("rows", [100_000, 1])
def test_a_tar_that_does_not_fit_on_the_disk_for_temporary_files(tmp_path, monkeypatch, rows):
    """Also one that is smaller than what is written at a time."""
    # As short as a tar may be, in one block of 512 bytes each.
    monkeypatch.setattr(tarfile, "RECORDSIZE", tarfile.BLOCKSIZE)
    monkeypatch.setattr(archives, "TemporaryFile", partial(open, "/dev/full", "wb"))
    with pytest.raises(
        SnaketuneError, match=r"data/a\.bin .*doesn't fit uncompressed in /\S+; set TMPDIR to .*unpack it"
    ):
        read(tmp_path, gzip.compress(tarred({"a.jsonl": lines("a") * rows})))


def test_a_damaged_directory_of_a_zip_hides_no_member(tmp_path):
    content = bytearray(zipped({"a.jsonl": lines("a"), "b.jsonl": lines("b")}))
    # The recorded size of the directory is that of its last entry.
    end = content.rindex(b"PK\5\6")
    content[end + 12 : end + 16] = (end - content.rindex(b"PK\1\2")).to_bytes(4, "little")
    with pytest.raises(SnaketuneError, match=r"data/a\.zip.*damaged.*fetch it again"):
        read(tmp_path, bytes(content), "a.zip")


def test_a_zip_with_more_members_than_its_count_can_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "COUNT_OVERFLOW", 2)
    content = bytearray(zipped({f"{i}.jsonl": lines(str(i)) for i in range(5)}))
    content[content.rindex(b"PK\5\6") + 10] = 2
    assert prompts(read(tmp_path, bytes(content))) == list("01234")


@pytest.mark.parametrize("offset, value", [(4, 200), (6, 32)])
def test_an_unsupported_zip(tmp_path, offset, value):
    content = bytearray(zipped({"a.jsonl": lines("a")}))
    content[offset], content[content.index(b"PK\1\2") + offset + 2] = value, value
    with pytest.raises(SnaketuneError, match=r"data/a\.zip.*can't be (read|decompressed): .*; unpack it"):
        read(tmp_path, bytes(content), "a.zip")


def test_a_tar_is_detected_by_content(tmp_path):
    assert prompts(read(tmp_path, tarred({"a.jsonl": lines("a")}), "a.jsonl")) == ["a"]
    old = bytearray(tarred({"a.jsonl": lines("a")}, tarfile.USTAR_FORMAT))
    # As it was before POSIX: no magic, and the checksum of what is left.
    old[257:265] = bytes(8)
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + sum(old[156:512]) + 8 * 32)
    assert prompts(read(tmp_path, bytes(old), "b.tar")) == ["a"]


def test_an_encrypted_zip(tmp_path):
    content = bytearray(zipped({"a.jsonl": lines("a")}))
    content[6] |= 1
    content[content.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(SnaketuneError, match=r"data/a\.zip/a\.jsonl is encrypted; unpack it"):
        read(tmp_path, bytes(content), "a.zip")


def test_an_archive_in_an_archive(tmp_path, capsys):
    files = read(
        tmp_path, zipped({"a.jsonl": lines("a"), "b.tar": tarred({"b.jsonl": lines("b")}), "c.zip": zipped({})})
    )
    assert prompts(files) == ["a"] and "not read: b.tar, c.zip" in capsys.readouterr().out
    with pytest.raises(SnaketuneError, match=r"zip archive.*unpack"):
        read(tmp_path, gzip.compress(zipped({"a.jsonl": lines("a")})))


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress, lambda data: zipped({"a.parquet": data})])
def test_a_table_that_is_too_large_to_unpack_in_memory(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(tables, "MAX_DECOMPRESSED", 100)
    with pytest.raises(SnaketuneError, match=r"data/a\.bin\S* .*decompress it, and it is read"):
        read(tmp_path, packed(table()))
    assert prompts(read(tmp_path, table(), "a.parquet")) == ["p"]


def test_keys_of_the_source_apply_to_every_member(make):
    png = b"\x89PNG\r\n\x1a\n" + bytes(50)
    content = zipped({"a.csv": "grün~x\n".encode("cp1252"), "b.txt": "blau~y\n".encode("cp1252"), "c.png": png})
    source = {"encoding": "cp1252", "delimiter": "~", "header": ["prompt", "response"]}
    assert sorted(make(content, source=source).prompts()) == ["blau", "grün"]
