"""Completions of one prompt form trees in which every token is stored once, and each is read back unchanged."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.engine.packing.segments import layout_of
from snaketune.packing.reader import documents, open_rows
from tests.packing.made_pairs import MadePair, Token, packed, read_back

PROMPTS = [(90,), (90, 91), (92, 93, 94)]


def completion(text: str) -> tuple[Token, ...]:
    """Letters are tokens; capital letters are supervised."""
    return tuple((ord(letter.lower()), letter.isupper()) for letter in text)


def pair(chosen: str, rejected: str, prompt: tuple[int, ...] = PROMPTS[1]) -> MadePair:
    return MadePair(prompt, completion(chosen), completion(rejected))


letters = st.text("ABab", max_size=8)
supervised = st.sampled_from("AB")
# Fits into any row.
SHORT = pair("A", "B", (95,))


@st.composite
def made_pairs(draw, beginning=supervised) -> list[MadePair]:
    """Pairs over few letters, so that completions share beginnings and repeat; each has a supervised token."""
    pool = draw(st.lists(st.builds("{}A{}".format, beginning, letters), min_size=1, max_size=6))
    some = st.sampled_from(pool)
    return draw(st.lists(st.builds(pair, some, some, st.sampled_from(PROMPTS)), min_size=1, max_size=9))


def trie_nodes(sequences: list[tuple[Token, ...]]) -> int:
    """Return the nodes of the trie of these sequences."""
    root: dict = {}
    nodes = 0
    for sequence in sequences:
        at = root
        for token in sequence:
            nodes += token not in at
            at = at.setdefault(token, {})
    return nodes


def by_row(pack, split: str = "train") -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(len(open_rows(pack, split)))]
    for document in documents(pack, split):
        rows[document["row"]].append(document["id"])
    return rows


@settings(deadline=None, max_examples=30)
@given(made_pairs(letters), st.sampled_from([64, 16]))
def test_every_completion_is_read_back_whole(pairs, length):
    with tempfile.TemporaryDirectory() as folder:
        pairs = [*pairs, SHORT]
        made = packed(Path(folder), pairs, length)
        found, counts = read_back(made), made.manifest["counts"]["train"]
        assert counts["read"] == len(found) + sum(counts["dropped"].values())
        for number, own in enumerate(pairs):
            if str(number) in found:
                assert found[str(number)] == own.learned() and own.prefers
            else:
                assert trie_nodes(own.learned()) > length or not own.prefers


@settings(deadline=None, max_examples=30)
@given(made_pairs())
def test_a_prompts_completions_are_a_trie(pairs):
    with tempfile.TemporaryDirectory() as folder:
        # One row holds everything. Unsupervised tokens at the start of a completion would be part of its prompt.
        pairs = [*pairs, SHORT]
        made = packed(Path(folder), pairs, 1024)
        by_prompt: dict[tuple[int, ...], list[tuple[Token, ...]]] = {}
        for own in (own for own in pairs if own.prefers):
            by_prompt.setdefault(own.prompt, []).extend(own.learned())
        counts = made.manifest["counts"]["train"]
        assert counts["tokens"] == sum(map(trie_nodes, by_prompt.values())) == open_rows(made, "train").tokens


@settings(deadline=None, max_examples=30)
@given(made_pairs(), st.integers(8, 16))
def test_truncated_completions_are_beginnings_of_the_whole_ones(pairs, length):
    with tempfile.TemporaryDirectory() as folder:
        made = packed(Path(folder), [*pairs, SHORT], length, overflow="truncate")
        found, counts = read_back(made), made.manifest["counts"]["train"]
        cut = 0
        for number, own in enumerate(pairs):
            if str(number) not in found:
                assert trie_nodes(own.learned()) > length or not own.prefers
                continue
            whole = own.learned()
            for side, full in zip(found[str(number)], whole, strict=True):
                assert side == full[: len(side)]
                assert any(supervised for _, supervised in side)
            # Pairs that fit are whole, and the rows of truncated pairs are full.
            if trie_nodes(whole) <= length:
                assert found[str(number)] == whole
            else:
                cut += 1
                assert trie_nodes(found[str(number)]) == length
        assert counts["truncated"]["rows"] == cut


@settings(deadline=None, max_examples=30)
@given(made_pairs(), st.integers(8, 40), st.sampled_from(["drop", "truncate"]))
def test_every_token_is_accounted_for(pairs, length, overflow):
    with tempfile.TemporaryDirectory() as folder:
        made = packed(Path(folder), [*pairs, SHORT], length, overflow, held_out=[pair("AB", "AA")] * 2)
        for split in ("train", "held_out"):
            counts, rows = made.manifest["counts"][split], open_rows(made, split)
            lost = sum(counts["dropped_tokens"].values()) + counts["truncated"]["tokens"]
            shared = counts["shared_prompt_tokens"] + counts["shared_answer_tokens"]
            assert counts["read_tokens"] == counts["tokens"] + lost + shared
            assert min(counts["shared_prompt_tokens"], counts["shared_answer_tokens"]) >= 0
            listed = list(documents(made, split))
            assert counts["tokens"] == rows.tokens == sum(document["tokens"] for document in listed)
            labelled = [int((rows[r]["labels"] != -100).sum()) for r in range(len(rows))]
            for r, own in enumerate(labelled):
                assert own == sum(document["supervised"] for document in listed if document["row"] == r)
            assert counts["supervised_tokens"] == sum(labelled)
            assert counts["kept"] == counts["pieces"] == len(listed)


@settings(deadline=None, max_examples=30)
@given(made_pairs(), st.integers(12, 40))
def test_segments_are_in_normal_form(pairs, length):
    """A prefix ends in its `prefix_segment`, every segment is the end of a completion, and parents precede children."""
    with tempfile.TemporaryDirectory() as folder:
        rows = open_rows(packed(Path(folder), [*pairs, SHORT], length), "train")
        for r in range(len(rows)):
            row = rows[r]
            own = np.arange(len(row["segment_lengths"]))
            assert sorted(set(row["completions"].tolist())) == own.tolist()
            parent, prefix = row["prefix_segments"], row["prefix_lengths"]
            assert ((parent < own) | ((parent == own) & (prefix == 0))).all()
            whole = prefix + row["segment_lengths"]
            seen = prefix > 0
            assert (prefix[parent[seen]] < prefix[seen]).all() and (prefix[seen] <= whole[parent[seen]]).all()


def rows_of(folder: Path, pairs: list[MadePair], length: int = 64) -> list[dict]:
    rows = open_rows(packed(folder, pairs, length), "train")
    return [rows[r] for r in range(len(rows))]


def test_the_tree_of_the_docstring(tmp_path):
    (row,) = rows_of(tmp_path, [pair("CD", "CEF"), pair("CD", "CE")])
    assert [row[name].tolist() for name in ("segment_lengths", "prefix_lengths", "prefix_segments")] == [
        [4, 1, 1],
        [0, 3, 4],
        [0, 0, 1],
    ]
    assert row["completions"].tolist() == [0, 2, 0, 1]
    assert bytes(row["input_ids"][:6].tolist()) == b"Z[cdef"


def test_a_rejected_completion_that_the_chosen_one_continues_ends_a_segment(tmp_path):
    (row,) = rows_of(tmp_path, [pair("ABC", "AB")])
    assert row["segment_lengths"].tolist() == [4, 1]
    assert row["prefix_lengths"].tolist() == [0, 4]
    assert row["completions"].tolist() == [1, 0]


def test_equal_completions_are_stored_once(tmp_path):
    (row,) = rows_of(tmp_path / "b", [pair("AB", "C"), pair("AB", "D"), pair("D", "AB")])
    assert row["segment_lengths"].tolist() == [4, 1, 1]
    assert row["completions"].tolist() == [0, 1, 0, 2, 2, 0]


def test_common_tokens_that_differ_in_supervision_are_stored_twice(tmp_path):
    (row,) = rows_of(tmp_path, [pair("AbC", "ABC")])
    assert row["segment_lengths"].tolist() == [5, 2]
    assert row["prefix_lengths"].tolist() == [0, 3]
    assert read_back(packed(tmp_path / "b", [pair("AbC", "ABC")], 64))["0"] == pair("AbC", "ABC").learned()


def test_a_tree_that_is_longer_than_a_row_is_split(tmp_path):
    answers = ["AAAAAA", "AAAAAB", "BBBBBA", "BBBBBB", "AAAABB", "BBBBAA"]
    pairs = [pair(a, b) for a, b in [(0, 1), (2, 3), (0, 4), (2, 5), (1, 4)] for a, b in [(answers[a], answers[b])]]
    made = packed(tmp_path, pairs, 14)
    # Completions that begin alike are in one tree, and the prompt is stored twice.
    assert by_row(made) == [["0", "2", "4"], ["1", "3"]]
    assert made.manifest["counts"]["train"]["shared_prompt_tokens"] == 3 * 2
    assert read_back(made) == {str(n): own.learned() for n, own in enumerate(pairs)}


def test_prompts_with_equal_hashes_have_trees_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("snaketune.tokenization.token_rows.xxhash.xxh3_64_intdigest", lambda _: 7)
    pairs = [pair("AB", "AC", (90,)), pair("AB", "AD", (91,)), pair("AB", "AE", (90,))]
    made = packed(tmp_path, pairs, 64)
    assert made.manifest["counts"]["train"]["tokens"] == 5 + 4
    assert read_back(made) == {str(n): own.learned() for n, own in enumerate(pairs)}


def test_pairs_without_a_prompt_are_read_back_too(tmp_path):
    pairs = [pair("aBC", "bBC", ()), pair("aBC", "aBD", ()), pair("aBC", "bBC", ())]
    assert read_back(packed(tmp_path, pairs, 64)) == {str(n): own.learned() for n, own in enumerate(pairs)}


def test_memory_is_released_while_trees_are_built(tmp_path, monkeypatch):
    monkeypatch.setattr("snaketune.engine.packing.pair_overflow.READ_BEFORE_RELEASE", 1)
    pairs = [pair("AB" * n, "AC" * n, prompt) for prompt in PROMPTS for n in (1, 2, 3)]
    made = packed(tmp_path, pairs, 64)
    assert read_back(made) == {str(n): own.learned() for n, own in enumerate(pairs)}
    assert layout_of([open_rows(made, "train")[0]]).prefixed
