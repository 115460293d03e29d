"""The difference of a pair's ratings, from raw rows to the trainer; and nothing of it where a corpus has no ratings."""

import json

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.corpus.assembly import build
from snaketune.corpus.rows import MARGIN, SCHEMAS
from snaketune.engine.packing.shards import documents_schema
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import documents
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import CorpusSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import INDEX
from snaketune.training.prepared_reward import reward_rows
from tests.tokenization.small_tokenizers import tokenizer_artifact

from . import chain

RATED = [
    {"prompt": f"Question {n}", "answers": [f"a {n} {rating}" for rating in ratings], "ratings": ratings}
    for n, ratings in enumerate([[7.5, 9.0, 3.0], [1.0, 4.0], [2.0, 0.5, 2.5, 1.0]] * 3)
]
# By the texts of both completions, as RATED has them.
MARGINS = {
    (f"a {n} {max(row['ratings'])}", f"a {n} {rating}"): max(row["ratings"]) - rating
    for n, row in enumerate(RATED)
    for rating in row["ratings"]
    if rating < max(row["ratings"])
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


def made(folder, *files: list[dict]) -> Artifact:
    """A corpus of these files."""
    folder.mkdir()
    paths = [folder / f"{number}.jsonl" for number in range(len(files))]
    for path, rows in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    work = WorkFolder(folder / "work")
    work.start()
    sources = [{"files": [str(path)]} for path in paths]
    spec = CorpusSpec.model_validate({"kind": "preferences", "sources": sources, "held_out": 0.3})
    build(spec, work, files=paths, against=[], against_files=[])
    return Artifact(folder / "manifest.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)


def expected(corpus: Artifact) -> dict[str, float | None]:
    """The margin of each row by its id, from its texts."""
    texts = {row["id"]: (row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows_of(corpus)}
    return {pair: MARGINS.get(both) for pair, both in texts.items()}


def rows_of(corpus: Artifact) -> list[dict]:
    return [
        row for split in ("train", "held_out") for row in read_table(corpus.file(f"{split}-00000.arrow")).to_pylist()
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_trainer_gets_the_difference_of_the_ratings(tmp_path, tokenizer, parts):
    corpus = made(tmp_path / "corpus", RATED)
    margins = expected(corpus)
    assert None not in margins.values() and len(set(margins.values())) > 3
    pack = chain.pack(tmp_path, corpus, tokenizer, "preference", parts=parts)
    found = {}
    for split in ("train", "held_out"):
        pairs, rows = list(documents(pack, split)), reward_rows(pack, split, margin=True)
        of_rows = [margin for number in range(len(rows)) for margin in rows[number]["margin"].tolist()]
        assert len(pairs) == len(of_rows) > 0
        found |= {pair["id"]: margin for pair, margin in zip(pairs, of_rows, strict=True)}
    assert found == pytest.approx(margins)


def test_scores_beside_a_pair_are_its_ratings_if_it_has_one_of_each(tmp_path):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    one = made(tmp_path / "one", [pair | {"score_chosen": 0.75, "score_rejected": 0.5}])
    assert rows_of(one)[0]["margin"] == 0.25
    several = {"helpful_score_chosen": 3, "helpful_score_rejected": 1, "true_score_chosen": 2, "true_score_rejected": 1}
    assert "margin" not in rows_of(made(tmp_path / "two", [pair | several]))[0]


def test_a_corpus_without_ratings_has_no_column_of_them(tmp_path, tokenizer):
    plain = [{"prompt": f"q {n}", "chosen": "good", "rejected": f"bad {n}"} for n in range(12)]
    corpus = made(tmp_path / "corpus", plain)
    assert read_table(corpus.file("train-00000.arrow")).schema == SCHEMAS["preferences"]
    pack = chain.pack(tmp_path, corpus, tokenizer, "preference")
    assert read_table(tmp_path / "tokens-1/payload.partial/train-index.arrow").schema == INDEX
    assert read_table(pack.file("documents.arrow")).schema == documents_schema("preference")


def test_rated_and_other_pairs_can_be_mixed_but_not_trained_by_their_margins(tmp_path, tokenizer):
    plain = [{"prompt": f"q {n}", "chosen": "good", "rejected": f"bad {n}"} for n in range(12)]
    corpus = made(tmp_path / "corpus", RATED, plain)
    table = read_table(corpus.file("train-00000.arrow"))
    assert table.schema == SCHEMAS["preferences"].append(MARGIN)
    assert 0 < table["margin"].null_count < len(table)
    pack = chain.pack(tmp_path, corpus, tokenizer, "preference")
    assert len(reward_rows(pack, "train"))
    with pytest.raises(SnaketuneError, match=r"pairs have no ratings, such as .*`layout: rated`"):
        reward_rows(pack, "train", margin=True)
