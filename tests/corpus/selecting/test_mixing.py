"""Caps and weights of sources, by hashes of their rows."""

import json

import pytest

from snaketune.corpus.assembly import build
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import CorpusSpec
from snaketune.tables import read_table


def test_a_cap_takes_the_same_rows_whatever_else_is_there(make, chat):
    rows = [chat(f"q{i}") for i in range(3000)]
    hundred = make(rows, source={"max_rows": 100})
    assert hundred.counts["dropped"] == {"duplicate": 0, "over_cap": 2900}
    assert len(hundred.train) == 100
    numbers = [int(prompt[1:]) for prompt in hundred.prompts()]
    assert numbers == sorted(numbers) and max(numbers) > 2500
    assert set(make(rows[::-1], source={"max_rows": 100}).prompts()) == set(hundred.prompts())
    assert set(make(rows, source={"max_rows": 150}).prompts()) > set(hundred.prompts())
    assert make(rows[:50], source={"max_rows": 100}).counts["kept"]["train"] == 50


def test_a_cap_counts_neither_duplicates_nor_other_sources(tmp_path, chat):
    for name, rows in {"a": ["x"] * 5 + ["y", "z"], "b": ["u", "v", "w"]}.items():
        (tmp_path / name).write_text("".join(json.dumps(chat(row)) + "\n" for row in rows))
    sources = [{"files": ["a.jsonl"], "max_rows": 3}, {"files": ["b.jsonl"], "max_rows": 1}]
    spec = CorpusSpec(kind="conversations", sources=sources, held_out=0.0)
    work = WorkFolder(tmp_path / "work")
    work.start()
    outcome = build(spec, work, files=[tmp_path / "a", tmp_path / "b"], against=[], against_files=[])
    assert [(source["kept"], source["dropped"]) for source in outcome.counts["sources"]] == [
        (3, {"duplicate": 4}),
        (1, {"duplicate": 0, "over_cap": 2}),
    ]


def test_a_row_that_a_cap_leaves_out_is_taken_from_another_source(tmp_path, chat):
    """A cap chose three of six rows; the other sources have all of them, one has all twice, one has a cap of its own."""
    rows = "".join(json.dumps(chat(f"q{number}")) + "\n" for number in range(6))

    def kept(*sources: dict, held_out: float = 0.0) -> list[tuple[int, dict[str, int]]]:
        for number, source in enumerate(sources):
            (tmp_path / f"{number}.jsonl").write_text(rows * source.pop("times", 1))
        files = [tmp_path / f"{number}.jsonl" for number in range(len(sources))]
        listed = [{"files": [file.name]} | source for file, source in zip(files, sources)]
        spec = CorpusSpec(kind="conversations", sources=listed, held_out=held_out)
        work = WorkFolder(tmp_path / f"work-{len(list(tmp_path.glob('work-*')))}")
        work.start()
        outcome = build(spec, work, files=files, against=[], against_files=[])
        table = (
            read_table(work.payload / "train-00000.arrow").to_pylist()
            + read_table(work.payload / "held_out-00000.arrow").to_pylist()
        )
        assert len({row["id"] for row in table}) == len(table)
        return [(source["kept"], source["dropped"]) for source in outcome.counts["sources"]]

    assert kept({"max_rows": 3}, {"times": 2}, {}) == [
        (3, {"duplicate": 0, "over_cap": 3}),
        (3, {"duplicate": 9}),
        (0, {"duplicate": 6}),
    ]
    capped = kept({"max_rows": 3}, {"max_rows": 1}, {})
    assert [number for number, _ in capped] == [3, 1, 2]
    assert sum(number for number, _ in kept({"max_rows": 3}, {}, held_out=0.5)) == 6


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.5, 2, 3.25])
def test_a_weight_is_the_mean_number_of_copies(make, chat, weight):
    rows = [chat(f"q{i}") for i in range(4000)]
    built = make(rows, source={"weight": weight}, held_out=0.25)
    once = make(rows, held_out=0.25)
    assert built.held_out == once.held_out
    assert len(built.train) == pytest.approx(weight * len(once.train), rel=0.08)
    prompts = built.prompts()
    copies = {prompts.count(prompt) for prompt in set(prompts[:200])}
    assert copies <= {int(weight), int(weight) + 1}
    if weight < 1:
        assert built.counts["dropped"]["under_weight"] == len(once.train) - len(built.train)
        assert built.counts["repeated"] == 0
    else:
        assert built.counts["repeated"] == len(built.train) - len(once.train)


def test_repeated_rows_have_ids_of_their_own(make, chat):
    built = make([chat("a"), chat("b")], source={"weight": 3})
    ids = [row["id"] for row in built.train]
    first, second = ids[0], ids[3]
    assert ids == [first, f"{first}-2", f"{first}-3", second, f"{second}-2", f"{second}-3"]
    assert built.prompts() == ["a"] * 3 + ["b"] * 3
    assert built.counts["repeated"] == 4 and built.counts["kept"]["train"] == 6


def test_a_larger_weight_keeps_what_a_smaller_one_kept(make, chat):
    rows = [chat(f"q{i}") for i in range(1000)]
    less, more = (set(make(rows, source={"weight": weight}).prompts()) for weight in (0.3, 0.6))
    assert less < more


def test_a_weight_selects_independently_of_a_cap(make, chat):
    rows = [chat(f"q{i}") for i in range(4000)]
    built = make(rows, source={"weight": 0.5, "max_rows": 1000})
    assert built.counts["kept"]["train"] == pytest.approx(500, rel=0.1)


def test_batches_are_full_whatever_was_dropped(make, chat):
    """The same rows give the same bytes, whether or not dropped rows were between them."""
    rows = [chat(f"q{i}", task=("t" if i % 3 else None)) for i in range(5000)]
    some = make([row for i, row in enumerate(rows) for row in [row] * (1 + i % 2)], held_out=0.3)
    plain = make(rows, held_out=0.3)
    for name in ("train-00000.arrow", "held_out-00000.arrow"):
        assert (some.folder / name).read_bytes() == (plain.folder / name).read_bytes()
    batches = [batch.num_rows for batch in read_table(some.folder / "train-00000.arrow").to_batches()]
    assert set(batches[:-1]) == {1024}
