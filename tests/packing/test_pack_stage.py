"""From a corpus artifact to shards: the five columns, counts that add up, and nothing lost or unlearnable."""

import json

import numpy as np
import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.artifacts.tables import read_table, write_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.specs import PackSpec, TokenizerSpec
from snaketune.errors import SnaketuneError
from snaketune.packing import stage
from snaketune.packing.shards import IGNORED, PackedRows, documents, schema
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.stage import build as build_tokenizer
from tests.parity.test_trl import ROOT, rows_of

TEMPLATE = ROOT / "resources/chat_templates/chatml.jinja"


def artifact(folder, tables: dict[str, pa.Table]) -> Artifact:
    (folder / "rows").mkdir(parents=True)
    for name, table in tables.items():
        write_table(folder / "rows" / name, table)
    return Artifact(
        folder / "manifest.json", {"payload": describe_files(folder / "rows"), "records": {}}, folder / "rows"
    )


def corpus(folder, kind: str, rows: list[dict]) -> Artifact:
    columns = ("id", "messages") if kind == "sft" else ("id", "prompt", "chosen", "rejected")
    train = pa.Table.from_pylist([{name: row[name] for name in columns} for row in rows[:-5]])
    held_out = pa.Table.from_pylist([{name: row[name] for name in columns} for row in rows[-5:]])
    return artifact(folder, {"train.arrow": train, "held_out.arrow": held_out})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("pack")
    work = WorkFolder(folder / "work")
    work.start()
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=0.9995, split_digits=True)
    build_tokenizer(
        spec, work, corpora=[corpus(folder / "c", "sft", rows_of("chat", 200))], chat_template=[TEMPLATE], base=[]
    )
    return Artifact(folder / "manifest.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)


def pack(tmp_path, tokenizer: Artifact, kind: str, rows: list[dict], **settings):
    """The packed artifact, as a reader sees it."""
    spec = PackSpec(kind=kind, **({"length": 256} | settings))
    work = WorkFolder(tmp_path / "work")
    work.start()
    outcome = stage.build(spec, work, corpus=corpus(tmp_path / "corpus", kind, rows), tokenizer=tokenizer)
    manifest = {**outcome.about, "counts": outcome.counts, "spec": spec.model_dump(), "records": {}}
    manifest["payload"] = describe_files(work.payload)
    return Artifact(tmp_path / "manifest.json", json.loads(json.dumps(manifest)), work.payload)


def test_sft_rows_hold_every_conversation_whole_and_learn_the_assistant_alone(tmp_path, tokenizer):
    rows = rows_of("chat", 60)
    packed = pack(tmp_path, tokenizer, "sft", rows)
    chat = ChatTokenizer.load(tokenizer.folder)
    assert read_table(packed.file("train-00000.arrow")).schema == schema(256)
    assert packed.manifest["format_version"] == "3.0"
    train = PackedRows(packed, "train")
    masks = read_table(packed.file("train-00000.arrow"))["attention_mask"].to_pylist()
    places = list(documents(packed, "train"))
    assert sorted(place["id"] for place in places) == sorted(row["id"] for row in rows[:-5])
    by_row: dict[int, list[str]] = {}
    for place in places:
        by_row.setdefault(place["row"], []).append(place["id"])
    by_id = {row["id"]: row for row in rows}
    for r, ids in by_row.items():
        row, at = train[r], 0
        assert sum(masks[r]) == row["segment_lengths"].sum()
        for name, length in zip(ids, row["segment_lengths"], strict=True):
            encoded = chat.encode_conversations([by_id[name]["messages"]])[0]
            assert row["input_ids"][at : at + length].tolist() == encoded.ids.tolist()
            labels = row["labels"][at : at + length]
            assert (labels != IGNORED).tolist() == encoded.supervised.tolist()
            assert labels[labels != IGNORED].tolist() == encoded.ids[encoded.supervised].tolist()
            learned = [m["content"] for m in by_id[name]["messages"] if m["role"] == "assistant"]
            assert chat.decode(labels[labels != IGNORED]) == "".join(learned)
            assert chat.stop_ids[0] in labels
            at += length
        assert (row["labels"][at:] == IGNORED).all()
        assert (row["input_ids"][at:] == chat.pad_id).all()


def test_counts_add_up_and_drops_are_counted_in_rows_and_tokens(tmp_path, tokenizer):
    rows = rows_of("chat", 60)
    packed = pack(tmp_path, tokenizer, "sft", rows, length=64)
    counts = packed.manifest["counts"]["train"]
    assert counts["read"] == 55 == counts["kept"] + counts["dropped"]["longer_than_row"]
    lengths = [
        len(e.ids)
        for e in ChatTokenizer.load(tokenizer.folder).encode_conversations([r["messages"] for r in rows[:-5]])
    ]
    assert counts["dropped"]["longer_than_row"] == sum(n > 64 for n in lengths) > 0
    assert counts["dropped_tokens"]["longer_than_row"] == sum(n for n in lengths if n > 64)
    assert counts["tokens"] == sum(n for n in lengths if n <= 64) == PackedRows(packed, "train").tokens
    metadata = packed.manifest["packing_metadata"]
    assert metadata["rows"] >= metadata["lower_bound_rows"]
    assert metadata["packing_efficiency"] == round(100 * counts["tokens"] / (64 * metadata["rows"]), 3)


def test_overflow_raise_names_the_conversation(tmp_path, tokenizer):
    with pytest.raises(SnaketuneError, match=r"conversation \d+ has \d+ tokens, packing.length is 32"):
        pack(tmp_path, tokenizer, "sft", rows_of("chat", 20), length=32, overflow="raise")


def test_pairs_share_their_prompt_and_are_never_split(tmp_path, tokenizer):
    rows = rows_of("preferences", 40)
    packed = pack(tmp_path, tokenizer, "preference", rows)
    assert packed.manifest["kind"] == "preference"
    train = PackedRows(packed, "train")
    chat = ChatTokenizer.load(tokenizer.folder)
    by_id = {row["id"]: row for row in rows}
    places = iter(documents(packed, "train"))
    for r in range(len(train)):
        row, at = train[r], 0
        pairs = zip(*(iter(zip(row["segment_lengths"].tolist(), row["prefix_lengths"].tolist())),) * 2, strict=True)
        for (chosen_length, none), (rejected_length, prompt_length) in pairs:
            place = next(places)
            assert (place["row"], none) == (r, 0)
            pair = by_id[place["id"]]
            first = row["input_ids"][at : at + chosen_length]
            second = row["input_ids"][at + chosen_length : at + chosen_length + rejected_length]
            # The same tokens as two conversations of their own, with the prompt once.
            for side, ids in (("chosen", first), ("rejected", np.concatenate([first[:prompt_length], second]))):
                assert ids.tolist() == chat.encode_conversations([pair["prompt"] + pair[side]])[0].ids.tolist()
            assert (row["labels"][at : at + prompt_length] == IGNORED).all()
            at += chosen_length + rejected_length
    assert next(places, None) is None


def test_a_conversation_with_nothing_to_learn_is_an_error(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(stage.ChatTokenizer, "encode_conversations", lambda self, chats: [NOTHING for _ in chats])
    with pytest.raises(SnaketuneError, match="has nothing to learn"):
        pack(tmp_path, tokenizer, "sft", rows_of("chat", 20))


class NOTHING:
    ids = np.arange(5, dtype=np.int32)
    supervised = np.zeros(5, bool)


def test_raw_rows_are_format_2_and_refused_by_the_packed_reader(tmp_path, tokenizer):
    packed = pack(tmp_path, tokenizer, "sft", rows_of("chat", 20), strategy="none")
    assert packed.manifest["format_version"] == "2.0"
    assert packed.manifest["packing_metadata"]["enabled"] is False
    assert read_table(packed.file("train-00000.arrow")).num_rows == 15
    with pytest.raises(SnaketuneError, match=r"format_version '2\.0', expected '3\.0'"):
        PackedRows(packed, "train")


def test_packing_twice_gives_the_same_bytes(tmp_path, tokenizer):
    one, other = (pack(tmp_path / name, tokenizer, "sft", rows_of("chat", 60)) for name in ("one", "other"))
    assert one.manifest == other.manifest


def test_rows_are_views_into_the_mapped_file_also_over_several_batches(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(stage, "ROWS_PER_SHARD", 3)
    packed = pack(tmp_path, tokenizer, "sft", rows_of("chat", 60))
    assert len(packed.files("train-")) > 1
    train = PackedRows(packed, "train")
    whole = [row for path in packed.files("train-") for row in read_table(path).to_pylist()]
    assert len(train) == len(whole)
    for r, expected in enumerate(whole):
        row = train[r]
        assert not row["input_ids"].flags.owndata
        for name, value in row.items():
            assert value.tolist() == expected[name]
    with pytest.raises(IndexError):
        train[len(train)]


def test_a_split_without_rows_reads_as_none(tmp_path, tokenizer):
    table = pa.Table.from_pylist([{"id": r["id"], "messages": r["messages"]} for r in rows_of("chat", 10)])
    source = artifact(tmp_path / "corpus", {"train.arrow": table, "held_out.arrow": table.slice(0, 0)})
    work = WorkFolder(tmp_path / "work")
    work.start()
    outcome = stage.build(PackSpec(kind="sft", length=256), work, corpus=source, tokenizer=tokenizer)
    manifest = {**outcome.about, "payload": describe_files(work.payload), "records": {}}
    held_out = PackedRows(Artifact(tmp_path / "manifest.json", manifest, work.payload), "held_out")
    assert (len(held_out), held_out.tokens) == (0, 0)


def test_raw_rows_that_trl_would_cut_or_misread_are_dropped_and_counted(tmp_path, tokenizer):
    rows = rows_of("chat", 20)
    rows[0]["messages"][-1]["content"] += " <|im_end|>"
    packed = pack(tmp_path, tokenizer, "sft", rows, strategy="none", length=100)
    counts = packed.manifest["counts"]["train"]
    assert counts["dropped"]["control_token_in_text"] == 1
    assert counts["dropped"]["longer_than_row"] > 0
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
