"""Kept rows are found by any job; damaged ones, and those of other keys, never."""

import hashlib
import threading

import pytest

from snaketune.stages.cache.row_store import RowStore

ROWS = {hashlib.md5(bytes([n])).digest(): b"value %d" % n * (n % 3 + 1) for n in range(50)}


def some(first: int, stop: int) -> dict[bytes, bytes]:
    return dict(list(ROWS.items())[first:stop])


def test_rows_of_all_files_are_found_also_after_they_were_merged(tmp_path):
    store = RowStore(tmp_path, {"weights": "a"})
    assert store.find(ROWS) == {}
    store.add(some(0, 20))
    store.add(some(10, 40))
    store.add({})
    again = RowStore(tmp_path, {"weights": "a"})
    assert again.find(ROWS) == some(0, 40)
    store.merge()
    assert len(list(tmp_path.rglob("*.arrow"))) == 1
    assert again.find(ROWS) == some(0, 40)
    assert RowStore(tmp_path, {"weights": "b"}).find(ROWS) == {}


def test_what_is_missing_is_computed_once_and_kept_also_after_an_error(tmp_path, capsys):
    digests, asked = list(ROWS)[:4], []

    def compute(missing: list[bytes], most: int = 9):
        for digest in missing[:most]:
            asked.append(digest)
            yield {digest: [digest.hex(), 0.1]}
        if most < len(missing):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RowStore(tmp_path, {}).completed(digests, lambda missing: compute(missing, 3), "scores")
    assert len(list(tmp_path.rglob("*.arrow"))) == 1
    found, missing = RowStore(tmp_path, {}).completed(digests * 2, compute, "scores")
    assert found == {digest: [digest.hex(), 0.1] for digest in digests} and missing == digests[3:] and asked == digests
    assert "3 of 4 scores are cached" in capsys.readouterr().out
    # Without missing rows, nothing is prepared to compute them.
    assert RowStore(tmp_path, {}).completed(digests, lambda missing: 1 / 0, "scores") == (found, [])


def test_a_row_that_begins_like_a_kept_one_is_another(tmp_path):
    store, (one, value) = RowStore(tmp_path, {}), next(iter(ROWS.items()))
    store.add({one: value})
    assert store.find([one[:8] + bytes(8)]) == {}


def test_any_flipped_bit_costs_at_most_rows_and_never_gives_another_value(tmp_path, capfd):
    store = RowStore(tmp_path, {})
    for at in range(0, 4000, 37):
        store.add(ROWS)
        (path,) = tmp_path.rglob("*.arrow")
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 1 << at % 8
        path.write_bytes(content)
        found = RowStore(tmp_path, {}).find(ROWS)
        assert found.items() <= ROWS.items()
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("damage", [b"", b"ARROW1"])
def test_an_unreadable_file_is_removed(tmp_path, capsys, damage):
    store = RowStore(tmp_path, {})
    store.add(some(0, 5))
    next(tmp_path.rglob("*.arrow")).write_bytes(damage)
    store.add(some(5, 9))
    assert store.find(ROWS) == some(5, 9)
    assert "is damaged and is removed" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.arrow"))) == 1


def test_concurrent_jobs_add_merge_and_find(tmp_path):
    stores = [RowStore(tmp_path, {}) for _ in range(6)]

    def work(number: int) -> None:
        for first in range(0, 50, 10):
            stores[number].add(some(first, first + 10))
            assert stores[number].find(ROWS).items() <= ROWS.items()
        stores[number].merge()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert RowStore(tmp_path, {}).find(ROWS) == ROWS
