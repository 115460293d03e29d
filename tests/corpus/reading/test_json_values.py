"""JSON values: the same as the json module reads, or an error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.reading.json_files import parse
from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import read, turns

TEXTS = st.text(max_size=6) | st.sampled_from(['":', '\\":', " :", "\n:", '{"a": 1}', "\\", '"'])
INTEGERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


@given(VALUES, st.booleans())
@settings(deadline=None, max_examples=300)
def test_what_json_reads(value, ascii_only):
    try:
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert json.dumps(parse(data)) == json.dumps(value)


def test_an_integer_that_may_be_rounded_is_no_text():
    raw = parse(b'{"prompt": "10^20?", "response": 100000000000000000000}')
    with pytest.raises(Malformed, match=r"response.* holds float"):
        read(raw)
    assert read(parse(b'{"prompt": "2^62?", "response": 4611686018427387904}'))[1].messages == turns(
        "U 2^62?", "A 4611686018427387904"
    )


@pytest.mark.parametrize(
    "data, reason, says",
    [
        (b"", "not_json", "line 1"),
        (b'{"a": 1', "not_json", "column 8"),
        (b'{"a": Infinity}', "not_json", "Infinity"),
        (b'{"a": -Infinity}', "not_json", "-Infinity"),
        (b"{'a': 1}", "python_repr", r"single quotes, .*json\.dumps"),
        (b" [{'a': 1}]", "python_repr", r"single quotes, .*json\.dumps"),
        (b"{a: 'b'}", "not_json", "double quotes"),
        (b'{"a": 1,}', "not_json", "column"),
        (b'{"a": "\xff"}', "not_utf8", "byte 8"),
        (b"[" * 5000 + b"]" * 5000, "not_json", "nested too deeply"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not_json", "nested too deeply"),
        (b"[1] [2]", "not_json", "Extra data"),
    ],
)
def test_errors_are_exact(data, reason, says):
    with pytest.raises(Malformed, match=says) as error:
        parse(data)
    assert error.value.reason == reason


def test_lone_surrogates_are_parsed():
    assert parse(rb'{"a": "\ud83d"}') == {"a": "\ud83d"}
