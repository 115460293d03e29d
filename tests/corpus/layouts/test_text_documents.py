"""Corpora of kind text: columns and files to documents, unchanged, cut if they are long."""

import gzip
import json

import pytest
from pydantic import ValidationError

from snaketune.corpus.reading import text_files
from snaketune.errors import SnaketuneError


def texts(rows):
    return [row["messages"][0]["content"] for row in rows]


def test_text_columns_are_documents(make):
    rows = [{"text": f"Document {i}.\n<|im_end|> \x00 ☂ [INST] [/INST]", "url": "x"} for i in range(5)]
    built = make(rows, kind="text")
    assert texts(built.train) == [row["text"] for row in rows]
    assert {turn["role"] for row in built.train for turn in row["messages"]} == {"text"}
    assert built.counts["sources"][0]["layouts"] == {"text": 5}
    csv = "text,n\n" + "".join(f'"line one\nline two, {i}",{i}\n' for i in range(3))
    assert texts(make(csv.encode(), kind="text", suffix=".csv").train) == [f"line one\nline two, {i}" for i in range(3)]
    assert texts(make([{"body": "a"}], kind="text", source={"fields": {"text": "body"}}).train) == ["a"]


@pytest.mark.parametrize(
    "content", ["One, two.\r\nThree, four.\r\n\r\n", "a,b\nc,d\ne,f\n", "# Title\n\n* x\n", "\ttabs, é"]
)
@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz", ""])
def test_a_file_of_plain_text_is_one_document(make, content, suffix):
    data = content.encode()
    built = make(gzip.compress(data) if suffix.endswith(".gz") else b"\xef\xbb\xbf" + data, kind="text", suffix=suffix)
    assert texts(built.train) == [content]


def test_json_lines_in_a_txt_file_are_rows(make):
    assert texts(make([{"text": "a"}, {"text": "b"}], kind="text", suffix=".txt").train) == ["a", "b"]


def test_text_files_of_other_corpora_are_refused(make):
    with pytest.raises(SnaketuneError, match="none of the supported formats"):
        make(b"just some words\n", suffix=".txt")


@pytest.mark.parametrize("row", [{"text": ""}, {"text": " \n"}, {"text": None}, {"text": 5}, {"messages": []}])
def test_rows_without_text_are_quarantined(make, row):
    built = make([row, {"text": "sound"}], kind="text", max_quarantined_fraction=1.0)
    assert len(built.quarantine) == len(built.train) == 1
    assert built.quarantine[0]["reason"] in ("empty_document", "missing_column", "wrong_type")


def test_text_that_is_not_utf8_is_quarantined(make):
    built = make(b"sound\n", "Käse\n".encode("latin-1"), kind="text", suffix=".txt", max_quarantined_fraction=1.0)
    assert [record["reason"] for record in built.quarantine] == ["not_utf8"]
    assert texts(built.train) == ["sound\n"]


@pytest.mark.parametrize("breaking", ["\n\n", "\n", " ", ""])
@pytest.mark.parametrize("as_file", [True, False])
def test_long_documents_are_cut_at_breaks_without_loss(make, monkeypatch, breaking, as_file):
    monkeypatch.setattr(text_files, "MAX_CHARACTERS", 100)
    whole = breaking.join(f"é{'x' * (i % 40 + 3)}{i}" for i in range(60))
    content = whole.encode() if as_file else [{"text": whole}]
    built = make(content, kind="text", suffix=".txt" if as_file else ".jsonl")
    chunks = texts(built.train)
    assert "".join(chunks) == whole
    assert len(chunks) > 1 and max(map(len, chunks)) <= 100
    assert all(chunk.endswith(breaking) for chunk in chunks[:-1])
    assert built.counts["read"] + built.counts["extra"] == len(chunks)


def test_a_hundred_megabytes_in_one_line(make, tmp_path):
    line = ("0123456789" * 10_000_000).encode()
    built = make(line, kind="text", suffix=".txt", held_out=0.0)
    # All chunks but the last are equal.
    assert built.counts["read"] == 400
    assert built.counts["dropped"] == {"duplicate": 399}


def test_documents_are_cleaned_compared_and_held_out_like_rows(make):
    words = " ".join(f"word{i}" for i in range(60))
    rows = [{"text": f"{words} {i} a@example.org"} for i in range(20)] + [
        {"text": f"{i} quite different {i * i}"} for i in range(60)
    ]
    near = make(
        rows + rows[:1], kind="text", near_duplicates={}, cleaning={"mask_personal_data": ["email"]}, held_out=0.3
    )
    assert near.counts["dropped"] == {"duplicate": 1, "near_duplicate": 19}
    assert near.held_out and "[EMAIL]" in "".join(texts(near.train) + texts(near.held_out))
    test = make([{"question": words, "answer": "1"}], held_out=1.0).artifact("test")
    clean = make(rows, kind="text", decontamination={}, against=[test])
    assert clean.counts["dropped"] == {"duplicate": 0, "contaminated": 20}
    again = make(rows, kind="text", source={"weight": 2})
    assert again.counts["kept"]["train"] == 160


def test_decontamination_against_a_corpus_of_documents(make):
    words = " ".join(f"word{i}" for i in range(60))
    evaluated = make([{"text": words}], kind="text", held_out=1.0).artifact("documents")
    rows = [{"prompt": f"Say: {words}", "response": "no"}, {"prompt": "a", "response": "b"}]
    assert make(rows, decontamination={}, against=[evaluated]).counts["dropped"]["contaminated"] == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": {"layout": "messages"}}, "layout messages"),
        ({"source": {"fields": {"prompt": "a", "response": "b"}}}, "fields.prompt"),
        ({"source": {"speakers": {"A": "user"}}}, "speakers"),
        ({"repair": ["merge-same-role"]}, "repair"),
        ({"answer_pattern": "(.*)"}, "answer_pattern"),
    ],
)
def test_keys_for_turns_are_refused(make, spec, message):
    with pytest.raises(ValidationError, match=message):
        make([{"text": "a"}], kind="text", **spec)


@pytest.mark.parametrize("source", [{"layout": "text"}, {"fields": {"text": "body"}}])
def test_keys_for_documents_are_refused_elsewhere(make, chat, source):
    with pytest.raises(ValidationError, match="kind text"):
        make([chat()], source=source)


def test_document_rows_read_back_as_json(make):
    built = make([{"text": "a"}], kind="text")
    assert json.dumps(built.train)
