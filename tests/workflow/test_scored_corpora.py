"""From responses to corpora: sample, score, select, corpus, as plain jobs; what an edit of each reruns."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from .conftest import Project, made_once
from .reruns import CHECKED, SAMPLED

pytestmark = pytest.mark.workflow
SCORER = """
def score(prompt, response, row):
    open("calls", "a").write(row["id"] + str(row["index"]) + "\\n")
    return {"score": len(response), "place": row["index"]}
"""
TARGETS = [f"results/corpus/{name}/manifest.json" for name in ("own-pairs", "own-best", "own-votes")]


def rows(project: Project, corpus: str) -> list[dict]:
    tables = [project.folder / f"results/corpus/{corpus}/rows/{split}-00000.arrow" for split in ("train", "held_out")]
    return [row for path in tables for row in pa.ipc.open_file(path).read_all().to_pylist()]


def calls(project: Project) -> int:
    return len(project.read("calls").splitlines())


def configured(project: Project) -> Project:
    """The project with 6 prompts of 3 responses, which end at a space, scored by their length."""
    generation = {"temperature": 1.5, "max_new_tokens": 20, "stop": [" ", "e", "a"]}
    project.config["sample"] = {"tries": SAMPLED | {"responses": 3, "generation": generation}}
    project.config["score"] = {
        "long": {"samples": "tries", "by": {"python": "scorer.py"}},
        "checked": CHECKED,
        "both": {"samples": "tries", "by": {"sum": {"long": 1.0, "checked": 5.0}}},
    }
    project.config["corpora"] |= {
        "own-pairs": {"kind": "preferences", "sources": [{"scores": "both", "pairs": "best-worst"}]},
        "own-best": {"kind": "conversations", "sources": [{"scores": "long", "rows": "best", "at_least": 1}]},
        "own-votes": {"kind": "unpaired", "sources": [{"scores": "long", "good_from": 2, "bad_to": 1}]},
    }
    return project


@pytest.fixture(scope="module")
def scored(finished, tmp_path_factory) -> Project:
    """After a run. Tests copy it and don't change it."""

    def make(folder: Path) -> None:
        project = configured(finished.copy_to(folder))
        (folder / "scorer.py").write_text(SCORER)
        project.snakemake(*TARGETS)

    return configured(Project(made_once(tmp_path_factory, "scored", make), finished.config))


@pytest.fixture
def project(scored, tmp_path) -> Project:
    return scored.copy_to(tmp_path / "project")


def test_rows_are_those_of_the_responses(scored):
    table = pa.ipc.open_file(scored.folder / "results/sample/tries/responses/responses.arrow").read_all().to_pylist()
    texts = {row["content"] for row in table}
    assert calls(scored) == len(table) == 18
    for row in rows(scored, "own-pairs"):
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert {chosen, rejected} <= texts and len(chosen) > len(rejected)
    assert {row["messages"][-1]["content"] for row in rows(scored, "own-best")} <= texts
    for row in rows(scored, "own-votes"):
        assert row["label"] == (len(row["completion"][0]["content"]) >= 2)
    assert rows(scored, "own-best") and rows(scored, "own-pairs")


@pytest.mark.parametrize(
    ("edit", "stale"),
    [
        ({"corpora.own-pairs.sources.0.margin": 1.0}, {"select", "corpus"}),
        ({"corpora.own-best.sources.0.at_least": 2}, {"select", "corpus"}),
        ({"corpora.own-pairs.cleaning": {"min_characters": 1}}, {"corpus"}),
        ({"score.both.by.sum.checked": 1.0}, {"score", "select", "corpus"}),
        ({"score.checked.by.answer.pattern": "a(.*)"}, {"score", "select", "corpus"}),
        ({"sample.tries.operation.parts": 2}, set()),
    ],
)
def test_an_edit_reruns_only_what_reads_it_and_samples_nothing(project, edit, stale):
    for dotted, value in edit.items():
        *sections, key = dotted.split(".")
        entry = project.config
        for section in sections:
            entry = entry[int(section) if isinstance(entry, list) else section]
        entry[key] = value
    assert project.stale(*TARGETS) == stale


@pytest.mark.slow
def test_more_responses_are_scored_alone_and_an_edited_function_scores_all(project):
    project.config["sample"]["tries"]["responses"] = 4
    project.snakemake("results/score/both/manifest.json")
    assert calls(project) == 18 + 6
    project.config["score"]["both"]["by"]["sum"]["long"] = 2.0
    project.snakemake("results/score/both/manifest.json")
    assert calls(project) == 24
    (project.folder / "scorer.py").write_text(SCORER + "# edited\n")
    project.snakemake("results/score/both/manifest.json")
    assert calls(project) == 48
    manifest = json.loads(project.read("results/score/long/manifest.json"))
    assert manifest["counts"] == {"responses": 24, "scored": 24, "without": {}}
