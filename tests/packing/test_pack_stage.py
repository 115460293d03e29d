"""From a corpus artifact to shards: the columns, counts that add up, and no sequence lost or without labels."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.packing.shards import IGNORED, list_columns, schema
from snaketune.errors import SnaketuneError
from snaketune.packing import shard_writer
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.vocabulary import build as build_tokenizer
from tests.packing import chain
from tests.packing.chain import ROOT, rows_of
from tests.packing.made_pairs import read_back

TEMPLATE = ROOT / "resources/chat_templates/chatml.jinja"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("pack")
    work = WorkFolder(folder / "work")
    work.start()
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=0.9995, split_digits=True)
    corpora = [chain.corpus(folder / "c", "sft", rows_of("chat", 200))]
    build_tokenizer(spec, work, corpora=corpora, chat_template=[TEMPLATE], base=[])
    return Artifact(folder / "manifest.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)


@pytest.fixture
def pack(tokenizer, tmp_path) -> Callable[..., Artifact]:
    """A function that packs rows, the last five of them held out, in a new folder per call."""
    calls = iter(range(99))

    def packed(kind: str, rows: list[dict], parts: int = 1, held_out: int = 5, **settings) -> Artifact:
        folder = tmp_path / str(next(calls))
        return chain.pack(
            folder, chain.corpus(folder / "corpus", kind, rows, held_out), tokenizer, kind, parts, **settings
        )

    return packed


def test_sft_rows_hold_every_conversation_whole_and_supervise_only_the_assistant(pack, tokenizer):
    rows = rows_of("chat", 60)
    packed = pack("sft", rows)
    chat = ChatTokenizer.load(tokenizer.folder)
    assert read_table(packed.file("train-00000.arrow")).schema == schema(256, list_columns("sft", "3.0"))
    assert packed.manifest["format_version"] == "3.0"
    train = open_rows(packed, "train")
    masks = read_table(packed.file("train-00000.arrow"))["attention_mask"].to_pylist()
    listed = list(documents(packed, "train"))
    assert sorted(document["id"] for document in listed) == sorted(row["id"] for row in rows[:-5])
    by_row: dict[int, list[str]] = {}
    for document in listed:
        by_row.setdefault(document["row"], []).append(document["id"])
    by_id = {row["id"]: row for row in rows}
    for r, ids in by_row.items():
        row, at = train[r], 0
        assert sum(masks[r]) == row["segment_lengths"].sum()
        for name, length in zip(ids, row["segment_lengths"], strict=True):
            encoded = chat.encode([by_id[name]["messages"]])[0]
            assert row["input_ids"][at : at + length].tolist() == encoded.ids.tolist()
            labels = row["labels"][at : at + length]
            assert (labels != IGNORED).tolist() == encoded.supervised.tolist()
            assert labels[labels != IGNORED].tolist() == encoded.ids[encoded.supervised].tolist()
            said = [m["content"] for m in by_id[name]["messages"] if m["role"] == "assistant"]
            assert chat.decode(labels[labels != IGNORED]) == "".join(said)
            assert chat.stop_ids[0] in labels
            at += length
        assert (row["labels"][at:] == IGNORED).all()
        assert (row["input_ids"][at:] == chat.pad_id).all()


def test_counts_add_up_and_drops_are_counted_in_rows_and_tokens(pack, tokenizer):
    rows = rows_of("chat", 60)
    packed = pack("sft", rows, length=64)
    counts = packed.manifest["counts"]["train"]
    assert counts["read"] == 55 == counts["kept"] + counts["dropped"]["longer_than_row"]
    lengths = [len(e.ids) for e in ChatTokenizer.load(tokenizer.folder).encode([r["messages"] for r in rows[:-5]])]
    assert counts["dropped"]["longer_than_row"] == sum(n > 64 for n in lengths) > 0
    assert counts["dropped_tokens"]["longer_than_row"] == sum(n for n in lengths if n > 64)
    assert counts["tokens"] == sum(n for n in lengths if n <= 64) == open_rows(packed, "train").tokens
    metadata = packed.manifest["packing_metadata"]
    assert metadata["rows"] >= metadata["lower_bound_rows"]
    assert metadata["packing_efficiency"] == round(100 * counts["tokens"] / (64 * metadata["rows"]), 3)


def test_overflow_raise_names_the_conversation(pack, tokenizer):
    with pytest.raises(SnaketuneError, match=r"conversation \d+ has \d+ tokens, packing.length is 32"):
        pack("sft", rows_of("chat", 20), length=32, overflow="raise")


def test_a_split_without_any_packable_row_is_refused_with_the_reasons(pack):
    with pytest.raises(
        SnaketuneError, match=r"no train row of 15 can be packed into 8 tokens: {'longer_than_row': 15}"
    ):
        pack("sft", rows_of("chat", 20), length=8)


def check_pairs(packed: Artifact, chat: ChatTokenizer, rows: list[dict]) -> None:
    """Check that every pair is packed as two conversations in which only completions are supervised, without the line break
    after the last turn, from which nothing is learned."""
    by_id, packed_pairs = {row["id"]: row for row in rows}, read_back(packed)
    assert packed_pairs.keys() == by_id.keys()
    for name, both in packed_pairs.items():
        pair = by_id[name]
        context = len(chat.encode([pair["prompt"]])[0].ids)
        for side, tokens in zip(("chosen", "rejected"), both, strict=True):
            whole = chat.encode([pair["prompt"] + pair[side]])[0]
            spans = [(start, end) for start, end in whole.spans if start >= context]
            supervised = whole.mask(spans)
            end = np.flatnonzero(supervised)[-1] + 1
            assert len(whole.ids) == end + 1
            assert tokens == tuple(zip(whole.ids[:end].tolist(), supervised[:end].tolist()))


def test_pairs_share_their_prompt_and_are_never_split(pack, tokenizer):
    rows = rows_of("preferences", 40)
    packed = pack("preference", rows, held_out=0)
    assert packed.manifest["kind"] == "preference"
    assert packed.manifest["format_version"] == "3.1"
    assert read_table(packed.file("train-00000.arrow")).schema == schema(256, list_columns("preference", "3.1"))
    check_pairs(packed, ChatTokenizer.load(tokenizer.folder), rows)
    counts = packed.manifest["counts"]["train"]
    assert counts["dropped_tokens"] == {"after_last_supervised": 2 * len(rows)}
    shared = counts["shared_prompt_tokens"] + counts["shared_answer_tokens"]
    assert counts["read_tokens"] == counts["tokens"] + shared + 2 * len(rows)


@pytest.mark.parametrize(("kind", "name"), [("preference", "preferences"), ("sft", "chat")])
def test_documents_list_the_source_of_each(pack, kind, name):
    rows = [row | {"source": number % 3} for number, row in enumerate(rows_of(name, 20))]
    packed = pack(kind, rows, held_out=4)
    for split, own in (("train", rows[:-4]), ("held_out", rows[-4:])):
        assert {document["id"]: document["source"] for document in documents(packed, split)} == {
            row["id"]: row["source"] for row in own
        }


def test_pairs_of_an_older_format_are_refused_with_the_command_that_rebuilds_them(pack):
    packed = pack("preference", rows_of("preferences", 20))
    older = replace(packed, manifest=packed.manifest | {"format_version": "3.0"})
    with pytest.raises(
        SnaketuneError, match=r"'3\.0', expected '3\.1'; rebuild it with: rm .*manifest.json && snakemake"
    ):
        open_rows(older, "train")


def test_the_completions_of_a_row_are_those_of_its_pairs(pack):
    packed = pack("preference", rows_of("preferences", 40))
    train, listed = open_rows(packed, "train"), list(documents(packed, "train"))
    for r in range(len(train)):
        row = train[r]
        assert row["completions"].dtype == row["prefix_segments"].dtype == np.int32
        assert len(row["completions"]) == 2 * sum(document["row"] == r for document in listed)
    blank = train.blank(8)
    assert (len(blank["completions"]), len(blank["prefix_segments"])) == (0, 0)


def test_raw_rows_are_format_2_and_refused_by_the_packed_reader(pack, tokenizer):
    packed = pack("sft", rows_of("chat", 20), strategy="none")
    assert packed.manifest["format_version"] == "2.0"
    assert packed.manifest["packing_metadata"]["enabled"] is False
    assert read_table(packed.file("train-00000.arrow")).num_rows == 15
    with pytest.raises(SnaketuneError, match=r"format_version '2\.0', expected '3\.0'"):
        open_rows(packed, "train")


def test_raw_rows_with_turns_of_weight_0_are_refused(pack):
    rows = [
        {**row, "messages": [turn | {"supervised": True} for turn in row["messages"]]} for row in rows_of("chat", 20)
    ]
    assert pack("sft", rows, strategy="none").manifest["counts"]["train"]["kept"] == 15
    rows[3]["messages"][-1]["supervised"] = False
    with pytest.raises(SnaketuneError, match="another weight than 1, and TRL's trainer would learn them"):
        pack("sft", rows, strategy="none")


def test_rows_are_views_into_the_mapped_files_of_several_batches_and_shards(pack, monkeypatch):
    monkeypatch.setattr(shard_writer, "TOKENS_PER_SHARD", 3 * 256)
    monkeypatch.setattr(shard_writer, "TOKENS_PER_BATCH", 2 * 256)
    packed = pack("sft", rows_of("chat", 60))
    assert len(packed.files("train-")) > 1
    train = open_rows(packed, "train")
    whole = [row for path in packed.files("train-") for row in read_table(path).to_pylist()]
    assert len(train) == len(whole)
    for r, expected in enumerate(whole):
        row = train[r]
        assert not row["input_ids"].flags.owndata
        for name, value in row.items():
            assert value.tolist() == expected[name]
    with pytest.raises(IndexError):
        train[len(train)]


SETTINGS = {
    "packed": {},
    "short rows": {"length": 96, "overflow": "truncate"},
    "several lengths": {"length": [64, 128, 256], "overflow": "split"},
    "wrapped": {"length": 64, "strategy": "wrapped", "train_on": "all"},
    "raw": {"strategy": "none", "length": 128},
    "last turn": {"length": 80, "overflow": "split", "train_on": "last"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_result_is_the_same_whatever_the_parts(pack, settings, monkeypatch):
    monkeypatch.setattr(shard_writer, "TOKENS_PER_SHARD", 4 * 256)
    rows = rows_of("chat", 80)
    one, two, eight = (pack("sft", rows, parts, **settings).manifest for parts in (1, 2, 8))
    assert len(one["payload"]) > 3
    assert one == two == eight


def test_pairs_are_the_same_whatever_the_parts(pack):
    rows = rows_of("preferences", 60)
    rows += [{**row, "id": f"{row['id']}x", "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:40]]
    one, two, eight = (pack("preference", rows, parts).manifest for parts in (1, 2, 8))
    assert one["counts"]["train"]["shared_prompt_tokens"] > 0
    assert one == two == eight


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_row_and_token_is_accounted_for(pack, settings):
    packed = pack("sft", rows_of("chat", 60), **settings)
    for split in ("train", "held_out"):
        counts = packed.manifest["counts"][split]
        assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
        lost = sum(counts["dropped_tokens"].values()) + counts["truncated"]["tokens"]
        assert counts["read_tokens"] == counts["tokens"] + lost
        if settings.get("strategy") == "none":
            continue
        rows = open_rows(packed, split)
        assert counts["tokens"] == rows.tokens
        labelled = sum(int((rows[r]["labels"] != IGNORED).sum()) for r in range(len(rows)))
        listed = list(documents(packed, split))
        assert counts["supervised_tokens"] == labelled == sum(document["supervised"] for document in listed)
        assert counts["pieces"] == len(listed)
        for r in range(len(rows)):
            own = [document["tokens"] for document in listed if document["row"] == r]
            assert rows[r]["segment_lengths"].tolist() == own


def test_all_parts_of_a_split_conversation_are_packed(pack, tokenizer):
    rows = rows_of("chat", 40)
    packed = pack("sft", rows, length=40, overflow="split", train_on="all")
    assert packed.manifest["counts"]["train"]["split"]["rows"] > 0
    train, texts, at = open_rows(packed, "train"), {}, {}
    for document in documents(packed, "train"):
        start = at.get(document["row"], 0)
        ids = train[document["row"]]["input_ids"][start : start + document["tokens"]]
        at[document["row"]] = start + document["tokens"]
        texts.setdefault(document["id"], []).append(ids.tolist())
    chat = ChatTokenizer.load(tokenizer.folder)
    missing = 0
    for row in rows[:-5]:
        whole = "".join(map(chr, chat.encode([row["messages"]])[0].ids))
        # The parts are in the order of the rows, not in that of the conversation.
        for part in texts[row["id"]]:
            assert len(part) <= 40
            assert "".join(map(chr, part)) in whole
        missing += len(whole) - sum(map(len, texts[row["id"]]))
    assert missing == sum(packed.manifest["counts"]["train"]["dropped_tokens"].values())


def test_pairs_of_one_prompt_share_it(pack, tokenizer):
    rows = rows_of("preferences", 30)
    swapped = [{**r, "id": f"{r['id']}x", "chosen": r["rejected"], "rejected": r["chosen"]} for r in rows]
    once, twice = pack("preference", rows, held_out=0), pack("preference", rows + swapped, held_out=0)
    check_pairs(twice, ChatTokenizer.load(tokenizer.folder), rows + swapped)
    # The same completions the other way round add no token.
    assert twice.manifest["counts"]["train"]["tokens"] == once.manifest["counts"]["train"]["tokens"]
    assert twice.manifest["counts"]["train"]["shared_prompt_tokens"] > 0
    assert twice.manifest["packing_metadata"]["pairs_per_row"]["min"] >= 2


def test_a_killed_write_resumes_with_the_missing_shards(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "TOKENS_PER_SHARD", 2 * 256)
    rows = chain.corpus(tmp_path / "corpus", "sft", rows_of("chat", 60))
    whole = chain.pack(tmp_path / "whole", rows, tokenizer, "sft").manifest["payload"]
    write_packed, written, lives = shard_writer._write_packed, [], 2

    def dies(builder, manifest, shard, path):
        if len(written) == lives:
            raise KeyboardInterrupt
        write_packed(builder, manifest, shard, path)
        written.append(shard.name)

    monkeypatch.setattr(shard_writer, "_write_packed", dies)
    with pytest.raises(KeyboardInterrupt):
        chain.pack(tmp_path / "killed", rows, tokenizer, "sft")
    before, lives = list(written), 999
    assert chain.pack(tmp_path / "killed", rows, tokenizer, "sft").manifest["payload"] == whole
    assert len(before) == 2
    assert len(written) == len(set(written)) == len(whole) - 1


def test_the_counts_of_dropped_rows_are_part_of_a_plans_content(tokenizer, tmp_path):
    rows = rows_of("chat", 20)
    long = {"id": "z", "messages": [{"role": "user", "content": "x" * 900}, {"role": "assistant", "content": "y"}]}
    plans = []
    for name, some in (("without", rows), ("with", [*rows, long])):
        chain.pack(tmp_path / name, chain.corpus(tmp_path / f"{name}-rows", "sft", some, 0), tokenizer, "sft")
        plans.append(describe_files(tmp_path / name / "plan/payload.partial"))
    assert plans[0]["train-pieces.arrow"] == plans[1]["train-pieces.arrow"]
    assert plans[0] != plans[1]


def test_a_split_without_rows_reads_as_none(pack):
    held_out = open_rows(pack("sft", rows_of("chat", 10), held_out=0), "held_out")
    assert (len(held_out), held_out.tokens) == (0, 0)


def test_raw_rows_that_trl_would_cut_or_misread_are_dropped_and_counted(pack, tokenizer):
    rows = rows_of("chat", 20)
    rows[0]["messages"][-1]["content"] += " <|im_end|>"
    packed = pack("sft", rows, strategy="none", length=100)
    counts = packed.manifest["counts"]["train"]
    assert counts["dropped"]["control_token_in_text"] == 1
    assert counts["dropped"]["longer_than_row"] > 0
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())
