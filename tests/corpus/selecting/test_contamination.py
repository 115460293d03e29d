"""Decontamination: rows with an n-gram of evaluation data are dropped, and the record names the evaluation and the n-gram."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from snaketune.corpus.selecting.contamination import OWN_HELD_OUT
from snaketune.errors import SnaketuneError

RNG = random.Random(0)


def words(n):
    return " ".join(f"w{RNG.randrange(10**9)}" for _ in range(n))


@pytest.fixture
def evaluated(make, chat):
    """A corpus used as evaluation data: one question, one long answer."""
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


def test_only_held_out_rows_count(make, chat):
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
    # With shorter n-grams, the text is long enough.
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


def test_all_rows_contaminated(make, chat, evaluated):
    question, _, corpus = evaluated
    with pytest.raises(SnaketuneError, match=r"none of the 1 rows is left; dropped:\n  1 × contaminated"):
        make([chat(question)], decontamination={}, against=[corpus.artifact("exam")])


def test_hits_beyond_the_first_batch(make, chat, evaluated):
    question, _, corpus = evaluated
    rows = [chat(f"q{i}") for i in range(3000)] + [chat(question, f"a{i}") for i in range(3)]
    built = make(rows, decontamination={}, against=[corpus.artifact("exam")])
    assert [hit["line"] for hit in built.record("contamination")] == [3001, 3002, 3003]
    assert built.counts["kept"]["train"] == 3000


def test_held_out_rows_of_the_same_prompts_stay(make, chat):
    """Corpora with the same prompts hold out the same ones: none of them may be dropped as contaminated."""
    texts = [words(20) for _ in range(60)]
    exam = make([{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts], kind="preferences", held_out=0.3)
    built = make([chat(text) for text in texts], held_out=0.3, decontamination={}, against=[exam.artifact("exam")])
    assert len(built.held_out) == len(exam.held_out) > 5
    assert built.prompts("held_out") == exam.prompts("held_out")
    assert built.counts["dropped"] == {"duplicate": 0} and built.record("contamination") == []
    assert built.outcome.about["contamination"]["hits"] == {"exam": 0, OWN_HELD_OUT: 0}


def held_out_and_train(make, rows, **spec):
    """Return the rows by their side of the split when nothing is dropped."""
    held = set(make(rows, held_out=0.5, **spec).prompts("held_out"))
    return [[row for row in rows if (row["messages"][0]["content"] in held) == side] for side in (True, False)]


@pytest.mark.parametrize("near", [None, {"threshold": 0.9}])
def test_train_rows_that_quote_held_out_rows_are_dropped(make, chat, near):
    rows = [chat(words(20), words(20)) for _ in range(40)]
    held, train = held_out_and_train(make, rows)
    question, answer = (turn["content"] for turn in held[3]["messages"])
    train[0]["messages"][1]["content"] = f"You ask me: {question.upper()}"
    train[2]["messages"][1]["content"] += " " + answer
    # Conversely, a held-out row that quotes a train row shares the same passage. Thirteen words of it are enough.
    held[5]["messages"][1]["content"] = " ".join(train[4]["messages"][0]["content"].split()[:13])
    train[6]["messages"][1]["content"] = " ".join(question.split()[:12])
    built = make([*train, *held], held_out=0.5, decontamination={}, near_duplicates=near)
    assert built.counts["dropped"]["contaminated"] == 3
    assert built.outcome.about["contamination"]["hits"] == {OWN_HELD_OUT: 3}
    assert len(built.held_out) == len(held) and len(built.train) == len(train) - 3
    hits = built.record("contamination")
    ids = {row["messages"][0]["content"]: row["id"] for row in built.held_out}
    assert [(hit["line"], hit["evaluated"], hit["evaluated_row"]) for hit in hits] == [
        (1, OWN_HELD_OUT, ids[question]),
        (3, OWN_HELD_OUT, ids[question]),
        (5, OWN_HELD_OUT, ids[held[5]["messages"][0]["content"]]),
    ]
    assert hits[0]["ngram"] == " ".join(question.split()[:13]) and hits[0]["file"] == "data/0.jsonl"


def test_templates_and_phrases_of_a_corpus_do_not_count(make, chat):
    template, saying, thanks = words(30), words(30), words(7)
    rows = [
        {"messages": [*chat(f"{template} {i}", f"{saying} {i}")["messages"], *chat(thanks, "Bye")["messages"]]}
        for i in range(40)
    ]
    built = make(rows, held_out=0.5, decontamination={})
    assert built.counts["dropped"] == {"duplicate": 0} and built.outcome.about["contamination"]["hits"] == {
        OWN_HELD_OUT: 0
    }
    # Two answers to one held-out prompt are no template; the prompt counts.
    rows = [chat(words(20), str(i)) for i in range(40)]
    held, train = held_out_and_train(make, rows)
    question = held[0]["messages"][0]["content"]
    train[0]["messages"][1]["content"] = question
    built = make([*train, *held, chat(question, "another")], held_out=0.5, decontamination={})
    assert built.outcome.about["contamination"]["hits"] == {OWN_HELD_OUT: 1}


def test_a_short_turn_counts_only_as_the_prompt(make, chat):
    rows = [chat(words(6), words(6)) for _ in range(40)]
    for row in rows:
        row["messages"] += chat(words(6), words(6))["messages"]
    held, train = held_out_and_train(make, rows)
    texts = [turn["content"] for turn in held[0]["messages"]]
    for row, text in zip(train, texts):
        row["messages"][2]["content"] = text
    built = make([*train, *held], held_out=0.5, decontamination={})
    assert [hit["ngram"] for hit in built.record("contamination")] == [texts[0]]


def test_own_preferences_in_more_than_one_batch(make):
    texts = [words(15) for _ in range(3000)]
    rows = [{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts]
    held = make(rows, kind="preferences", held_out=0.1).prompts("held_out")
    last = max(i for i, text in enumerate(texts) if text not in held)
    rows[last]["rejected"] = held[0]
    built, again = (make(rows, kind="preferences", held_out=0.1, decontamination={}) for _ in range(2))
    assert [hit["line"] for hit in built.record("contamination")] == [last + 1]
    assert built.counts["kept"] == {"train": 3000 - len(held) - 1, "held_out": len(held)}
    for name in ("train-00000.arrow", "held_out-00000.arrow", "contamination.jsonl"):
        assert (built.folder / name).read_bytes() == (again.folder / name).read_bytes()


def test_hits_are_masked(make, chat):
    exam = make([chat("ann.lee@example.org " + (text := words(20)))], held_out=1.0)
    masked = {"mask_personal_data": ["email"]}
    built = make(
        [chat("x"), chat(f"[EMAIL] {text}"), chat(f"bob@example.org {text}")],
        decontamination={},
        cleaning=masked,
        near_duplicates={"drop": False},
        against=[exam.artifact("exam")],
    )
    assert built.counts["dropped"]["contaminated"] == 1
    for name in ("contamination.jsonl", "duplicates.jsonl"):
        assert b"bob" not in (built.folder / name).read_bytes()
