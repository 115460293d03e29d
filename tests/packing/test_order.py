"""Rows in the order of the corpus, of lengths, or of a column."""

import numpy as np
import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.corpus.rows import ORDER_COLUMN
from snaketune.engine.packing import best_fit
from snaketune.packing.reader import documents, open_rows
from snaketune.tables import write_table
from tests.packing import chain
from tests.tokenization.small_tokenizers import tokenizer_artifact

ROWS, HELD_OUT = 60, 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def difficulties():
    return np.random.default_rng(0).permutation(ROWS - HELD_OUT) / 4


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, difficulties):
    made = {}
    for kind, name in (("sft", "chat"), ("preference", "preferences")):
        one = chain.corpus(tmp_path_factory.mktemp(kind), kind, chain.rows_of(name, ROWS), HELD_OUT)
        write_table(one.folder / "train-order.arrow", pa.table({ORDER_COLUMN: difficulties}))
        manifest = {"payload": describe_files(one.folder), "records": {}}
        made[kind] = Artifact(one.manifest_path, manifest, one.folder)
    return made


def order_of(pack: Artifact) -> list[int]:
    """Return the numbers of the corpus rows in the order in which they are packed."""
    return [int(one["id"]) for one in documents(pack, "train")]


@pytest.mark.parametrize("kind", ["sft", "preference"])
@pytest.mark.parametrize("order", ["corpus", "length", "column"])
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_packed_in_order_group_after_group(
    kind, order, parts, corpora, difficulties, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(best_fit.plan_in_order, "__defaults__", (2,))
    plain = chain.pack(tmp_path / "plain", corpora[kind], tokenizer, kind, parts)
    pack = chain.pack(tmp_path / "pack", corpora[kind], tokenizer, kind, parts, order=order)
    tokens = {int(one["id"]): one["tokens"] for one in documents(plain, "train")}
    keys = {"corpus": range(ROWS), "length": tokens, "column": difficulties}[order]
    numbers = order_of(pack)
    # The same sequences, and the same counts.
    assert sorted(numbers) == sorted(tokens)
    assert pack.manifest["counts"]["train"] == plain.manifest["counts"]["train"]
    if kind == "sft":
        ascending = sorted(sorted(tokens), key=keys.__getitem__)
        ends = np.cumsum([tokens[number] for number in ascending])
        group = dict(zip(ascending, (ends - [tokens[number] for number in ascending]) // (2 * 256)))
        assert [group[number] for number in numbers] == sorted(group.values())
        assert len(set(group.values())) > 4
    elif order != "length":
        # The tokens of a shared prompt count for its first pair, so lengths of pairs aren't known here.
        assert np.corrcoef([keys[number] for number in numbers], range(len(numbers)))[0, 1] > 0.85
    assert open_rows(pack, "train").order == order
    assert str(open_rows(pack, "train")).endswith(f", in the order of {order}")
    # Evaluations read held-out rows, whose order doesn't count.
    held = [row["input_ids"].tolist() for row in open_rows(pack, "held_out")]
    assert held == [row["input_ids"].tolist() for row in open_rows(plain, "held_out")]


@pytest.mark.parametrize("strategy", ["wrapped", "none"])
def test_rows_that_arent_fitted_are_in_order_exactly(strategy, corpora, difficulties, tokenizer, tmp_path):
    settings = {"strategy": strategy, "overflow": "split" if strategy == "wrapped" else "drop"}
    pack = chain.pack(tmp_path, corpora["sft"], tokenizer, "sft", order="column", **settings)
    if strategy == "wrapped":
        numbers = order_of(pack)
        # A conversation that is cut at the end of a row continues in the next one.
        numbers = [number for at, number in enumerate(numbers) if not at or numbers[at - 1] != number]
        assert numbers == np.argsort(difficulties).tolist()
    else:
        assert pack.manifest["order"] == "column"
