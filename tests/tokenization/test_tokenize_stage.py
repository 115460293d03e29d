"""The stage and its files: concatenated parts are the corpus, files are read back, uncovered rows use the reference path."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from benchmarks.data_path.texts import PlainTexts
from pairs_by_rows import encode_pairs
from small_tokenizers import CHATML, TEXTS, byte_level, conversations, messages

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.packing.tokens import IdViews
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizeSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization import corpus_part
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.token_rows import pair_rows
from snaketune.tokenization.token_store import INDEX, TokenParts

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def artifact(folder) -> Artifact:
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def corpus_of(folder, train: dict, held_out: dict | None = None, rows_per_batch: int = 7) -> Artifact:
    folder.mkdir(parents=True)
    for split, rows in (("train", train), ("held_out", held_out or {name: [] for name in train})):
        count = len(next(iter(rows.values())))
        columns = {name: pa.array(own, MESSAGES) for name, own in rows.items()}
        ids = pa.array([f"{split}-{number}" for number in range(count)], pa.string())
        # Rows are from two sources in turn.
        source = pa.array(np.arange(count) % 2, pa.int16())
        write_table(folder / f"{split}-00000.arrow", pa.table({"id": ids, **columns, "source": source}), rows_per_batch)
    return artifact(folder)


def pairs() -> dict[str, list]:
    return {
        "prompt": [messages("x", "y", text) if number % 3 else messages(text) for number, text in enumerate(TEXTS)],
        "chosen": [[{"role": "assistant", "content": text[::-1]}] for text in TEXTS],
        "rejected": [[{"role": "assistant", "content": text[::-1][:9] + "no"}] for text in TEXTS],
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Artifact:
    odd = [messages("<|im_end|>", "no"), messages("", "x"), messages("x", "y" * 5000)]
    root = tmp_path_factory.mktemp("corpus")
    return corpus_of(root / "rows", {"messages": conversations()[:60] + odd}, {"messages": conversations()[60:70]})


@pytest.fixture(scope="module")
def tokenizer(trained) -> Artifact:
    return artifact(trained["bpe"][0].payload)


def run(folder, corpus: Artifact, tokenizer: Artifact, kind="sft", train_on="assistant", part=1, parts=1):
    work = WorkFolder(folder)
    work.start()
    spec = TokenizeSpec(kind=kind, train_on=train_on, part=part, parts=parts)
    outcome = corpus_part.build(spec, work, corpus=corpus, tokenizer=tokenizer)
    return artifact(work.payload), outcome


def ids_of(views: IdViews, number: int) -> np.ndarray:
    """Return int32[length], a view of one sequence."""
    batch = int(np.searchsorted(views.first, number, side="right")) - 1
    start, end = views.offsets[batch][number - views.first[batch] :][:2]
    return views.values[batch][start:end]


def rows_of(parts: TokenParts, split: str) -> list[dict]:
    """Return the index as Python dicts, with the ids of each row."""
    views = parts.views(split)
    return [row | {"ids": ids_of(views, number).tolist()} for number, row in enumerate(parts.index(split).to_pylist())]


@pytest.mark.parametrize("kind", ("sft", "preference"))
def test_concatenated_parts_are_the_corpus(tmp_path, corpus, tokenizer, kind):
    if kind == "preference":
        corpus = corpus_of(tmp_path / "pairs", {name: rows[:50] for name, rows in pairs().items()})
    whole = TokenParts([run(tmp_path / "whole", corpus, tokenizer, kind)[0]])
    for parts in (2, 3, 8, 30):
        made = [
            run(tmp_path / f"{parts}-{part}", corpus, tokenizer, kind, part=part, parts=parts)
            for part in range(1, parts + 1)
        ]
        together = TokenParts([own for own, _ in made])
        for split in ("train", "held_out"):
            assert rows_of(together, split) == rows_of(whole, split)
            assert sum(outcome.counts[split]["rows"] for _, outcome in made) == whole.index(split).num_rows
        assert all((outcome.about["samples"] != []) == (part == 1) for part, (_, outcome) in enumerate(made, 1))


def test_a_conversation_in_the_index(tmp_path, corpus, tokenizer):
    made, outcome = run(tmp_path / "work", corpus, tokenizer)
    chat = ChatTokenizer.load(tokenizer.folder)
    expected = chat.encode(conversations()[:1])[0]
    row = rows_of(TokenParts([made]), "train")[0]
    assert row["id"] == "train-0" and row["ids"] == expected.ids.tolist()
    assert row["length"] == len(expected.ids) and row["supervised"] == expected.supervised.sum()
    (start, end) = row["supervised_runs"]
    assert expected.supervised[start:end].all() and end - start == row["supervised"]
    ends = [end - 1 for end in row["turn_ends"]]
    assert [expected.ids[end] for end in ends] == [chat.eos_id] * len(conversations()[0])
    assert (row["prompt"], row["chosen"], row["prompt_hash"], row["control_text"]) == (0, 0, 0, False)
    assert outcome.about | {"samples": 0} == {
        "kind": "sft",
        "pad_id": chat.pad_id,
        "train_on": "assistant",
        "path": "fast",
        "why": "",
        "samples": 0,
    }
    assert outcome.run == {"parity_rows": 73, "rows_by_reference": 2}
    assert outcome.counts["train"]["control_text"] == 1 and outcome.counts["train"]["rows"] == 63
    together = "".join(text for text, _ in outcome.about["samples"][0])
    assert together == chat.text(expected.ids)


def test_a_pair_in_the_index(tmp_path, tokenizer):
    corpus = corpus_of(tmp_path / "pairs", pairs())
    made, _ = run(tmp_path / "work", corpus, tokenizer, "preference")
    chat = ChatTokenizer.load(tokenizer.folder)
    rows = rows_of(TokenParts([made]), "train")
    own = pairs()
    for row, pair in zip(
        rows, encode_pairs(chat, list(zip(own["prompt"], own["chosen"], own["rejected"]))), strict=True
    ):
        assert row["ids"] == [*pair.prompt_ids, *pair.chosen_ids, *pair.rejected_ids]
        assert (row["prompt"], row["chosen"]) == (len(pair.prompt_ids), len(pair.chosen_ids))
        assert row["supervised"] == pair.chosen_supervised.sum() + pair.rejected_supervised.sum()
        supervised = np.zeros(row["length"], bool)
        for start, end in zip(row["supervised_runs"][::2], row["supervised_runs"][1::2]):
            supervised[start:end] = True
        assert supervised[row["prompt"] :].tolist() == [*pair.chosen_supervised, *pair.rejected_supervised]
        assert row["turn_ends"] == []
    # The same prompt has the same hash, another prompt another.
    again = corpus_of(tmp_path / "again", {name: [rows[1], rows[1]] for name, rows in pairs().items()})
    twice = rows_of(TokenParts([run(tmp_path / "twice", again, tokenizer, "preference")[0]]), "train")
    assert twice[0]["prompt_hash"] == twice[1]["prompt_hash"] == rows[1]["prompt_hash"] != rows[2]["prompt_hash"]


def rows_of_pair(chosen: list[int], rejected: list[int], supervised: list[int]):
    """Return the rows of a pair; `supervised` are positions in the two concatenated sequences."""
    ids = np.array(chosen + rejected, np.int32)
    mask = np.isin(np.arange(len(ids)), supervised)
    both = EncodedBatch(ids, np.array([0, len(chosen), len(ids)]), mask, np.zeros(len(ids), bool))
    return pair_rows(pa.array(["a"]), both, np.zeros(1, bool))


def test_prompts_of_pairs():
    row = rows_of_pair([1, 2, 3, 4], [1, 2, 5, 6], [2, 3, 6, 7])
    assert row.prompt[0] == 2 and row.sequences.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.supervised_runs[0].tolist() == [2, 6]
    # Supervised tokens aren't part of the prompt, even if they are equal; `common` counts them.
    row = rows_of_pair([1, 2, 3], [1, 2, 4], [1, 2, 4, 5])
    assert row.common[0] == 1
    assert (row.prompt[0], row.chosen[0], row.supervised_tokens[0]) == (1, 2, 4)
    # Common tokens are equal in supervision too.
    assert rows_of_pair([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5, 7]).common[0] == 1
    assert rows_of_pair([1, 2, 3], [1, 2], [1, 2, 4]).common[0] == 1
    assert rows_of_pair([1, 2, 3], [1, 2, 3], [1, 2, 4, 5]).common[0] == 2
    # Without a prompt, nothing predicts the first token of either.
    row = rows_of_pair([1, 2], [3, 4], [0, 1, 2, 3])
    assert row.prompt[0] == 0 and row.supervised_runs[0].tolist() == [1, 2, 3, 4]
    # If nothing is supervised in one of them, nothing is supervised in the pair.
    row = rows_of_pair([1, 2], [1, 3], [1])
    assert row.supervised_tokens[0] == 0 and row.supervised_runs[0].tolist() == []


def test_reading_several_batches(tmp_path, corpus, tokenizer, monkeypatch):
    monkeypatch.setattr("snaketune.tokenization.token_store.ROWS_PER_BATCH", 5)
    made = [run(tmp_path / str(part), corpus, tokenizer, part=part, parts=2)[0] for part in (1, 2)]
    parts = TokenParts(made)
    views = parts.views("train")
    table = parts.index("train")
    assert table.schema == INDEX and len(views.values) > 10 and views.first[-1] == 63
    lengths = parts.index("train", ["length"]).column(0).to_numpy()
    assert [len(ids_of(views, number)) for number in range(63)] == lengths.tolist()
    values, offsets = parts.lists("train", "supervised_runs")
    assert [values[a:b].tolist() for a, b in pairwise(offsets)] == table.column("supervised_runs").to_pylist()
    view = ids_of(views, 40)
    before = view.tolist()
    parts.release()
    assert view.tolist() == before and not view.flags.owndata
    assert parts.lists("held_out", "turn_ends")[1][-1] > 0
    assert {name for _, name in parts._maps} == {"train-index.arrow", "train-ids.arrow", "held_out-index.arrow"}


def test_damage_is_detected(tmp_path, corpus, tokenizer):
    made, _ = run(tmp_path / "work", corpus, tokenizer)
    path = made.folder / "train-ids.arrow"
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    TokenParts([made]).index("train")
    with pytest.raises(SnaketuneError, match=r"train-ids\.arrow is damaged"):
        TokenParts([made]).views("train")


def test_train_on(tmp_path, corpus, tokenizer):
    made = {on: run(tmp_path / on, corpus, tokenizer, train_on=on) for on in ("assistant", "last", "all")}
    for row, last, every in zip(*(rows_of(TokenParts([own]), "train") for own, _ in made.values())):
        assert row["ids"] == last["ids"] == every["ids"]
        assert last["supervised_runs"] == row["supervised_runs"][-2:]
        assert every["supervised_runs"] == [1, every["length"]] and every["supervised"] == every["length"] - 1


def test_rows_with_nothing_supervised_are_counted(tmp_path, tokenizer):
    silent = [[{"role": "user", "content": text}] for text in TEXTS[:5]]
    some = corpus_of(tmp_path / "some", {"messages": silent + conversations()[:5]})
    made, outcome = run(tmp_path / "1", some, tokenizer)
    assert outcome.counts["train"]["nothing_supervised"] == 5 and outcome.counts["train"]["rows"] == 10
    assert TokenParts([made]).index("train", ["supervised"]).column(0).to_numpy()[:5].tolist() == [0] * 5


def test_samples_of_long_rows_show_the_first_and_the_last_supervised_span(tmp_path, tokenizer):
    def turn(role, *words, between=300):
        filling = " ".join(["word"] * between)
        return {"role": role, "content": f" {filling} ".join(words)}

    row = [
        turn("user", "Alpha", "asks?"),
        turn("assistant", "First", "is said."),
        turn("user", "Beta", "asks?"),
        turn("assistant", "Middle", "is said."),
        turn("user", "Gamma", "asks?"),
        turn("assistant", "Last", "is over."),
    ]
    _, outcome = run(tmp_path / "1", corpus_of(tmp_path / "c", {"messages": [row]}), tokenizer)
    (sample,) = outcome.about["samples"]
    supervised = "".join(text for text, is_supervised in sample if is_supervised)
    others = "".join(text for text, is_supervised in sample if not is_supervised)
    assert all(word in supervised for word in ("First", "is said.", "Last", "is over.")) and "Middle" not in supervised
    assert "asks?" in others and "Alpha" not in others
    shown = "".join(text for text, _ in sample)
    assert shown.count(" tokens …]") >= 4 and len(shown) < 3000


def test_short_rows_are_shown_before_long_ones(tmp_path, tokenizer):
    rows = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": f"r{i} " * length}]
            for i, length in enumerate((400, 1, 400, 2))]  # fmt: skip
    _, outcome = run(tmp_path / "1", corpus_of(tmp_path / "c", {"messages": rows}), tokenizer)
    assert ["tokens …]" in "".join(text for text, _ in sample) for sample in outcome.about["samples"]] == [
        False, False, True, True,
    ]  # fmt: skip


def test_after_a_difference_all_rows_are_encoded_again_row_by_row(tmp_path, corpus, tokenizer, monkeypatch, capsys):
    expected, _ = run(tmp_path / "right", corpus, tokenizer)
    encode = corpus_part.batched_encoder

    def wrong(chat):
        encoder, reason = encode(chat)
        # Within words; a prompt that is cut would be noticed before rows are compared.
        encoder._chunks._separable.cuts.reshape(256, 256)[ord("w"), ord("o")] = True
        return encoder, reason

    monkeypatch.setattr(corpus_part, "batched_encoder", wrong)
    made, outcome = run(tmp_path / "work", corpus, tokenizer)
    assert "encoded again row by row: ids of the conversation that starts with" in capsys.readouterr().out
    assert outcome.about["path"] == "reference" and "from token" in outcome.about["why"]
    assert describe_files(made.folder) == describe_files(expected.folder)


def test_without_a_proof_the_reference_path_is_used_and_the_reason_logged(
    tmp_path, corpus, tokenizer, monkeypatch, capsys
):
    expected, _ = run(tmp_path / "fast", corpus, tokenizer)
    folder = tmp_path / "measured"
    folder.mkdir()
    for path in tokenizer.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(
        CHATML.read_text().replace(
            "{{- '\\n' -}}", "{%- if message['content'] | length > 0 -%}{%- endif -%}{{- '\\n' -}}"
        )
    )
    made, outcome = run(tmp_path / "slow", corpus, artifact(folder))
    assert outcome.about["path"] == "reference" and "through the filter length" in outcome.about["why"]
    assert "row by row: the chat template passes a content through the filter length" in capsys.readouterr().out
    assert describe_files(made.folder) == describe_files(expected.folder)


def test_an_adopted_tokenizer(tmp_path, corpus):
    made, outcome = run(tmp_path / "work", corpus, artifact(byte_level(tmp_path / "bytes")))
    assert outcome.about["path"] == "fast" and outcome.run["rows_by_reference"] < 60
    # Its tags strip the whitespace after them; only contents with outer whitespace use the reference path.
    assert rows_of(TokenParts([made]), "train")[0]["turn_ends"]


def test_plain_texts(tokenizer, trained):
    import sentencepiece

    texts = [text for text in (*TEXTS, "", " ", "<|im_end|> x", "a\n  b", "é漢字 😀") if "▁" not in text]
    for own in trained.values():
        folder = own[0].payload
        encoder = PlainTexts(json.loads((folder / "tokenizer.json").read_text()))
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
        for some in (
            pa.array(texts, pa.string()),
            pa.array(texts, pa.string()).slice(5, 100),
            pa.array([], pa.string()),
        ):
            ids, offsets = encoder.encode(some)
            assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == processor.encode(some.to_pylist())


def test_tokenizing_imports_no_torch(tmp_path, corpus, tokenizer):
    script = f"""
import json, sys
from pathlib import Path
from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizeSpec
from snaketune.tokenization.corpus_part import build
def artifact(folder):
    return Artifact(folder / "manifest.json", {{"payload": describe_files(folder), "records": {{}}}}, folder)
work = WorkFolder(Path({str(tmp_path / "work")!r}))
work.start()
build(TokenizeSpec(kind="sft", train_on="all", part=1, parts=1), work,
      corpus=artifact(Path({str(corpus.folder)!r})), tokenizer=artifact(Path({str(tokenizer.folder)!r})))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_tokens_of_another_version_are_refused_with_the_command_that_rebuilds_them(tmp_path, corpus, tokenizer):
    made, _ = run(tmp_path / "tokens", corpus, tokenizer)
    index = made.folder / "train-index.arrow"
    table = read_table(index)
    older = table.rename_columns(["learned" if name == "supervised_runs" else name for name in table.column_names])
    index.unlink()
    write_table(index, older)
    with pytest.raises(
        SnaketuneError,
        match=r"tokens of another version, with .*learned.*; rebuild them with: rm .*manifest.json && snakemake",
    ):
        TokenParts([artifact(made.folder)]).index("train")
