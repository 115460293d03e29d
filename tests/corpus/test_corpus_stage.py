"""The whole stage: every row is counted, duplicates and splits, limits, and the same bytes from the same rows."""

import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.assembly import build
from snaketune.corpus.rows import SCHEMAS
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import CorpusSpec
from snaketune.tables import read_table
from tests.corpus.flow_of_rows import balances


def prompts(rows):
    return {row["messages"][0]["content"] for row in rows}


def test_rows_are_canonical_and_in_order(make, chat):
    built = make([chat(f"q{i}", f"a{i}", task="t") for i in range(2000)], held_out=0.5)
    assert len(built.train) + len(built.held_out) == 2000
    for rows in (built.train, built.held_out):
        numbers = [int(row["messages"][0]["content"][1:]) for row in rows]
        assert numbers == sorted(numbers)
    assert built.train[0].keys() == {"id", "messages", "tools", "answer", "task", "source"}
    assert built.counts["notes"] == {} and built.quarantine == []


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_both_files_are_there_with_the_schema_even_when_empty(make, chat, kind, share):
    rows = {
        "conversations": chat(),
        "preferences": {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        "unpaired": {"prompt": "Hi", "completion": "a", "label": True},
        "text": {"text": "a"},
    }
    built = make([rows[kind]], kind=kind, held_out=share)
    tables = {name: read_table(built.folder / f"{name}-00000.arrow") for name in ("train", "held_out")}
    assert all(table.schema == SCHEMAS[kind] for table in tables.values())
    assert {name: table.num_rows for name, table in tables.items()} == {"train": 1 - share, "held_out": share}


def test_quarantine_records_file_location_and_reason(make, chat):
    built = make(
        [chat("a"), {"messages": [{"role": "user", "content": "x" * 500}]}],
        b'\xff\n\n{"messages": "\\ud83d"}\n' + json.dumps(chat("b")).encode(),
        max_quarantined_fraction=1.0,
    )
    assert [(bad["file"], bad["line"], bad["reason"]) for bad in built.quarantine] == [
        ("data/0.jsonl", 2, "no_assistant_turn"),
        ("data/1.jsonl", 1, "not_utf8"),
        ("data/1.jsonl", 3, "wrong_type"),
    ]
    assert built.quarantine[0]["excerpt"].startswith('{"messages": [{"role": "user", "content": "xxx')
    assert max(len(bad["excerpt"]) for bad in built.quarantine) <= 201
    assert built.counts["quarantined"] == {"total": 3, "no_assistant_turn": 1, "not_utf8": 1, "wrong_type": 1}
    assert built.counts["sources"] == [
        {"files": ["data/0.jsonl", "data/1.jsonl"], "read": 5, "extra": 0, "joined": 0, "quarantined": 3}
        | {
            "dropped": {"duplicate": 0},
            "repeated": 0,
            "kept": 2,
            "layouts": {"messages": 2},
            "ignored": {},
            "marked": {},
        }
    ]


def test_rows_of_an_array_are_counted_as_rows(make, chat):
    built = make(json.dumps([chat(), {}]).encode(), suffix=".json", max_quarantined_fraction=1.0)
    assert [(bad["row"], "line" in bad) for bad in built.quarantine] == [(2, False)]


def test_too_many_bad_rows(make, chat, capsys):
    rows = [chat(str(i)) for i in range(80)] + [{"n": i} for i in range(15)] + [chat("x", "")] * 5
    with pytest.raises(SnaketuneError) as error:
        make(rows, max_quarantined_fraction=0.19)
    for part in (
        "20 of 100 rows (20.00%)",
        "19.00%",
        "15 × missing_column, for instance data/0.jsonl:81: no column messages, or it is null; the row has n",
    ):
        assert part in str(error.value)
    assert "5 × empty_turn, for instance data/0.jsonl:96" in str(error.value)
    assert "max_quarantined_fraction" in str(error.value)
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 10
    assert json.loads(output[0].removeprefix("quarantined: "))["line"] == 81
    assert make(rows, max_quarantined_fraction=0.2).counts["quarantined"]["total"] == 20


def test_no_row_left(make):
    with pytest.raises(SnaketuneError, match=r"data/0.jsonl: no layout for kind conversations reads these columns: n"):
        make([{"n": 1}, {"n": 2}], max_quarantined_fraction=1.0)


def test_duplicates_across_files_and_layouts_keep_the_first(make, chat):
    built = make(
        [chat("a", "1", task="first"), chat("b", "1")],
        [{"prompt": "a", "response": "1", "task": "second"}],
        [chat("a", "2"), chat("b", "1")],
    )
    assert [(row["messages"][1]["content"], row["task"]) for row in built.train] == [
        ("1", "first"),
        ("1", None),
        ("2", None),
    ]
    assert built.counts["dropped"] == {"duplicate": 2}
    assert built.counts["notes"] == {"same_prompt": 1}


def test_one_prompt_is_on_one_side_in_every_corpus(make, chat):
    texts = [f"question {i}" for i in range(200)]
    first = make([chat(text, reply) for reply in "ab" for text in texts], held_out=0.3)
    reordered = make([chat(text, "c") for text in texts[::-3]], held_out=0.3)
    pairs = make([{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts], kind="preferences", held_out=0.3)
    held = prompts(first.held_out)
    assert 30 < len(held) < 90 and not held & prompts(first.train)
    assert {row["prompt"][0]["content"] for row in pairs.held_out} == held
    assert prompts(reordered.held_out) == held & set(texts[::-3])
    assert prompts(make([chat(text) for text in texts], held_out=0.3, split_seed=1).held_out) != held


def test_same_rows_same_bytes(make, chat):
    """Two sources with the same rows, in another format, layout and location, give the same tables."""
    rows = [(f"q{i}", f"Größe {i}\r\n") for i in range(1500)]
    one = make([chat(*row) for row in rows], held_out=0.2)
    two = make(
        json.dumps([{"instruction": prompt, "output": reply} for prompt, reply in rows[:700]], indent=1).encode(),
        json.dumps([{"question": prompt, "answer": reply} for prompt, reply in rows[700:]]).encode(),
        suffix=".json",
        held_out=0.2,
    )
    again = make([chat(*row) for row in rows], held_out=0.2)
    for name in ("train-00000.arrow", "held_out-00000.arrow"):
        content = (one.folder / name).read_bytes()
        assert content == (two.folder / name).read_bytes() == (again.folder / name).read_bytes()
    assert one.counts == again.counts


def test_answer_pattern(make, chat):
    built = make(
        [
            chat("a", "so\n####  72 "),
            chat("b", "no mark"),
            chat("c", "x #### 3", answer="4"),
            chat("d", "#### "),
            {"messages": [*chat("e", "#### 1")["messages"], *chat("f", "last")["messages"]]},
        ],
        answer_pattern=r"####(.*)",
    )
    assert [row["answer"] for row in built.train] == ["72", None, "4", None, None]
    assert built.counts["notes"] == {"no_answer": 3}


def test_answer_pattern_reads_the_chosen_completion(make):
    built = make([{"prompt": "q", "chosen": "= 1", "rejected": "= 2"}], kind="preferences", answer_pattern="= (.)")
    assert [row["answer"] for row in built.train] == ["1"]


def test_several_sources(make, chat, tmp_path):
    svamp = [{"Body": "A.", "Question": "B?", "Answer": 5.0}]
    (tmp_path / "svamp.json").write_text(json.dumps(svamp))
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat()))
    corpus = CorpusSpec(
        kind="conversations",
        sources=[
            {"files": ["chat.jsonl"]},
            {
                "files": ["svamp.json"],
                "fields": {"prompt": "{Body} {Question}", "response": "Answer", "answer": "Answer"},
            },
        ],
        held_out=0.0,
    )
    work = WorkFolder(tmp_path / "work")
    work.start()
    inputs = {"against": [], "against_files": []}
    outcome = build(corpus, work, files=[tmp_path / "chat.jsonl", tmp_path / "svamp.json"], **inputs)
    rows = read_table(work.payload / "train-00000.arrow").to_pylist()
    assert [(row["messages"][0]["content"], row["answer"]) for row in rows] == [("Hi", None), ("A. B?", "5")]
    assert [source["layouts"] for source in outcome.counts["sources"]] == [{"messages": 1}, {"prompt-response": 1}]
    assert outcome.records == ("quarantine.jsonl",)
    assert balances(outcome.counts)
    with pytest.raises(SnaketuneError, match="name 2 files, --files has 1"):
        build(corpus, work, files=[tmp_path / "chat.jsonl"], **inputs)


def test_preferences_record_their_source(tmp_path):
    first = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(3)]
    # The second one is a duplicate; a weight doubles the others.
    second = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in (7, 1, 8)]
    for name, rows in (("first", first), ("second", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    sources = [{"files": ["first.json"]}, {"files": ["second.json"], "weight": 2}]
    spec = CorpusSpec(kind="preferences", sources=sources, held_out=0.0)
    work = WorkFolder(tmp_path / "work")
    work.start()
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    build(spec, work, files=files, against=[], against_files=[])
    rows = read_table(work.payload / "train-00000.arrow").to_pylist()
    assert [(row["prompt"][0]["content"], row["source"]) for row in rows] == [
        ("q0", 0), ("q1", 0), ("q2", 0), ("q7", 1), ("q7", 1), ("q8", 1), ("q8", 1)
    ]  # fmt: skip


def message(role, text, *replies, rank=None):
    return {"role": role, "text": text, "replies": list(replies), "rank": rank, "lang": "en"}


def test_a_raw_row_that_makes_several_rows(make):
    tree = message("prompter", "q", *(message("assistant", f"a{rank}", rank=rank) for rank in range(3)))
    built = make([{"message_tree_id": "t", "prompt": tree}], kind="preferences")
    assert built.counts["read"] == 1 and built.counts["extra"] > 0
    assert built.counts["kept"]["train"] == 1 + built.counts["extra"]


def test_raw_rows_that_make_one_row(make):
    rows = [
        {"message_id": "1", "parent_id": None, "message_tree_id": "1", "role": "prompter", "text": "q"},
        {"message_id": "2", "parent_id": "1", "message_tree_id": "1", "role": "assistant", "text": "a"},
    ]
    built = make(rows)
    assert (built.counts["read"], built.counts["joined"], built.counts["kept"]["train"]) == (2, 1, 1)


def test_numbers_that_rows_are_ordered_by(make, chat):
    """Of JSON and of CSV, for each copy of a row, in both splits; rows without one are quarantined."""
    rows = [chat(f"q{number}", difficulty=number / 2) for number in range(6)]
    bad = [chat("a"), chat("b", difficulty="hard"), chat("c", difficulty=None), chat("d", difficulty=10**400)]
    settings = {"order_column": "difficulty", "max_quarantined_fraction": 0.5, "source": {"weight": 2}}
    built = make(rows + bad, held_out=0.5, **settings)
    for split in ("train", "held_out"):
        numbers = read_table(built.folder / f"{split}-order.arrow")["order"].to_pylist()
        assert numbers == [int(prompt[1:]) / 2 for prompt in built.prompts(split)]
    assert [source["ignored"] for source in built.counts["sources"]] == [{}]
    assert {one["reason"] for one in built.quarantine} == {"missing_column", "wrong_type"}
    assert "expected a number, by which rows are ordered" in built.quarantine[1]["detail"]
    table = make(b"prompt,response,difficulty\nHi,Hello,2.5\nBye,Bye,1e1\n", suffix=".csv", order_column="difficulty")
    assert read_table(table.folder / "train-order.arrow")["order"].to_pylist() == [2.5, 10.0]


def test_rows_are_counted_by_length(make, chat):
    built = make([chat("a" * n, "b") for n in (1, 2, 3, 6, 7, 100)])
    assert built.counts["characters"] == {"bounds": [1, 2, 4, 8, 16, 32, 64, 128], "rows": [0, 0, 2, 2, 1, 0, 0, 1]}


@pytest.mark.parametrize("column", ["prompt", "response", "answer", "task"])
def test_lone_surrogates_are_malformed(make, column):
    sound = {"prompt": "p", "response": "r", "answer": "a", "task": "t"}
    rows = [sound, sound | {column: "x\ud83d"}]
    built = make("\n".join(map(json.dumps, rows)).encode(), max_quarantined_fraction=0.5)
    assert len(built.quarantine) == 1 and built.quarantine[0]["line"] == 2 and len(built.train) == 1


def test_an_interrupted_scan_restarts(make, chat):
    rows = [chat(f"q {i} of many more that are asked", f"a{i}") for i in range(2500)]
    steps = {"near_duplicates": {"threshold": 0.9}, "decontamination": {}, "held_out": 0.2}
    once = make(rows, **steps)
    work = WorkFolder(once.folder.parent)
    files = [path for path in work.state.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        path.write_bytes(path.read_bytes()[:100] + b"what a killed attempt left")
    expected = {path.name: path.read_bytes() for path in once.folder.iterdir()}
    work.start()
    spec = CorpusSpec(kind="conversations", sources=[{"files": ["data/0.jsonl"]}], **steps)
    outcome = build(spec, work, files=[work.folder.parent / "0.jsonl"], against=[], against_files=[])
    assert outcome == once.outcome
    assert {path.name: path.read_bytes() for path in work.payload.iterdir()} == expected


def test_memory_grows_by_bytes_per_row(make, chat):
    """No set, list or dict holds the rows: what grows with their number are arrays."""
    exam = make(
        [chat("An evaluation that has to do with none of these rows, as far as anybody can tell")], held_out=1.0
    )
    steps = {"near_duplicates": {}, "decontamination": {}, "against": [exam.artifact("exam")], "held_out": 0.1}
    peaks = {}
    make([chat()], **steps)
    for rows in (2_048, 8_192):
        lines = "\n".join(f'{{"prompt": "question {i}", "response": "answer {i}"}}' for i in range(rows)).encode()
        tracemalloc.start()
        make(lines, **steps)
        peaks[rows] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (peaks[8_192] - peaks[2_048]) / 6_144 < 60


TEXTS = st.sampled_from(["a", "b", "", " ", "\ud83d", "\0", "Human: a\n\nAssistant: b"]) | st.text(max_size=5)
VALUES = (
    TEXTS
    | st.none()
    | st.integers()
    | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), TEXTS), max_size=2)
)
COLUMNS = ["prompt", "response", "chosen", "rejected", "label", "messages", "task", "tools", "text"]
ROWS = st.dictionaries(st.sampled_from(COLUMNS), VALUES)
LAYOUT_OF = {"conversations": "prompt-response", "preferences": "pairs", "unpaired": "unpaired", "text": "text"}
LINES = ROWS.map(json.dumps).map(str.encode) | st.binary(max_size=20) | st.sampled_from([b"[", b"{", b"null", b"[1]"])


@given(st.lists(LINES, max_size=12), st.sampled_from(list(SCHEMAS)), st.floats(0, 1))
@settings(deadline=None, max_examples=150)
def test_every_row_is_counted(lines, kind, held_out):
    # A first line that is surely a line: what the rest of the file is then can't be in question.
    content = (
        b'{"prompt": "x", "response": "y", "text": "z"}\n{"prompt": "x", "chosen": "y", "rejected": "z"}\n'
        b'{"prompt": "x", "response": "y", "label": 1}\n' + b"\n".join(lines)
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        work = WorkFolder(Path(folder) / "work")
        work.start()
        corpus = CorpusSpec(
            kind=kind,
            sources=[{"files": [str(path)], "layout": LAYOUT_OF[kind]}],
            held_out=held_out,
            max_quarantined_fraction=1.0,
        )
        counts = build(corpus, work, files=[path], against=[], against_files=[]).counts
        assert balances(counts)
        assert counts["read"] == sum(1 for line in content.split(b"\n") if line and not line.isspace())
        for split, expected in counts["kept"].items():
            assert read_table(work.payload / f"{split}-00000.arrow").num_rows == expected
        # Lines as JSONL has them: a text may hold other characters that splitlines() would cut at.
        with (work.payload / "quarantine.jsonl").open("rb") as file:
            bad = [json.loads(line) for line in file]
        assert len(bad) == counts["quarantined"]["total"]
