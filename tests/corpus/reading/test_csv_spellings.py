"""CSV as spreadsheets and databases write it: other delimiters, no header line, other encodings."""

import gzip

import pytest
from pydantic import ValidationError

from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.formats import TextKeys
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

ROWS = [{"prompt": "Sum, of; a|b", "response": "x"}, {"prompt": "Größe?", "response": "5\nm"}]


def read(tmp_path, name, content, *, plain=False, **keys):
    path = tmp_path / name
    path.write_bytes(content)
    return [raw.value for raw in read_file(path, f"data/{name}", plain=plain, keys=TextKeys(**keys))]


def spelled(delimiter, header="prompt{}response\n"):
    return (header.format(delimiter) + f'"Sum, of; a|b"{delimiter}x\n"Größe?"{delimiter}"5\nm"\n').encode()


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a", "a.csv.gz"])
def test_the_delimiter_is_detected(tmp_path, delimiter, name):
    content = spelled(delimiter)
    assert read(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content) == ROWS


@pytest.mark.parametrize(
    "content, columns",
    [
        (b"prompt,response\na;b,c;d\ne;f,g;h\n", ["prompt", "response"]),
        (b'"prompt;x",response\n"a;b",c\n', ["prompt;x", "response"]),
        (b"prompt;x,response\na;b,c\nd;e,f\n", ["prompt;x", "response"]),
        (b'prompt,response\n"a\tb","c|d"\n"e\tf","g|h"\n', ["prompt", "response"]),
        (b"a|b,c|d\n1|2,3|4\n", ["a|b", "c|d"]),
        # The first row is damaged; the header has one delimiter only.
        (b"prompt,response\nlost\na;b,c\n", ["prompt", "response"]),
        (b"text\none; two\nthree; four\n", ["text"]),
        (b"text\none\tx\nthree\ty\n", ["text"]),
        # Decimal commas, and commas within texts.
        (b"id;price\n1;2,5\n2;3,5\n", ["id", "price"]),
        (b"prompt\tresponse\nx, y, z\tw\nx\ty, z\n", ["prompt", "response"]),
        (b"id;text, long;label\n1;a, b, c;x\n2;d;y\n", ["id", "text, long", "label"]),
    ],
)
def test_the_delimiter_is_the_one_by_which_header_and_rows_agree(tmp_path, content, columns):
    rows = read(tmp_path, "a.csv", content)
    assert next(list(row) for row in rows if isinstance(row, dict)) == columns


def test_prose_is_no_table(tmp_path):
    with pytest.raises(SnaketuneError, match="none of the supported formats"):
        read(tmp_path, "a.txt", b"Dear reader; hello\n\nI write; as you; may see\n")
    content = b"one\ttwo\nthree\tfour\n"
    assert read(tmp_path, "a.txt", content, plain=True) == [{"text": content.decode()}]
    assert read(tmp_path, "a.tsv", b"text\tn\na\t1\n", plain=True) == [{"text": "a", "n": "1"}]


@pytest.mark.parametrize("delimiter", ["~", ":", "\t", ";"])
def test_a_delimiter_that_the_source_names(make, delimiter):
    keys = {"delimiter": "tab" if delimiter == "\t" else delimiter}
    built = make(b"prompt,x%sresponse\na,b%sc\n".replace(b"%s", delimiter.encode()), suffix=".csv", source={
        **keys, "fields": {"prompt": "prompt,x", "response": "response"}
    })  # fmt: skip
    assert [turn["content"] for turn in built.train[0]["messages"]] == ["a,b", "c"]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_a_header_that_the_source_gives(make, delimiter):
    content = delimiter.join(("1", "Sum?", "{x}")) + "\n" + delimiter.join(("2", "Why?", "y")) + "\n"
    built = make(content.encode(), suffix=".csv", source={"header": ["id", "prompt", "response"]})
    assert sorted(built.prompts()) == ["Sum?", "Why?"]
    assert built.counts["read"] == 2 and built.counts["sources"][0]["ignored"] == {"id": 2}


def test_one_column_without_a_header(make):
    built = make(
        b"first, as it is\nsecond\n", kind="text", suffix=".csv", source={"header": ["text"], "delimiter": "tab"}
    )
    assert [row["messages"][0]["content"] for row in built.train] == ["first, as it is", "second"]


def test_a_row_with_more_cells_than_the_header_is_malformed(tmp_path):
    first, second = read(tmp_path, "a.csv", b"1,a,b\n2,c\n", header=("n", "prompt", "response"))
    assert first == {"n": "1", "prompt": "a", "response": "b"} and second.reason == "wrong_number_of_cells"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "cp437"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_text_in_another_encoding(tmp_path, encoding, name, packed):
    texts = {
        "a.csv": 'prompt,response\n"Größe, ä?",é\n',
        "a.tsv": "prompt\tresponse\nGröße, ä?\té\n",
        "a.jsonl": '{"prompt": "Größe, ä?", "response": "é"}\n',
        "a.json": '[{"prompt": "Größe, ä?",\n "response": "é"}]',
        "a.txt": "Größe, ä?\n\né\n",
    }
    rows = read(tmp_path, name, packed(texts[name].encode(encoding)), encoding=encoding, plain=name == "a.txt")
    assert rows == [{"text": texts[name]} if name == "a.txt" else {"prompt": "Größe, ä?", "response": "é"}]


def test_long_text_in_another_encoding(tmp_path):
    rows = [f'{{"prompt": "ä{i}", "response": "€"}}\n' for i in range(100_000)]
    rows = read(tmp_path, "a.jsonl", "".join(rows).encode("utf-16"), encoding="utf-16")
    assert len(rows) == 100_000 and rows[-1] == {"prompt": "ä99999", "response": "€"}


def test_bytes_without_a_character_make_their_row_malformed(make):
    content = b'{"prompt": "a", "response": "b"}\n{"prompt": "c\x81", "response": "d"}\n'
    built = make(content, source={"encoding": "cp1252"}, max_quarantined_fraction=1.0)
    (bad,) = built.quarantine
    assert bad["line"] == 2 and bad["reason"] == "not_utf8" and "cp1252, the source's `encoding`" in bad["detail"]
    assert built.prompts() == ["a"]
    with pytest.raises(SnaketuneError, match="cp1252, the source's `encoding`") as error:
        make(b'[{"prompt": "c\x81", "response": "d"}]', source={"encoding": "cp1252"})
    assert "Windows-1252" not in str(error.value)


def test_a_wrong_encoding_is_named(make):
    with pytest.raises(
        SnaketuneError, match=r"none of the supported formats.*read as utf-16-le, the source's `encoding`"
    ):
        make(b'{"prompt": "a", "response": "b"}\n', source={"encoding": "utf-16-le"})
    with pytest.raises(
        SnaketuneError, match=r"data/0\.jsonl: not all of it is in utf-16, the source's `encoding`: .*BOM"
    ):
        make(b'{"prompt": "a", "response": "b"}\n', source={"encoding": "utf-16"})


@pytest.mark.parametrize(
    "content", [b'{"prompt": "gr\xfc\xdfe", "response": "b"}\n{}\n', b"prompt,response\ngr\xfc\xdfe,b\n"]
)
def test_text_in_latin_1_names_the_key(make, content):
    built = make(content, b'{"prompt": "a", "response": "b"}\n', suffix=".csv", max_quarantined_fraction=1.0)
    assert "`encoding: cp1252`" in built.quarantine[0]["detail"]
    with pytest.raises(SnaketuneError, match=r"valid JSON: byte 16 isn't UTF-8.*`encoding: cp1252`") as error:
        make(b'[{"prompt": "gr\xfc\xdfe", "response": "b"}]')
    assert "cut off" not in str(error.value)
    texts = make("Käse\n".encode("latin-1"), b"a", kind="text", suffix=".txt", max_quarantined_fraction=1.0)
    assert "`encoding: cp1252`" in texts.quarantine[0]["detail"]


def test_bytes_that_are_not_windows_1252_name_only_the_key(make):
    content = '{"prompt": "日本語", "response": "b"}\n'.encode("shift_jis")
    built = make(content, b'{"prompt": "a", "response": "b"}\n', max_quarantined_fraction=1.0)
    assert "`encoding`" in built.quarantine[0]["detail"] and "cp1252" not in built.quarantine[0]["detail"]


@pytest.mark.parametrize("key", [{"encoding": "cp1252"}, {"delimiter": ";"}, {"header": ["a"]}])
def test_the_keys_need_files(key):
    (name,) = key
    with pytest.raises(ValidationError, match=f"{name} applies to .*files"):
        Source(hub={"path": "a/b", "revision": "main"}, **key)


@pytest.mark.parametrize(
    "key, says",
    [
        ({"encoding": "utf-99"}, "utf-99.*cp1252"),
        ({"encoding": "rot13"}, "rot13"),
        ({"encoding": "a\0b"}, "encoding"),
        ({"delimiter": ";;"}, "one character, .* or tab"),
        ({"delimiter": ""}, "one character, .* or tab"),
        ({"delimiter": '"'}, "one character, .* or tab"),
        ({"delimiter": "\n"}, "one character, .* or tab"),
        ({"header": ["a", "a"]}, "'a' twice"),
        ({"header": [""]}, "header"),
    ],
)
def test_invalid_values_of_the_keys(key, says):
    with pytest.raises(ValidationError, match=says):
        Source(files=["a.csv"], **key)


def test_values_of_the_keys_are_canonical():
    given = Source(files=["a.csv"], encoding="Latin1", delimiter="tab")
    assert (given.encoding, given.delimiter) == ("iso8859-1", "\t")
    assert Source(**given.model_dump()) == given
    assert Source(files=["a.csv"], encoding="UTF8") == Source(files=["a.csv"])


@pytest.mark.parametrize("key", [{"delimiter": ";"}, {"header": ["prompt", "response"]}])
def test_keys_of_csv_for_another_format(make, key):
    with pytest.raises(SnaketuneError, match=f"{next(iter(key))}.*is for CSV.*JSON"):
        make([{"prompt": "a", "response": "b"}], source=key)


@pytest.mark.parametrize("key", [{"delimiter": ";"}, {"encoding": "cp1252"}])
def test_keys_of_text_for_a_table(make, tmp_path, key):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a")
    with pytest.raises(SnaketuneError, match=f"{next(iter(key))}.*parquet"):
        make((tmp_path / "a").read_bytes(), source=key)


def test_malformed_rows_have_their_reasons(tmp_path):
    assert isinstance(read(tmp_path, "a.tsv", b"a\tb\n1\t2\n1\t2\t3\n")[1], Malformed)


def numbered_rows(tmp_path, content, **keys):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    raws = read_file(path, "a.csv", keys=TextKeys(**keys))
    return [(raw.number, getattr(raw.value, "reason", raw.value)) for raw in raws]


SOUND = {"prompt": "q", "response": "r"}
BEFORE = b"prompt,response\nq,r\n"


@pytest.mark.parametrize(
    "damaged",
    [
        b'"He wrote \\"stop\\" there\nand continued here","answer"\n',
        b'"He wrote "stop" there\n\nand went on\nand continued here","answer"\n',
        # The line between could be a row.
        b'"He wrote \\"stop\\" there\nand, perhaps\nand continued here","answer"\n',
        b'x,"He wrote \\"stop\\" there\nand continued here"\n',
        # The rest has no quote, but too few cells, or too many.
        b'x,"a"b\nand so on\n',
        b'x,"a"b\nand,so,on\n',
    ],
)
def test_the_rest_of_a_damaged_record_is_no_row(tmp_path, make, damaged):
    content = BEFORE + damaged + b"q,r\n"
    last = content.count(b"\n")
    assert numbered_rows(tmp_path, content) == [(2, SOUND), (3, "not_csv"), (last, SOUND)]
    built = make(content, suffix=".csv", max_quarantined_fraction=1.0)
    (bad,) = built.quarantine
    assert f"the record is taken to end on line {last - 1}" in bad["detail"] and built.prompts() == ["q"]


def test_rows_after_a_damaged_record_are_rows(tmp_path):
    # The next quote that closes none is too far away, or there is none.
    rows = [b"q,r\n"] * 15
    found = numbered_rows(tmp_path, BEFORE + b'"a"b,c\n' + b"".join(rows) + b'5" pipe,r\n')
    assert found[1] == (3, "not_csv") and found[-1] == (19, {"prompt": '5" pipe', "response": "r"})
    assert len(found) == 18
    twice = numbered_rows(tmp_path, BEFORE + b'"a"b,c\nq,r\n"a"b,c\n"q","r"\n')
    assert twice == [(2, SOUND), (3, "not_csv"), (4, SOUND), (5, "not_csv"), (6, SOUND)]


@pytest.mark.parametrize("repeated", [b"prompt,response\n", b'"prompt","response"\n', b"\xef\xbb\xbfprompt,response\n"])
def test_a_repeated_header_is_no_row(make, repeated):
    built = make(BEFORE + repeated + b"s,t\n", suffix=".csv")
    assert sorted(built.prompts()) == ["q", "s"] and built.counts["dropped"]["repeated_header"] == 1
    documents = make(b"text\none\ntext\ntwo\n", kind="text", suffix=".csv")
    assert len(documents.train) == 2 and documents.counts["dropped"]["repeated_header"] == 1


def test_a_header_that_the_file_has_all_the_same(make):
    built = make(BEFORE, suffix=".csv", source={"header": ["prompt", "response"]})
    assert built.prompts() == ["q"] and built.counts["dropped"]["repeated_header"] == 1


def test_rows_without_text_are_skipped(tmp_path):
    content = b',\nprompt,response\nq,r\n,\n" ",\t\n,,,\n\nq,r\n,\n'
    assert numbered_rows(tmp_path, content) == [(3, SOUND), (8, SOUND)]


@pytest.mark.parametrize("first", [b"sep=;\n", b"sep=;\r\n", b'"sep=;"\n', b"\xef\xbb\xbfSEP=;\n"])
@pytest.mark.parametrize("keys", [{}, {"delimiter": ";"}])
def test_a_first_line_that_names_the_delimiter(tmp_path, first, keys):
    content = first + b"prompt;response\nq;r\na,b;c,d\n"
    assert numbered_rows(tmp_path, content, **keys) == [(3, SOUND), (4, {"prompt": "a,b", "response": "c,d"})]
    assert numbered_rows(tmp_path, first + b"q;r\n", header=("prompt", "response"), **keys) == [(2, SOUND)]


def test_the_named_delimiter_may_be_any_character(tmp_path):
    assert numbered_rows(tmp_path, b"sep=~\nprompt~response\nq~r\n") == [(3, SOUND)]
    with pytest.raises(SnaketuneError, match="the header, line 2, isn't valid CSV"):
        numbered_rows(tmp_path, b'sep=;\n"a"b;c\n')
