"""Memory of planning, and that what is divided into blocks and ranges to save memory comes out the same."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from benchmarks.plan_memory import made_tokens

from snaketune.engine.packing.best_fit import plan_best_fit_decreasing
from snaketune.engine.packing.conversation_overflow import columns_of, fit_conversations
from snaketune.engine.packing.in_memory import MemoryTokens
from snaketune.engine.packing.planner import plan_split
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.shards import documents_schema
from snaketune.engine.packing.truncation import DropCounts
from snaketune.packing.document_writer import DocumentWriter
from snaketune.packing.row_plan import build
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import PlanSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

LENGTH = 512


@dataclass(frozen=True)
class Repeated(MemoryTokens):
    """An index that repeats a table."""

    times: int = 1

    def tables(self, split: str, columns: list[str]) -> Iterator[pa.Table]:
        return (self.index(split, columns) for _ in range(self.times))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenParts:
    return TokenParts([made_tokens(tmp_path_factory.mktemp("tokens") / "tokens", 50_000)])


def peak(table: pa.Table, times: int) -> int:
    """The peak of planning a table so many times, without the memory of Arrow."""
    settings = PackingSettings(kind="sft", lengths=(2048,))
    tokens = Repeated(table, [], times)
    read = {"rows": times * len(table), "tokens": times * int(table["length"].to_numpy().sum())}
    tracemalloc.start()
    rows, *_ = plan_split(settings, tokens, "train", read)
    assert sum(packed.documents for _, packed in rows.batches()) == rows.units.documents > 0.9 * read["rows"]
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_a_conversation_takes_16_bytes(tokens):
    table = tokens.index("train")
    few, many = 20, 40
    assert (peak(table, many) - peak(table, few)) / ((many - few) * len(table)) < 16


@pytest.mark.parametrize("capacities", [[LENGTH], [LENGTH // 4, LENGTH], [2**16]])
def test_the_plan_is_the_same_whatever_the_blocks(capacities):
    random = np.random.default_rng(0)
    lengths = random.integers(0, LENGTH, 3000)
    supervised = (lengths * random.random(3000)).astype(np.int32)
    for given in (supervised, None):
        one, several = (plan_best_fit_decreasing(lengths, capacities, given, block) for block in (2**20, 64))
        for name in ("order", "offsets", "capacities"):
            assert (getattr(one, name) == getattr(several, name)).all()
        assert sorted(one.order.tolist()) == np.flatnonzero(lengths).tolist()


def test_units_in_any_order_have_the_segments_of_their_conversation(tokens):
    settings = PackingSettings(kind="sft", lengths=(LENGTH,), overflow="split")
    tables = tokens.tables("train", columns_of(settings))
    units = fit_conversations(settings, LENGTH, tables, DropCounts())
    every = units.take(np.arange(len(units.tokens)))
    assert (every.tokens == units.tokens).all() and (every.supervised == units.supervised).all()
    assert (every.sequence == units.sequence).all() and (np.diff(units.sequence) == 0).any()
    order = np.random.default_rng(0).permutation(len(units.tokens))
    some, expected = units.take(order), every.take(order)
    for name in ("sequence", "start", "stop", "prefix", "prefix_segment", "supervised"):
        assert (getattr(some.segments, name) == getattr(expected.segments, name)).all()
    assert (some.offsets == expected.offsets).all()


@pytest.mark.parametrize(("overflow", "strategy"), [("split", "best-fit-decreasing"), ("drop", "wrapped")])
def test_documents_are_the_same_whatever_the_ranges(tokens, tmp_path, overflow, strategy):
    settings = PackingSettings(kind="sft", lengths=(LENGTH,), overflow=overflow, strategy=strategy)
    rows, *_ = plan_split(settings, tokens, "train", {"rows": 50_000, "tokens": 1})
    schema, found = documents_schema("sft"), []
    for least in (10**6, 9_999):
        path, most = tmp_path / f"{least}.arrow", max(50_000, rows.units.documents)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            documents = DocumentWriter(tmp_path / "ranges", writer, schema, "train", tokens, most, least)
            for first, packed in rows.batches():
                documents.add(first, packed)
            documents.finish()
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert not [path for path in (tmp_path / "ranges").rglob("*") if path.is_file()]
    table = read_table(path)
    ids = tokens.index("train")["id"].to_pylist()
    sequences = np.concatenate([packed.segments.sequence for _, packed in rows.batches()])
    assert table["id"].to_pylist() == [ids[sequence] for sequence in sequences]


def test_the_stage_writes_all_rows(tmp_path):
    work = WorkFolder(tmp_path / "work")
    work.start()
    spec = PlanSpec(kind="sft", lengths=(LENGTH,), strategy="best-fit-decreasing", overflow="truncate")
    outcome = build(spec, work, tokens=[made_tokens(tmp_path / "tokens", 100_000)])
    rows, pieces = (read_table(work.payload / f"train-{name}.arrow") for name in ("rows", "pieces"))
    assert {len(batch) for batch in pieces.to_batches()[:-1]} == {2**16}
    assert sum(rows["pieces"].to_pylist()) == len(pieces) == outcome.counts["train"]["pieces"]
    tokens = pieces["stop"].to_numpy() - pieces["start"].to_numpy()
    assert tokens.sum() == outcome.counts["train"]["tokens"]
    documents = read_table(work.payload / "documents.arrow")
    splits = documents["split"].to_pylist()
    assert splits == ["train"] * splits.count("train") + ["held_out"] * splits.count("held_out")
    assert (documents["tokens"].to_numpy()[: len(pieces)] == tokens).all()
