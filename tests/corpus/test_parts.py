"""A corpus that is read in parts: the same bytes, counts and records as in one job, whatever is cut where."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from snaketune.config.corpora import Corpus
from snaketune.config.corpus_sources import Source
from snaketune.corpus import last_pass
from snaketune.corpus.layouts.canonical import FileChecks
from snaketune.corpus.reading.ranges import LineSpan, Range
from snaketune.corpus.rows import Malformed
from snaketune.corpus.selecting import scanned_parts
from snaketune.corpus.selecting.row_store import ROWS_PER_BATCH
from snaketune.errors import SnaketuneError
from snaketune.stages.plan import corpus_parts
from snaketune.stages.plan.corpus_parts import cut
from tests.corpus.parts import built_in_parts, built_whole, read_part

WORDS = [f"word{number}" for number in range(500)]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(corpus_parts, "BYTES_PER_RANGE", 1000)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Files by name: duplicates within and across them, near duplicates, malformed and blank lines."""
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)
    paths, rows = {}, []
    for name, count in (("a.jsonl", 1500), ("b.jsonl", 900), ("c.jsonl", 700)):
        lines = []
        for number in range(count):
            chance = rng.random()
            row = rng.choice(rows) if rows and chance < 0.06 else _row(rng)
            if 0.06 <= chance < 0.1:
                row = json.loads(json.dumps(row))
                row["messages"][0]["content"] += " more"
            rows.append(row)
            lines += [json.dumps(row), *(["{broken"] if number % 97 == 5 else []), *([""] if number % 61 == 7 else [])]
        paths[name] = folder / name
        paths[name].write_text("\n".join(lines) + "\n")
    paths["c.parquet"] = folder / "c.parquet"
    parquet.write_table(pa.Table.from_pylist(rows[-700:]), paths["c.parquet"], row_group_size=90)
    paths["d.json"] = folder / "d.json"
    paths["d.json"].write_text(json.dumps([_row(rng) for _ in range(50)], indent=1))
    return {name: str(path) for name, path in paths.items()}


def _row(rng: random.Random) -> dict[str, Any]:
    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    turns = [{"role": "user", "content": text(rng.randint(5, 20))}]
    if rng.random() > 0.01:
        turns.append({"role": "assistant", "content": text(rng.randint(3, 40))})
    return {"messages": turns, "level": rng.random(), "lang": rng.choice(["en", "de"])}


CASES = {
    "plain": {"sources": [["a.jsonl"]]},
    "several files": {"sources": [["a.jsonl", "b.jsonl"], ["d.json"], ["c.parquet"]], "order_column": "level"},
    "caps and weights": {
        "sources": [
            (["a.jsonl"], {"weight": 2.5}),
            (["b.jsonl"], {"max_rows": 200}),
            (["c.jsonl"], {"weight": 0.3}),
            (["a.jsonl"], {"max_rows": 50}),
        ]
    },
    "where": {"sources": [(["a.jsonl"], {"where": ["level >= 0.5"]})]},
    "near duplicates": {"sources": [["a.jsonl"], ["b.jsonl"]], "near_duplicates": {"threshold": 0.7, "shingle": 3}},
    "all": {
        "sources": [(["a.jsonl"], {"max_rows": 900}), (["b.jsonl"], {"weight": 2}), ["c.parquet"]],
        "near_duplicates": {"drop": False},
        "decontamination": {"ngram": 4},
        "cleaning": {"min_characters": 60},
    },
}


def _spec(files: dict[str, str], case: dict[str, Any]) -> dict[str, Any]:
    named = [source if isinstance(source, tuple) else (source, {}) for source in case["sources"]]
    sources = [{"files": [files[name] for name in names], **keys} for names, keys in named]
    return {"kind": "conversations", "held_out": 0.1, "max_quarantined_fraction": 0.1} | case | {"sources": sources}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_number_of_parts_gives_the_same_bytes(files, tmp_path, monkeypatch, case):
    spec = _spec(files, case)
    # Several files of the result; and decisions about a share of the rows at once.
    monkeypatch.setattr(last_pass, "ROWS_PER_FILE", ROWS_PER_BATCH)
    whole, outcome = built_whole(spec, tmp_path)
    assert len(whole) > 2 and sum(outcome.counts["kept"].values()) > 400
    for parts in (2, 7):
        monkeypatch.setattr(scanned_parts, "ROWS_AT_ONCE", 1000 if parts == 7 else 2**24)
        made, of_parts = built_in_parts(spec, parts, tmp_path / str(parts))
        assert made == whole
        assert of_parts == outcome


def test_a_batch_has_the_same_bytes_wherever_its_rows_were_read(tmp_path):
    """A slice of a buffer is written with some of the bytes that follow it: those of other rows, or none."""
    rows = [_chat(number, answer=str(number**2)) for number in range(5000)]
    spec = _written(tmp_path, rows)
    whole, _ = built_whole(spec, tmp_path)
    for parts in (2, 3, 5):
        assert built_in_parts(spec, parts, tmp_path / str(parts))[0] == whole


def test_only_the_part_of_a_changed_file_reads_again(files, tmp_path):
    """A part's spec has nothing of which rows are used, nor of other parts' files."""
    spec = _spec(files, CASES["several files"])
    parts = cut(Corpus(**spec, parts=4))
    used = spec | {"held_out": 0.5, "max_quarantined_fraction": 0.2}
    used["sources"] = [source | {"weight": 3.0, "max_rows": 7} for source in spec["sources"]]
    changed = cut(Corpus(**used, parts=4))
    first, second = (
        read_part(*of, tmp_path / name) for name, of in (("a", (spec, parts[1])), ("b", (used, changed[1])))
    )
    assert first.manifest["payload"] == second.manifest["payload"]
    named = [{file for source in part.sources for file in source.files} for part in parts]
    assert len(named) == 4 and not named[0] & named[-1]


def test_what_is_cut(files):
    """Large files of lines or row groups are; ranges of one file in a part are one; others go whole to a part."""
    spec = _spec(files, CASES["several files"])
    parts = cut(Corpus(**spec, parts=3))
    assert len(parts) == 3 and [part.numbers[0] for part in parts] == sorted(part.numbers[0] for part in parts)
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for part in parts:
        names = [Path(file).name for source in part.sources for file in source.files]
        for name, range_ in zip(names, part.ranges, strict=True):
            ranges.setdefault(name, []).append(range_)
    assert ranges["d.json"] == [(1, 1, 1)]
    for of_file in ranges.values():
        # Together they have each piece once.
        pieces = [piece for first, last, _ in of_file for piece in range(first, last + 1)]
        assert pieces == list(range(1, of_file[0][2] + 1))
    assert len(cut(Corpus(**spec, parts=1))) == 1 == len(cut(Corpus(**spec)))


def test_a_small_file_is_one_part(files, monkeypatch):
    monkeypatch.setattr(corpus_parts, "BYTES_PER_RANGE", 16_000_000)
    assert len(cut(Corpus(**_spec(files, CASES["plain"]), parts=5))) == 1


@pytest.mark.parametrize("content", [b"", b"a", b"a\nbc\n\nd", b"long line\n" * 5 + b"x"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 20])
def test_each_line_is_in_one_range(content, pieces):
    read = []
    for piece in range(1, pieces + 1):
        span = LineSpan(*Range(piece, piece, pieces).of(len(content)))
        lines = list(span.lines(io.BytesIO(content)))
        assert span.count == len(lines)
        read += lines
    assert read == io.BytesIO(content).readlines()


def _written(tmp_path: Path, rows: list[Any], name: str = "x.jsonl") -> dict[str, Any]:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "conversations", "held_out": 0.0, "sources": [{"files": [str(path)]}]}


def _chat(number: int, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"question {number} " + "x" * 40}, {"role": "assistant", "content": "yes"}]
    return {"messages": turns, **more}


def test_a_condition_may_hold_in_one_range_only(tmp_path):
    rows = [_chat(number, **({"good": True} if number > 290 else {})) for number in range(300)]
    spec = _written(tmp_path, rows)
    spec["sources"][0]["where"] = "good == true"
    assert built_in_parts(spec, 3, tmp_path / "p")[1].counts["kept"]["train"] == 9
    spec["sources"][0]["where"] = "bad == true"
    with pytest.raises(SnaketuneError, match=r"x\.jsonl: no row has the column 'bad'"):
        built_in_parts(spec, 3, tmp_path / "q")


def test_few_texts_in_a_range_may_be_categories_of_the_file(tmp_path):
    """Each range has its own two; with a text per row they are in question in the file as a whole."""
    rows = [_chat(number, note=f"note of {number // 100}") for number in range(300)]
    made, _ = built_in_parts(_written(tmp_path, rows), 3, tmp_path / "p")
    assert made == built_whole(_written(tmp_path, rows), tmp_path)[0]
    apart = [_chat(number, note=f"note of {number}" if number % 20 == 0 else None) for number in range(300)]
    spec = _written(tmp_path, apart, "y.jsonl")
    for build in (lambda: built_whole(spec, tmp_path / "w"), lambda: built_in_parts(spec, 3, tmp_path / "r")):
        with pytest.raises(SnaketuneError, match=r"note: .*15 different texts in 15 rows"):
            build()


def test_a_column_that_only_one_range_has_is_read(tmp_path):
    rows = [_chat(number, **({"answer": "1"} if number < 100 else {})) for number in range(300)]
    spec = _written(tmp_path, rows)
    made, _ = built_in_parts(spec, 3, tmp_path / "p")
    assert made == built_whole(spec, tmp_path)[0]


def test_a_key_that_ranges_read_from_other_columns_stops():
    checks = FileChecks(Source(files=("x",)))
    state = {"absent": [], "clues": []}
    checks.merge(state | {"bound": {"tools": ["tools"]}})
    checks.merge(state | {"bound": {"tools": ["tools"], "answer": ["solution"]}})
    with pytest.raises(Malformed, match="tools is read from tools, and in a later part from functions"):
        checks.merge(state | {"bound": {"tools": ["functions"]}})


def test_many_ignored_keys_are_counted_alike(tmp_path):
    rows = [_chat(number, **{f"id{number}": 1}) for number in range(700)]
    spec = _written(tmp_path, rows)
    _, whole = built_whole(spec, tmp_path)
    _, of_parts = built_in_parts(spec, 5, tmp_path / "p")
    assert whole == of_parts
    ignored = whole.counts["sources"][0]["ignored"]
    assert len(ignored) == 201 and ignored["…"] == 500


def test_what_cannot_be_cut_is_read_whole_by_the_first_range(tmp_path):
    """Compressed although its name says lines; a tree of messages, whose rows are joined."""
    import gzip

    spec = _written(tmp_path, [_chat(number) for number in range(300)])
    path = Path(spec["sources"][0]["files"][0])
    path.write_bytes(gzip.compress(path.read_bytes(), 0))
    made, _ = built_in_parts(spec, 3, tmp_path / "p")
    assert made == built_whole(spec, tmp_path)[0]
    tree = []
    for number in range(100):
        tree.append(
            {"message_id": f"a{number}", "parent_id": None, "role": "prompter", "text": f"q {number}" + "x" * 90}
        )
        tree.append({"message_id": f"b{number}", "parent_id": f"a{number}", "role": "assistant", "text": "yes"})
    spec = _written(tmp_path, tree, "tree.jsonl")
    made, outcome = built_in_parts(spec, 3, tmp_path / "t")
    assert made == built_whole(spec, tmp_path / "u")[0] and outcome.counts["kept"]["train"] == 100


def test_too_many_malformed_rows_in_all_parts_stop(tmp_path):
    spec = _written(tmp_path, [_chat(number) if number % 30 else {"n": 1} for number in range(900)])
    with pytest.raises(SnaketuneError, match=r"30 of 900 rows .* malformed") as error:
        built_in_parts(spec, 3, tmp_path / "p")
    assert "x.jsonl:1:" in str(error.value)
    saved = [json.loads(line) for line in (tmp_path / "p/decide/quarantine.jsonl").read_text().splitlines()]
    assert [record["line"] for record in saved] == list(range(1, 900, 30))
