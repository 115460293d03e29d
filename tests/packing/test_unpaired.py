"""Labelled completions are packed with the completion of an earlier row under their prompt, and both are read back."""

import tempfile
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.packing.shards import documents_schema, list_columns, schema
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.specs import PackSpec, TokenizerSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encoded_rows import concatenated
from snaketune.tokenization.token_rows import completion_rows
from snaketune.tokenization.token_store import TokenWriter
from snaketune.tokenization.vocabulary import build as build_tokenizer
from tests.packing import chain
from tests.packing.chain import ROOT, pack_tokens, rows_of
from tests.packing.made_pairs import Token, encoded, read_back, up_to_supervised

Made = tuple[tuple[int, ...], tuple[Token, ...], bool]


def tokenized(folder: Path, rows: list[Made]) -> Artifact:
    folder.mkdir(parents=True)
    counts = {split: {"rows": 0, "tokens": 0} for split in ("train", "held_out")}
    with TokenWriter(folder, "held_out"), TokenWriter(folder, "train") as writer:
        for number in range(0, len(rows), 3):
            some = rows[number : number + 3]
            both = concatenated(
                [encoded([(token, False) for token in prompt] + list(completion)) for prompt, completion, _ in some]
            )
            names = pa.array([str(number + at) for at in range(len(some))], pa.string())
            made = completion_rows(names, both, pa.array([label for *_, label in some]), np.zeros(len(some), bool))
            counts["train"]["rows"] += len(some)
            counts["train"]["tokens"] += len(made.sequences.ids)
            writer.write(made)
    manifest = {"payload": describe_files(folder), "records": {}, "counts": counts, "pad_id": 0}
    return Artifact(folder.parent / "tokens.json", manifest, folder)


def packed(folder: Path, rows: list[Made], length: int = 64, overflow: str = "drop") -> Artifact:
    spec = PackSpec(kind="unpaired", length=length, overflow=overflow)
    return pack_tokens(folder, [tokenized(folder / "tokens", rows)], spec)


def row(prompt: str, completion: str, label: bool = True) -> Made:
    """Letters are tokens; of a completion, capital ones are supervised."""
    return tuple(map(ord, prompt)), tuple((ord(letter.lower()), letter.isupper()) for letter in completion), label


def whole(prompt: tuple[int, ...], completion: tuple[Token, ...]) -> tuple[Token, ...]:
    """Return the packed part of the sequence."""
    return up_to_supervised(tuple((token, False) for token in prompt) + completion)


made_rows = st.lists(
    st.builds(
        row, st.sampled_from(["p", "pq", "rst"]), st.from_regex("[AB][ABab]{0,6}", fullmatch=True), st.booleans()
    ),
    min_size=1,
    max_size=9,
)


def longest_prompt_run(prompts: list[tuple[int, ...]]) -> int:
    """The longest run of one prompt around the circle of rows; 1 if there is but one prompt."""
    if len(set(prompts)) == 1:
        return 1
    return max(len(list(same)) for _, same in groupby(2 * prompts))


@settings(deadline=None, max_examples=30)
@given(made_rows)
def test_each_completion_is_paired_with_an_earlier_one_under_its_own_prompt(rows):
    with tempfile.TemporaryDirectory() as folder:
        made = packed(Path(folder), rows)
        found = read_back(made)
        distance = longest_prompt_run([prompt for prompt, *_ in rows])
        for number, (prompt, completion, _) in enumerate(rows):
            assert found[str(number)] == [whole(prompt, completion), whole(prompt, rows[number - distance][1])]
        assert {document["id"]: document["label"] for document in documents(made, "train")} == {
            str(number): label for number, (*_, label) in enumerate(rows)
        }


@settings(deadline=None, max_examples=30)
@given(made_rows, st.integers(8, 16), st.sampled_from(["drop", "truncate"]))
def test_every_token_is_accounted_for_and_completions_that_fit_are_whole(rows, length, overflow):
    with tempfile.TemporaryDirectory() as folder:
        made = packed(Path(folder), [*rows, row("p", "A")], length, overflow)
        found, counts = read_back(made), made.manifest["counts"]["train"]
        lost = sum(counts["dropped_tokens"].values()) + counts["truncated"]["tokens"]
        shared = counts["shared_prompt_tokens"] + counts["shared_answer_tokens"]
        assert counts["read_tokens"] + counts["mismatched_tokens"] == counts["tokens"] + lost + shared
        assert counts["tokens"] == open_rows(made, "train").tokens
        assert counts["read"] == len(found) + sum(counts["dropped"].values())
        for number, (prompt, completion, _) in enumerate(rows):
            own = whole(prompt, completion)
            if str(number) not in found:
                # There is no space for the first token of a mismatched completion.
                assert len(own) >= length
                continue
            first, second = found[str(number)]
            assert first == own[: len(first)]
            if len(own) < length:
                assert first == own
            assert any(supervised for _, supervised in second)


def test_a_mismatched_completion_gets_the_free_space_of_its_row(tmp_path):
    rows = [row("p", "ABABABAB"), row("q", "CDCD"), row("r", "EEEEEEEEEEEE")]
    made = packed(tmp_path, rows, length=12)
    found, counts = read_back(made), made.manifest["counts"]["train"]
    assert "2" not in found and counts["dropped"] == {"longer_than_row": 1}
    assert found["0"] == [whole(*rows[0][:2]), whole((ord("p"),), rows[2][1][:3])]
    assert found["1"] == [whole(*rows[1][:2]), whole((ord("q"),), rows[0][1][:7])]
    assert counts["truncated"] == {"rows": 0, "tokens": 0}
    with pytest.raises(SnaketuneError, match=r"pair 2 has \d+ tokens, packing\.length is 12"):
        packed(tmp_path / "raise", rows, length=12, overflow="raise")


@pytest.mark.parametrize(
    ("own", "retained", "other"), [(11, 11, 2), (13, 13, 2), (14, 14, 1), (15, 14, 1), (20, 14, 1)]
)
def test_a_completion_is_cut_to_the_row_without_prompt_and_mismatched_token(tmp_path, own, retained, other):
    rows = [row("p", "A" * own), row("q", "BC")]
    made = packed(tmp_path, rows, length=16, overflow="truncate")
    first, second = read_back(made)["0"]
    assert (len(first), len(second)) == (1 + retained, 1 + other)
    assert made.manifest["counts"]["train"]["truncated"] == {"rows": int(own > retained), "tokens": own - retained}


def test_no_completion_is_paired_with_an_answer_to_its_own_prompt(tmp_path):
    """Good and bad completions of a prompt in neighbouring rows, and a prompt with three rows: a mismatched completion that
    answered its prompt wouldn't measure how far the policy has moved on other prompts."""
    rows = [row("p", "AB"), row("p", "CD", False), row("q", "EF"), row("q", "GH", False), *[row("r", "IJ")] * 3]
    found = read_back(packed(tmp_path, rows))
    answers = {completion for _, completion, _ in rows}
    for number, (prompt, _, _) in enumerate(rows):
        second = found[str(number)][1][len(prompt) :]
        assert second in answers - {completion for other, completion, _ in rows if other == prompt}
    assert {pair[1][1:] for pair in found.values()} == answers


def test_a_single_completion_is_paired_with_itself(tmp_path):
    made = packed(tmp_path, [row("p", "AB")])
    (only,) = (open_rows(made, "train")[0],)
    assert (only["segment_lengths"].tolist(), only["completions"].tolist()) == ([3], [0, 0])


def test_completions_without_supervised_tokens_are_dropped_and_not_used_as_mismatched(tmp_path):
    rows = [row("p", "AB"), row("p", "ab"), row("q", "CD")]
    made = packed(tmp_path, rows)
    assert made.manifest["counts"]["train"]["dropped"] == {"nothing_supervised": 1}
    assert read_back(made) == {
        "0": [whole(*rows[0][:2]), whole((ord("p"),), rows[2][1])],
        "2": [whole(*rows[2][:2]), whole((ord("q"),), rows[0][1])],
    }


def test_from_a_corpus_to_shards_whatever_the_parts(tmp_path):
    work = chain.started(tmp_path / "tokenizer")
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=0.9995, split_digits=True)
    pairs = rows_of("preferences", 30)
    rows = [
        {"id": f"{pair['id']}{side[0]}", "prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    corpus = chain.corpus(tmp_path / "corpus", "unpaired", rows, held_out=6)
    template = [ROOT / "resources/chat_templates/chatml.jinja"]
    build_tokenizer(spec, work, corpora=[corpus], chat_template=template, base=[])
    tokenizer = Artifact(tmp_path / "t.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)
    one, two = (chain.pack(tmp_path / str(n), corpus, tokenizer, "unpaired", parts=n) for n in (1, 2))
    assert one.manifest == two.manifest
    assert (one.manifest["kind"], one.manifest["format_version"]) == ("unpaired", "3.1")
    assert read_table(one.file("train-00000.arrow")).schema == schema(256, list_columns("unpaired", "3.1"))
    assert read_table(one.file("documents.arrow")).schema == documents_schema("unpaired")
    assert one.manifest["counts"]["train"]["mismatched_tokens"] > 0
    chat = ChatTokenizer.load(tokenizer.folder)
    for split, own in (("train", rows[:-6]), ("held_out", rows[-6:])):
        found = read_back(one, split)
        assert found.keys() == {row["id"] for row in own}
        # The two rows of each prompt are neighbours.
        for before, row_ in zip([*own[-2:], *own], own):
            first, second = found[row_["id"]]
            prompt = chat.encode([row_["prompt"]])[0].ids.tolist()
            encoding = chat.encode([row_["prompt"] + row_["completion"]])[0]
            # Without the line break after the turn.
            assert [token for token, _ in first] == encoding.ids.tolist()[: np.flatnonzero(encoding.supervised)[-1] + 1]
            completion = [token for token, _ in found[before["id"]][0]]
            begin = next(at for at, (_, supervised) in enumerate(found[before["id"]][0]) if supervised)
            assert [token for token, _ in second][len(prompt) :][-len(completion[begin:]) :] == completion[begin:]
            assert {supervised for _, supervised in first} == {False, True}
