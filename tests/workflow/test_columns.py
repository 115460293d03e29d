"""Tools, weights of turns and documents through all stages: what is written is supervised, and exclusions are logged."""

import json
import shutil

import pytest

from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer

from .conftest import wrong_modes

pytestmark = pytest.mark.workflow
NOW = [{"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture
def columns(fresh):
    """Rows with tools and weights, documents in two forms, and an SFT run on documents."""
    with (fresh.folder / "data/chat.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for number, row in enumerate(rows):
        row["tools"] = json.dumps(NOW) if number % 2 else None
        first = (
            {"role": "user", "content": f"Say it is {number}."},
            {"role": "assistant", "content": "Unlearned", "weight": 0},
        )
        start = row["messages"][0]["role"] == "system"
        row["messages"][start:start] = first
    (fresh.folder / "data/tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [" ".join(turn["content"] for turn in row["messages"]) + f" <|im_end|> {n}" for n, row in enumerate(rows)]
    (fresh.folder / "data/texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (fresh.folder / "data/book.txt").write_text("\n\n".join(texts[:40]), encoding="utf-8")
    config = fresh.config
    run = config["sft"]["run"]
    config["corpora"] = {
        "tools": {"kind": "conversations", "sources": [{"files": ["data/tools.jsonl"]}], "held_out": 0.2},
        "documents": {
            "kind": "text",
            "sources": [{"files": ["data/texts.jsonl"]}, {"files": ["data/book.txt"]}],
            "held_out": 0.2,
        },
    }
    config["tokenizers"]["small"]["train"]["corpora"] = ["tools", "documents"]
    config["sft"] = {"text": run | {"corpus": "documents", "packing": {"length": 128}}}
    del config["dpo"]
    config["eval"]["both"] |= {"models": ["sft:text"], "conversations": ["tools", "documents"], "preferences": []}
    config["eval"]["both"]["packing"] = {"length": 512}
    return fresh


@pytest.mark.slow
def test_tools_weights_and_documents_pass_all_stages(columns):
    shutil.rmtree(columns.folder / "results", ignore_errors=True)
    columns.umask = 0o077
    said = columns.snakemake()
    assert wrong_modes(columns.folder / "results", columns.umask) == {}
    assert "Traceback" not in said
    (pack,) = columns.folder.glob("results/pack/tools-small-512-*")
    chat = ChatTokenizer.load(columns.folder / "results/tokenizer/small/tokenizer")
    rows = read_table(next(pack.glob("shards/train-*.arrow")))
    ids, labels = rows["input_ids"].to_pylist(), rows["labels"].to_pylist()
    texts = [chat.text(row) for row in ids]
    assert sum(text.count('"name": "now"') for text in texts) > 30
    assert any("Unlearned" in text for text in texts)
    assert not any("Unlearned" in chat.text([id for id in row if id >= 0]) for row in labels)

    (pack,) = columns.folder.glob("results/pack/documents-small-128-*")
    manifest = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"]["train"]["split"]["rows"] and not manifest["counts"]["train"]["truncated"]["rows"]
    rows = read_table(next(pack.glob("shards/train-*.arrow")))
    for row, labels, mask, segments in zip(*(rows[name].to_pylist() for name in
                                              ("input_ids", "labels", "attention_mask", "segment_lengths"))):  # fmt: skip
        # Everything is supervised but the first token of each segment, and padding.
        assert sum(id >= 0 for id in labels) == sum(mask) - len(segments)
        # An <|im_end|> in a text is text, so eos ends each document and occurs nowhere else.
        assert row.count(chat.eos_id) <= len(segments)

    scores = json.loads(columns.read("results/eval/both/sft-text/scores/scores.json"))["conversations"]
    assert scores["documents"]["held_out_loss"] > 0
    assert scores["documents"]["exact_match"]["prompts"] == 0 < scores["tools"]["exact_match"]["prompts"]
    responses = columns.read("results/eval/both/sft-text/scores/responses.jsonl")
    assert "[tools] " in responses and "Say it is" in responses
    # Tokens dropped for rows of 512 are reported by the plan and on both pages, or by none.
    logs = [log.read_text(encoding="utf-8") for log in columns.folder.glob("results/logs/plan/tools-small-512-*.log")]
    pages = [columns.read(f"results/report/pages/{page}.html") for page in ("index", "packing")]
    assert len({"would keep 99%" in text for text in (*logs, *pages)}) == 1
    assert columns.stale() == set()
