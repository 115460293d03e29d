"""Reading rows: every row once, by one of the readers, in an order that can be resumed at any row."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.packing.epoch_order import epoch_order
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.engine.packing.shards import list_columns, row_batch, schema
from snaketune.packing import reader
from snaketune.packing.reader import open_rows


@pytest.fixture
def rows(tmp_path) -> PackedRows:
    return open_rows(written(tmp_path, {8: 10, 16: 7}), "train")


def written(folder: Path, rows: dict[int, int]) -> Artifact:
    """Write a pack of rows of several lengths in batches of four; every token of row r is r."""
    (folder / "shards").mkdir()
    first = 0
    for number, (length, count) in enumerate(rows.items()):
        path = folder / f"shards/train-{number:05d}.arrow"
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, schema(length, list_columns("sft", "3.0"))) as writer,
        ):
            for start in range(first, first + count, 4):
                numbers = np.arange(start, min(start + 4, first + count), dtype=np.int32)
                ids = np.repeat(numbers, length).reshape(-1, length)
                whole = np.full(len(numbers), length, np.int32)
                none = np.zeros(len(numbers), np.int32)
                writer.write_batch(row_batch(ids, ids, whole, np.arange(len(numbers) + 1), whole, none))
        first += count
    manifest = {"format_version": "3.0", "row_length": max(rows), "records": {}}
    return Artifact(
        folder / "manifest.json", manifest | {"payload": describe_files(folder / "shards")}, folder / "shards"
    )


def numbers(rows: PackedRows, order) -> list[int]:
    """Return the numbers in the rows that a training reads in this order."""
    items = EqualTokens(rows)
    return [int(row["input_ids"][0]) for item in order for row in items[item]]


def test_an_epoch_gives_every_row_once_to_one_of_the_readers(tmp_path):
    rows = open_rows(written(tmp_path, {8: 23}), "train")
    order = epoch_order(len(EqualTokens(rows)), seed=3, epoch=1)
    shares = [numbers(rows, order[rank::3]) for rank in range(3)]
    assert sorted(number for share in shares for number in share) == list(range(23))
    assert numbers(rows, order) == epoch_order(23, 3, 1).tolist()
    assert numbers(rows, order) != numbers(rows, epoch_order(23, 3, 2))
    assert numbers(rows, order) != numbers(rows, epoch_order(23, 4, 1))


def test_reading_resumes_at_any_row(tmp_path):
    rows = open_rows(written(tmp_path, {8: 23}), "train")
    own = epoch_order(23, seed=0, epoch=0)[1::2]
    whole = numbers(rows, own)
    for first in range(len(whole)):
        assert numbers(rows, own[first:]) == whole[first:]


def test_items_of_equal_tokens_hold_every_row_once(rows):
    items = [[int(row["input_ids"][0]) for row in item] for item in (EqualTokens(rows)[i] for i in range(12))]
    assert len(EqualTokens(rows)) == 12
    assert items == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], *([n] for n in range(10, 17))]
    assert {sum(len(row["input_ids"]) for row in EqualTokens(rows)[i]) for i in range(12)} == {16}


def test_rows_in_memory_are_the_same_rows(tmp_path):
    pack = written(tmp_path, {8: 10, 16: 7})
    mapped, loaded = open_rows(pack, "train"), open_rows(pack, "train", load_in_memory=True)
    for row in range(17):
        for name, value in mapped[row].items():
            assert value.tolist() == loaded[row][name].tolist()


MOUNTS = """rootfs / ext4 rw 0 0
C:\\134 /mnt/c 9p rw 0 0
server:/home /mnt/my\\040home nfs4 rw 0 0
tmpfs /mnt/c/ram tmpfs rw 0 0
overlay / overlay rw 0 0
""".replace("\\\\", "\\")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/data/x", "overlay"), ("/mnt/c/x", "9p"), ("/mnt/c/ram/x", "tmpfs"), ("/mnt/my home/x", "nfs4"), ("/mnt/cd", "overlay")],
)  # fmt: skip
def test_the_file_system_of_a_path_is_the_innermost_mount(tmp_path, path, kind):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS, encoding="utf-8")
    assert reader._file_system(Path(path), table)[0] == kind


def test_rows_on_slow_file_systems_are_read_into_memory_which_is_logged(tmp_path, monkeypatch, capsys):
    pack = written(tmp_path, {8: 10})
    monkeypatch.setattr(reader, "_file_system", lambda path: ("9p", "/mnt/c"))
    rows = open_rows(pack, "train", load_in_memory="auto")
    assert "/mnt/c is a 9p file system, slow to map" in capsys.readouterr().out
    assert rows[3]["input_ids"].tolist() == [3] * 8
    monkeypatch.setattr(reader, "_file_system", lambda path: ("ext4", "/"))
    assert not reader.is_slow_to_map(tmp_path)
