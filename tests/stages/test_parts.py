"""The inputs of jobs of many parts: each reads its share, and the first one all of it, to verify it."""

import os

import pytest

from snaketune.artifacts import manifest
from snaketune.artifacts.manifest import describe_files, read_artifact, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import Claim, WorkFolder, publish


@pytest.fixture
def published(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "rows").mkdir(parents=True)
    (work / "rows/train.bin").write_bytes(b"x" * 5000)
    output = {"payload": describe_files(work / "rows"), "records": {}}
    write_manifest(work / "manifest.json", output)
    claim = Claim(out, "0", tmp_path / "work")
    publish(read_artifact(work / "manifest.json", "rows"), WorkFolder(work), claim, "rows", {"stage": "corpus"})
    return out / "manifest.json"


@pytest.fixture
def digested(monkeypatch):
    """Bytes that were read to verify files."""
    result, original = [], manifest.digest_file

    def digest_file(path):
        result.append(path.stat().st_size)
        return original(path)

    monkeypatch.setattr(manifest, "digest_file", digest_file)
    return result


def test_one_of_128_parts_verifies_for_all_of_them(published, digested):
    for part in range(1, 129):
        read_artifact(published, "rows").for_part(part).file("train.bin")
    assert sum(digested) == 5000


def test_who_reads_it_as_a_whole_verifies_it(published, digested):
    for _ in range(2):
        read_artifact(published, "rows").file("train.bin")
    assert sum(digested) == 10_000


@pytest.mark.parametrize("change", ["a byte", "another file", "no note", "a copy"])
def test_a_file_that_isnt_the_published_one_is_verified_by_every_part(published, digested, change):
    path = published.parent / "rows/train.bin"
    content = bytearray(path.read_bytes())
    if change == "a byte":
        content[17] ^= 1
        path.write_bytes(content)
    elif change == "another file":
        other = path.with_name("other")
        content[17] ^= 1
        other.write_bytes(content)
        about = path.stat()
        os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
        other.replace(path)
    elif change == "no note":
        (published.parent / manifest.PUBLISHED).unlink()
    else:
        path.unlink()
        path.write_bytes(content)
    artifact = read_artifact(published, "rows").for_part(7)
    if change in ("a byte", "another file"):
        with pytest.raises(SnaketuneError, match="is damaged"):
            artifact.file("train.bin")
    else:
        artifact.file("train.bin")
    assert sum(digested) == 5000


def test_another_name_for_a_file_is_no_change(published, digested):
    path = published.parent / "rows/train.bin"
    os.link(path, path.with_name("again"))
    read_artifact(published, "rows").for_part(2).file("train.bin")
    assert not digested
