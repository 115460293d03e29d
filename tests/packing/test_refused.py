"""Rows that the chat template refuses, makes equal or empties are counted as such, and don't change how others are packed."""

import json

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.specs import PackSpec, TokenizeSpec
from snaketune.tables import read_table
from snaketune.tokenization import corpus_part
from tests.packing.chain import corpus, made, pack, pack_tokens, rows_of, started
from tests.tokenization.small_tokenizers import train_in

KINDS = ("sft", "preference", "unpaired")
REFUSED = "a question that the template refuses"


def rows_for(kind: str, count: int) -> list[dict]:
    if kind == "sft":
        return rows_of("chat", count)
    rows = rows_of("preferences", count)
    if kind == "unpaired":
        return [{**row, "completion": row["chosen"], "label": number % 2 == 0} for number, row in enumerate(rows)]
    return rows


@pytest.fixture(scope="module")
def strict(tmp_path_factory) -> Artifact:
    """A tokenizer with a template that refuses one question."""
    work, _ = train_in(tmp_path_factory.mktemp("tokenizer"), "bpe")
    template = work.payload / "chat_template.jinja"
    condition = "{%- for message in messages if '" + REFUSED + "' in message['content'] -%}"
    refuses = condition + "{{- raise_exception('no') -}}{%- endfor -%}"
    template.write_text(refuses + template.read_text(encoding="utf-8"), encoding="utf-8")
    payload = describe_files(work.payload)
    return Artifact(work.folder / "manifest.json", {"payload": payload, "records": {}}, work.payload)


@pytest.mark.parametrize(
    ("kind", "strategy"), [*((kind, "best-fit-decreasing") for kind in KINDS), ("sft", "wrapped"), ("sft", "none")]
)
def test_other_rows_are_packed_as_without_the_refused_row(kind, strategy, strict, tmp_path):
    good = rows_for(kind, 30)
    refused = json.loads(json.dumps(good[7]))
    refused["id"] = "refused"
    refused["messages" if kind == "sft" else "prompt"][-1 if kind != "sft" else 0]["content"] += REFUSED
    with_one = [*good[:7], refused, *good[7:]]
    spec = PackSpec(kind=kind, length=256, overflow="drop", strategy=strategy)
    tokenize_spec = TokenizeSpec(kind=kind, train_on="assistant", part=1, parts=1, most_refused=0.5)
    own = started(tmp_path / "tokens")
    rows = corpus(tmp_path / "corpus", kind, with_one)
    outcome = corpus_part.build(tokenize_spec, own, corpus=rows, tokenizer=strict)
    assert outcome.counts["train"]["refused"] == 1
    packed = pack_tokens(tmp_path / "packed", [made(own.folder, outcome, tokenize_spec)], spec, corpus=[rows])
    expected = pack(
        tmp_path / "expected", corpus(tmp_path / "good", kind, good), strict, kind, length=256, strategy=strategy
    )
    counts, before = packed.manifest["counts"]["train"], expected.manifest["counts"]["train"]
    assert counts["dropped"].pop("refused_by_template") == 1
    counts["read"] -= 1
    assert counts == before
    for name in sorted(path.name for path in expected.folder.glob("train*.arrow")):
        table, other = (read_table(artifact.folder / name) for artifact in (packed, expected))
        assert table.equals(other)


def test_completions_that_the_template_makes_equal_or_empty_are_dropped(tmp_path):
    work, _ = train_in(tmp_path / "tokenizer", "bpe")
    template = work.payload / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    assert text.count("message['content']") > 0
    template.write_text(text.replace("message['content']", "(message['content'] | trim)"), encoding="utf-8")
    payload = {"payload": describe_files(work.payload), "records": {}}
    tokenizer = Artifact(work.folder / "manifest.json", payload, work.payload)
    pairs = (("Yes ", "Yes"), ("No\n", "No"), ("yes", "no"), ("<think>Hm.</think>", "no"))
    rows = [
        {"id": str(number), "prompt": [{"role": "user", "content": "Say it"}]}
        | {side: [{"role": "assistant", "content": content}] for side, content in zip(("chosen", "rejected"), pair)}
        for number, pair in enumerate(pairs)
    ]
    own, given = started(tmp_path / "tokens"), corpus(tmp_path / "corpus", "preference", rows, held_out=0)
    spec = TokenizeSpec(kind="preference", train_on="assistant", reasoning="none", part=1, parts=1, most_refused=0.5)
    outcome = corpus_part.build(spec, own, corpus=given, tokenizer=tokenizer)
    assert outcome.counts["train"]["nothing_supervised"] == 1
    pack_spec = PackSpec(kind="preference", length=64, overflow="drop", strategy="best-fit-decreasing")
    packed = pack_tokens(tmp_path / "packed", [made(own.folder, outcome, spec)], pack_spec, corpus=[given])
    counts = packed.manifest["counts"]["train"]
    assert (counts["kept"], counts["dropped"]) == (1, {"equal_completions": 2, "nothing_supervised": 1})
