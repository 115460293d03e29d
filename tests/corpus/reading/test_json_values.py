"""JSON values: the same as the json module reads, or an error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.reading.json_values import parse
from snaketune.corpus.rows import Malformed

KEYS = st.sampled_from(["a", "b", 'a"', "a\\\\", '\\\\"', ":", '":', " :", "\\", "", "ä"])
TEXTS = st.text(max_size=6) | st.sampled_from(['":', '\\":', " :", "\n:", '{"a": 1}', "\\", '"'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : "), ("\n,", "\t:"), (",", "\r\n : ")])


@given(VALUES, SPACES, st.booleans())
@settings(deadline=None, max_examples=300)
def test_what_json_reads(value, spaces, ascii_only):
    try:
        data = json.dumps(value, separators=spaces, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    rows = parse(data)
    assert rows == value and json.dumps(rows) == json.dumps(value)


@given(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=5), SPACES, st.integers(0, 3))
@settings(deadline=None, max_examples=300)
def test_every_duplicate_key_is_detected(pairs, spaces, depth):
    comma, colon = spaces
    try:
        spelled = comma.join(json.dumps(key) + colon + json.dumps(value, separators=spaces) for key, value in pairs)
        data = ('[{"x":' * depth + "{" + spelled + "}" + "}]" * depth).encode()
    except UnicodeEncodeError:
        return
    twice = len({key for key, _ in pairs}) < len(pairs)
    if twice:
        with pytest.raises(Malformed, match="duplicate_key"):
            parse(data)
    else:
        parse(data)


@pytest.mark.parametrize(
    "data",
    [
        rb'{"a": 1, "a": 2}',
        rb'{"a": 1, "a" : 2}',
        b'{"a": 1, "a"\n:2}',
        rb'{"a": 1, "\u0061": 2}',
        rb'{"a": "\":", "a": 2}',
        rb'{"b\\": 1, "b\\": 2}',
        rb'{"b\\\"": 1, "b\\\"": 2}',
        rb'[[{"x": {"a": 1, "a": 1}}]]',
        rb'{"a": {"a": 1}, "b": 2, "a": 3}',
    ],
)
def test_a_key_twice(data):
    with pytest.raises(Malformed, match=r"duplicate_key: the key .* is twice in one object"):
        parse(data)


@pytest.mark.parametrize("number", [2**63, -(2**63), 2**64, 10**30, -(10**40), 2**63 - 1, 2**53 + 1])
def test_large_integers_are_exact(number):
    assert parse(b'{"n": %d}' % number) == {"n": number}


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
