"""Decontamination: rows that hold an n-gram of what is evaluated on are dropped, and it is said which and why."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from snaketune.errors import SnaketuneError

RNG = random.Random(0)


def words(n):
    return " ".join(f"w{RNG.randrange(10**9)}" for _ in range(n))


@pytest.fixture
def evaluated(make, chat):
    """A corpus that is evaluated on: one question, one long answer."""
    question, answer = words(20), words(30)
    corpus = make([chat(question, answer), chat("Something that isn't held out " + words(20))], held_out=1.0)
    return question, answer, corpus


def test_a_row_that_quotes_an_evaluation_is_dropped(make, chat, evaluated):
    question, answer, corpus = evaluated
    quoted = " ".join(question.split()[3:16])
    rows = [
        chat("sound", words(40)),
        chat(f"As they say: {quoted.upper()}, don't they?", "a"),
        chat("in an answer", answer),
        chat("one word too few: " + " ".join(question.split()[3:15]), "b"),
    ]
    built = make(rows, decontamination={}, against=[corpus.artifact("exam")])
    assert built.counts["dropped"] == {"duplicate": 0, "contaminated": 2}
    assert [row["messages"][1]["content"] for row in built.train][1:] == ["b"]
    assert built.outcome.about["contamination"] == {"ngram": 13, "hits": {"exam": 2}}
    found, other = built.record("contamination")
    assert found == {
        "id": found["id"],
        "file": "data/0.jsonl",
        "line": 2,
        "evaluated": "exam",
        "evaluated_row": corpus.held_out[0]["id"],
        "ngram": quoted,
    }
    assert other["line"] == 3 and answer.startswith(other["ngram"])
    assert found["id"] not in [row["id"] for row in built.train]


def test_only_what_is_held_out_counts(make, chat):
    rows = [chat(words(30)) for _ in range(40)]
    exam = make(rows, held_out=0.5)
    built = make(
        [chat(row["messages"][0]["content"], "other") for row in rows],
        decontamination={},
        against=[exam.artifact("exam")],
    )
    assert set(built.prompts()) == set(exam.prompts())


def test_no_ngram_spans_two_turns_and_system_texts_are_not_compared(make, chat):
    question, answer, system = words(10), words(10), words(20)
    turns = chat(question, answer)["messages"]
    exam = make([{"messages": [{"role": "system", "content": system}, *turns]}], held_out=1.0)
    rows = [
        chat(f"{question} {answer}"),
        {"messages": [{"role": "system", "content": system}, *chat("a", "b")["messages"]]},
        chat(f"user said {system}"),
    ]
    built = make(rows, decontamination={}, against=[exam.artifact("exam")])
    assert built.counts["dropped"] == {"duplicate": 0}


def test_a_short_evaluation_text_counts_as_a_whole(make, chat):
    exam = make(
        [chat("What is the capital of Peru?", "It is the city of Lima."), chat("Who is it?", "Me.")], held_out=1.0
    )
    rows = [
        chat("what is the capital of peru", "Lima"),
        chat("What is the capital of Peru? And of Chile?", "Lima, Santiago"),
        chat("q", "It is the city of Lima."),
        chat("Who is it?", "You."),
    ]
    built = make(rows, decontamination={}, against=[exam.artifact("exam")])
    assert built.counts["dropped"]["contaminated"] == 1
    assert built.record("contamination")[0]["ngram"] == "what is the capital of peru"
    # With shorter n-grams, what was short is long.
    built = make(rows, decontamination={"ngram": 5}, against=[exam.artifact("exam")])
    assert [hit["line"] for hit in built.record("contamination")] == [1, 2, 3]


def test_of_evaluated_preferences_the_prompts_count(make, chat):
    prompt, chosen = words(15), words(15)
    exam = make([{"prompt": prompt, "chosen": chosen, "rejected": "no"}], kind="preferences", held_out=1.0)
    built = make([chat("x", prompt), chat("x", chosen)], decontamination={}, against=[exam.artifact("exam")])
    assert [hit["line"] for hit in built.record("contamination")] == [1]


@pytest.mark.parametrize("part", ["prompt", "chosen", "rejected"])
def test_all_of_a_preference_is_compared(make, chat, evaluated, part):
    question, _, corpus = evaluated
    rows = [
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": "r", part: question},
    ]
    built = make(rows, kind="preferences", decontamination={}, against=[corpus.artifact("exam")])
    assert [hit["line"] for hit in built.record("contamination")] == [2]


def test_task_data_in_every_format(make, chat, tmp_path):
    texts = {name: words(15) for name in ("a.jsonl", "b.json", "c.csv", "d.parquet", "e.jsonl.gz")}
    folder = tmp_path / "exam"
    folder.mkdir()
    record = {name: {"n": 1, "question": {"text": ["few words", text]}} for name, text in texts.items()}
    (folder / "a.jsonl").write_text('{"x": "y"}\n' + json.dumps(record["a.jsonl"]))
    (folder / "b.json").write_text(json.dumps([record["b.json"]]))
    (folder / "c.csv").write_text(f"n,question\n1,{texts['c.csv']}\n")
    pyarrow.parquet.write_table(pa.Table.from_pylist([record["d.parquet"]]), folder / "d.parquet")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps(record["e.jsonl.gz"]).encode()))
    rows = [chat(text) for text in texts.values()] + [chat("few words")]
    built = make(rows, decontamination={}, against_files=[folder / name for name in texts])
    assert built.outcome.about["contamination"]["hits"] == {f"exam/{name}": 1 for name in texts}
    assert {hit["evaluated"]: hit["evaluated_row"] for hit in built.record("contamination")} == {
        "exam/a.jsonl": "line 2", "exam/b.json": "row 1", "exam/c.csv": "line 2", "exam/d.parquet": "row 1",
        "exam/e.jsonl.gz": "line 1",
    }  # fmt: skip
    assert built.prompts() == ["few words"]


def test_a_row_that_hits_two_evaluations_is_dropped_once(make, chat, evaluated, tmp_path):
    question, _, corpus = evaluated
    (tmp_path / "task.jsonl").write_text(json.dumps({"question": question}))
    # A duplicate is one already, and isn't listed again.
    built = make(
        [chat("fine"), chat(question), chat(question)],
        decontamination={},
        against=[corpus.artifact("exam")],
        against_files=[tmp_path / "task.jsonl"],
    )
    assert built.counts["dropped"] == {"duplicate": 1, "contaminated": 1}
    assert built.outcome.about["contamination"]["hits"] == {"exam": 1, f"{tmp_path.name}/task.jsonl": 1}
    assert [(hit["evaluated"], hit["line"]) for hit in built.record("contamination")] == [
        ("exam", 2), (f"{tmp_path.name}/task.jsonl", 2),
    ]  # fmt: skip


def test_nothing_to_compare_with(make, chat):
    built = make([chat(words(20))], decontamination={})
    assert built.outcome.about["contamination"] == {"ngram": 13, "hits": {}}
    assert built.record("contamination") == []
    plain = make([chat(words(20))])
    assert plain.outcome.about == {} and not (plain.folder / "contamination.jsonl").exists()


def test_nothing_left(make, chat, evaluated):
    question, _, corpus = evaluated
    with pytest.raises(SnaketuneError, match=r"none of the 1 rows is left; dropped:\n  1 × contaminated"):
        make([chat(question)], decontamination={}, against=[corpus.artifact("exam")])


def test_hits_beyond_the_first_batch(make, chat, evaluated):
    question, _, corpus = evaluated
    rows = [chat(f"q{i}") for i in range(3000)] + [chat(question, f"a{i}") for i in range(3)]
    built = make(rows, decontamination={}, against=[corpus.artifact("exam")])
    assert [hit["line"] for hit in built.record("contamination")] == [3001, 3002, 3003]
    assert built.counts["kept"]["train"] == 3000
