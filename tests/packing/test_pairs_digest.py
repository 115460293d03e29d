"""The digest of pairs doesn't depend on the rows; it depends on ids, tokens, splits and truncation."""

import pytest

from snaketune.artifacts.manifest import Artifact
from tests.packing.chain import corpus, rows_of
from tests.packing.chain import pack as pack_in
from tests.tokenization.small_tokenizers import tokenizer_artifact


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def pairs_of(tokenizer, tmp_path):
    """A function that packs rows and returns the digest of their pairs."""
    calls = iter(range(99))

    def packed(rows: list[dict], parts: int = 1, held_out: int = 4, **settings) -> str:
        folder = tmp_path / str(next(calls))
        made = corpus(folder / "corpus", "preference", rows, held_out)
        return pack_in(folder, made, tokenizer, "preference", parts, **settings).manifest["pairs"]

    return packed


def test_rows_of_other_lengths_orders_and_parts_hold_the_same_pairs(pairs_of):
    rows = rows_of("preferences", 24)
    # Prompts that occur twice share a row if it is long enough.
    rows += [row | {"id": f"{row['id']}x", "chosen": rows[0]["chosen"]} for row in rows[1:5]]
    expected = pairs_of(rows)
    assert pairs_of(rows, length=512) == expected
    assert pairs_of(rows, length=[128, 512]) == expected
    assert pairs_of(rows, parts=2) == expected
    assert pairs_of([*rows[23::-1], *rows[24:]]) == expected


@pytest.mark.parametrize(
    "edit",
    [
        lambda rows: [rows[0] | {"id": "other"}, *rows[1:]],
        lambda rows: [rows[0] | {"chosen": rows[1]["chosen"]}, *rows[1:]],
        lambda rows: [rows[0] | {"chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}, *rows[1:]],
        lambda rows: [rows[0] | {"prompt": rows[1]["prompt"]}, *rows[1:]],
        lambda rows: rows[1:],
        # A copy by the weight of a source.
        lambda rows: [*rows, rows[0] | {"id": f"{rows[0]['id']}-2"}],
    ],
)
def test_another_pair_changes_the_digest(pairs_of, edit):
    rows = rows_of("preferences", 12)
    assert pairs_of(edit(rows)) != pairs_of(rows)


def test_another_split_or_truncation_changes_the_digest(pairs_of):
    rows = rows_of("preferences", 12)
    rows[2] = rows[2] | {"chosen": [{"role": "assistant", "content": "word " * 200}]}
    expected = pairs_of(rows, overflow="truncate", length=128)
    assert pairs_of(rows, overflow="truncate", length=128, held_out=5) != expected
    assert pairs_of(rows, overflow="truncate", length=160) != expected
    assert pairs_of(rows, overflow="drop", length=128) != expected
