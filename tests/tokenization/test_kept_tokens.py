"""Rows whose tokens an earlier result holds aren't encoded again, and results are those of a run without earlier ones."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from small_tokenizers import LLAMA3, chat_of, families, messages
from test_template_errors import REFUSES
from test_tokenize_stage import artifact, corpus_of

from snaketune.artifacts.manifest import Artifact, read_artifact, read_json
from snaketune.corpus.rows import WEIGHTED_MESSAGES
from snaketune.stages.cache.build_once import build_once
from snaketune.stages.specs import TokenizeSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization import corpus_part, tokenize

ROWS = 200
SFT = TokenizeSpec(kind="sft", train_on="assistant", part=1, parts=1)
PAIRS = SFT.model_copy(update={"kind": "preference"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("llama3") / "tokenizer"
    chat_of(folder, families()["gpt2"], LLAMA3)
    return artifact(folder)


def conversation(number: int, edited: bool = False) -> list[dict[str, str]]:
    control = "<|eot_id|>" if number % 7 == 0 else ""
    return messages(
        f"count {number}", f"{number} {control}" * (1 + number % 5), "more", f"edited {number}" * edited or "no"
    )


def corpus(folder, edited=(), order=range(ROWS), weighted=False) -> Artifact:
    """Conversations, of which some are edited, in an order; with weights on request."""
    rows = [conversation(number, number in edited) for number in order]
    made = corpus_of(
        folder,
        {"messages": rows},
        {"messages": [conversation(number) for number in range(1000, 1020)]},
        rows_per_batch=9,
    )
    if weighted:
        for name in ("train", "held_out"):
            table = read_table(made.folder / f"{name}.arrow")
            turns = [
                [turn | {"weight": 0.5 * (at % 4)} for at, turn in enumerate(row)]
                for row in table["messages"].to_pylist()
            ]
            (made.folder / f"{name}.arrow").unlink()
            column = pa.array(turns, WEIGHTED_MESSAGES)
            write_table(made.folder / f"{name}.arrow", table.set_column(1, "messages", column), 9)
    return artifact(made.folder)


def moved(folder) -> Artifact:
    rows = [conversation(number) for number in [*range(50, ROWS), *range(1000, 1010)]]
    return corpus_of(folder, {"messages": rows}, {"messages": [conversation(number) for number in range(50)]})


def pairs(folder, edited=()) -> Artifact:
    answers = [
        [{"role": "assistant", "content": f"{number} yes{' edited' * (number in edited)}"}] for number in range(ROWS)
    ]
    worse = [[{"role": "assistant", "content": f"{number} no"}] for number in range(ROWS)]
    prompts = [messages("a", "b", f"count {number}") for number in range(ROWS)]
    return corpus_of(folder, {"prompt": prompts, "chosen": answers, "rejected": worse})


def build(root, rows: Artifact, tokenizer: Artifact, spec: TokenizeSpec = SFT, code: str = "code", name: str = "out"):
    """Run the stage; return its result, and the number of rows that it encoded."""
    inputs = {"corpus": rows, "tokenizer": tokenizer}
    build_once(
        stage="tokenize",
        spec=spec.model_dump(mode="json"),
        artifacts={role: [one] for role, one in inputs.items()},
        files={},
        code=code,
        out=root / name,
        payload="tokens",
        build=lambda work: tokenize.build(spec, work, **inputs),
        work_root=root / ".work",
    )
    return read_artifact(root / name / "manifest.json", "tokens"), read_json(root / name / "run.json", {})[
        "rows_encoded"
    ]


EDITS = {
    "none, in another order": (SFT, lambda folder: corpus(folder, order=reversed(range(ROWS))), 0),
    "1%": (SFT, lambda folder: corpus(folder, edited={0, 150}), 2),
    "half": (SFT, lambda folder: corpus(folder, edited=range(0, ROWS, 2)), 100),
    "moved to the other split": (SFT, lambda folder: moved(folder), 0),
    "rows added and removed": (SFT, lambda folder: corpus(folder, order=[*range(30, ROWS), 300, 301, 302]), 3),
    "1% of the pairs": (PAIRS, lambda folder: pairs(folder, edited={7, 70}), 2),
}


@pytest.mark.parametrize("edit", EDITS)
def test_only_edited_rows_are_encoded(edit, tmp_path, tokenizer):
    spec, make, encoded = EDITS[edit]
    _, first = build(tmp_path / "warm", (pairs if spec is PAIRS else corpus)(tmp_path / "before"), tokenizer, spec)
    after = make(tmp_path / "after")
    warm, computed = build(tmp_path / "warm", after, tokenizer, spec)
    cold, everything = build(tmp_path / "cold", after, tokenizer, spec)
    rows = sum(own["rows"] for own in cold.manifest["counts"].values())
    assert (first, everything) == (200 if spec is PAIRS else 220, rows)
    assert computed == encoded
    assert warm.manifest == cold.manifest and warm.files()


def test_the_log_says_how_many_rows_are_reused(tmp_path, tokenizer, capsys):
    build(tmp_path, corpus(tmp_path / "before"), tokenizer)
    assert "from earlier results" not in capsys.readouterr().out
    build(tmp_path, corpus(tmp_path / "after", edited={5}), tokenizer)
    assert "1 rows encoded; the tokens of 219 are from earlier results" in capsys.readouterr().out


def test_weights_of_turns_are_reused_and_an_edited_weight_is_seen(tmp_path, tokenizer):
    build(tmp_path / "warm", corpus(tmp_path / "plain"), tokenizer)
    weighted = corpus(tmp_path / "weighted", weighted=True)
    # The rows of a corpus with weights have other columns.
    assert build(tmp_path / "warm", weighted, tokenizer)[1] == 220
    after = corpus(tmp_path / "after", edited={3}, order=[*range(50, ROWS), *range(50)], weighted=True)
    warm, computed = build(tmp_path / "warm", after, tokenizer)
    assert computed == 1 and warm.manifest == build(tmp_path / "cold", after, tokenizer)[0].manifest


def test_parts_are_cut_in_another_way(tmp_path, tokenizer):
    build(tmp_path / "warm", corpus(tmp_path / "before"), tokenizer)
    after = corpus(tmp_path / "after", edited={5, 190})
    parts = [SFT.model_copy(update={"part": part, "parts": 3}) for part in (1, 2, 3)]
    made = [build(tmp_path / "warm", after, tokenizer, part, name=str(part.part)) for part in parts]
    assert [computed for _, computed in made] == [1, 0, 1]
    for part, (warm, _) in zip(parts, made):
        assert warm.manifest == build(tmp_path / "cold", after, tokenizer, part)[0].manifest


def test_nothing_is_reused_from_other_code_settings_or_tokenizers(tmp_path, tokenizer):
    before, after = corpus(tmp_path / "before"), corpus(tmp_path / "after", edited={5})
    build(tmp_path, before, tokenizer)
    chat_of(tmp_path / "other", families()["gpt2"], LLAMA3 + " ")
    last = SFT.model_copy(update={"train_on": "last"})
    assert build(tmp_path, after, tokenizer, code="other")[1] == 220
    assert build(tmp_path, after, tokenizer, last)[1] == 220
    assert build(tmp_path, after, artifact(tmp_path / "other"))[1] == 220
    assert build(tmp_path, after, tokenizer)[1] == 1


@pytest.mark.parametrize("name", ("train-rows.arrow", "train-ids.arrow", "train-index.arrow", "manifest.json"))
@pytest.mark.parametrize("damage", ("changed", "cut", "missing"))
def test_damaged_results_are_not_reused(name, damage, tmp_path, tokenizer, capsys):
    build(tmp_path, corpus(tmp_path / "before"), tokenizer)
    (path,) = (tmp_path / ".work/tokenize").rglob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.unlink()
    if damage != "missing":
        path.write_bytes(content if damage == "changed" else content[:-100])
    after = corpus(tmp_path / "after", edited={5})
    capsys.readouterr()
    warm, computed = build(tmp_path, after, tokenizer)
    assert computed == 220
    assert capsys.readouterr().out.count("isn't reused") == (name != "manifest.json")
    assert warm.manifest == build(tmp_path / "cold", after, tokenizer)[0].manifest


def test_refused_rows_are_refused_again(tmp_path):
    chat_of(tmp_path / "tokenizer", families()["gpt2"], REFUSES)
    tokenizer = artifact(tmp_path / "tokenizer")
    spec = SFT.model_copy(update={"most_refused": 0.5})
    rows = [conversation(number) for number in range(50)]
    for at in (3, 20, 49):
        rows[at] = messages("a", "b", system=f"be kind {at}")
    build(tmp_path, corpus_of(tmp_path / "before", {"messages": rows}), tokenizer, spec)
    rows[7] = conversation(7, edited=True)
    after = corpus_of(tmp_path / "after", {"messages": rows})
    warm, computed = build(tmp_path, after, tokenizer, spec)
    assert computed == 4 and warm.manifest["counts"]["train"]["refused"] == 3
    assert warm.manifest == build(tmp_path / "cold", after, tokenizer, spec)[0].manifest
    # Also where no other row is encoded.
    del rows[9]
    warm, computed = build(tmp_path, corpus_of(tmp_path / "fewer", {"messages": rows}), tokenizer, spec)
    assert computed == 3 and warm.manifest["counts"]["train"]["refused"] == 3


def test_nothing_is_reused_where_batched_encoding_differs(tmp_path, tokenizer, monkeypatch):
    build(tmp_path, corpus(tmp_path / "before"), tokenizer)

    class Wrong:
        def __init__(self, right):
            self.right = right

        def encode(self, turns):
            encoded, one_by_one = self.right.encode(turns)
            return replace(encoded, ids=np.where(encoded.ids == encoded.ids[0], 0, encoded.ids)), one_by_one

    batched, reason = corpus_part.batched_encoder(corpus_part.ChatTokenizer.load(tokenizer.folder))
    assert batched
    monkeypatch.setattr(corpus_part, "batched_encoder", lambda chat: (Wrong(batched), reason))
    assert build(tmp_path, corpus(tmp_path / "after", edited={5}), tokenizer)[1] == 220
