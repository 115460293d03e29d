"""CSV as spreadsheets and databases write it: other delimiters, no header line."""

import gzip

import pytest
from pydantic import ValidationError

from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.formats import CsvKeys
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

ROWS = [{"prompt": "Sum, of; a|b", "response": "x"}, {"prompt": "Größe?", "response": "5\nm"}]


def read(tmp_path, name, content, *, plain=False, **keys):
    path = tmp_path / name
    path.write_bytes(content)
    return [raw.value for raw in read_file(path, f"data/{name}", plain=plain, keys=CsvKeys(**keys))]


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


@pytest.mark.parametrize(
    "content", [b'{"prompt": "gr\xfc\xdfe", "response": "b"}\n{}\n', b"prompt,response\ngr\xfc\xdfe,b\n"]
)
def test_text_in_latin_1_names_the_command(make, content):
    built = make(content, b'{"prompt": "a", "response": "b"}\n', suffix=".csv", max_quarantined_fraction=1.0)
    assert "`iconv -f CP1252 -t UTF-8`" in built.quarantine[0]["detail"]
    with pytest.raises(SnaketuneError, match=r"byte 16 isn't UTF-8.*`iconv -f CP1252 -t UTF-8`") as error:
        make(b'[{"prompt": "gr\xfc\xdfe", "response": "b"}]')
    assert "cut off" not in str(error.value)
    texts = make("Käse\n".encode("latin-1"), b"a", kind="text", suffix=".txt", max_quarantined_fraction=1.0)
    assert "`iconv" in texts.quarantine[0]["detail"]


@pytest.mark.parametrize("key", [{"delimiter": ";"}, {"header": ["a"]}])
def test_the_keys_need_files(key):
    (name,) = key
    with pytest.raises(ValidationError, match=f"{name} applies to .*files"):
        Source(hub={"path": "a/b", "revision": "main"}, **key)


@pytest.mark.parametrize(
    "key, says",
    [
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
    given = Source(files=["a.csv"], delimiter="tab")
    assert given.delimiter == "\t" and Source(**given.model_dump()) == given


@pytest.mark.parametrize("key", [{"delimiter": ";"}, {"header": ["prompt", "response"]}])
def test_keys_of_csv_for_another_format(make, key):
    with pytest.raises(SnaketuneError, match=f"{next(iter(key))}.*is for CSV.*JSON"):
        make([{"prompt": "a", "response": "b"}], source=key)


@pytest.mark.parametrize("key", [{"delimiter": ";"}, {"header": ["prompt"]}])
def test_keys_of_csv_for_a_table(make, tmp_path, key):
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
    raws = read_file(path, "a.csv", keys=CsvKeys(**keys))
    return [(raw.number, getattr(raw.value, "reason", raw.value)) for raw in raws]


SOUND = {"prompt": "q", "response": "r"}
BEFORE = b"prompt,response\nq,r\n"


@pytest.mark.parametrize(
    "damaged", [b'"He wrote \\"stop\\" there\nand continued here","answer"\n', b'"a"b,c\n', b'x,"never closed\nq,r\n']
)
def test_a_wrong_quote_fails_the_file_with_its_line(tmp_path, damaged):
    with pytest.raises(
        SnaketuneError, match=r"a\.csv: the record that begins on line 3 isn't valid CSV: .*double those"
    ):
        numbered_rows(tmp_path, BEFORE + damaged + b"q,r\n")
    assert numbered_rows(tmp_path, BEFORE + b'5" pipe,r\n')[1] == (3, {"prompt": '5" pipe', "response": "r"})


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
    with pytest.raises(SnaketuneError, match="line 2 isn't valid CSV"):
        numbered_rows(tmp_path, b'sep=;\n"a"b;c\n')
