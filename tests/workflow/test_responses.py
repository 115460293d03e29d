"""Generated responses are reused when other keys of an evaluation change; unknown task names are refused."""

import json
from runpy import run_path

import pytest

from .conftest import ROOT, Project
from .reruns import EVAL

pytestmark = pytest.mark.workflow
MODELS = ("sft-run", "dpo-run")


def generated(project: Project) -> list[int]:
    runs = [json.loads(project.read(f"results/eval/both/{model}/run.json")) for model in MODELS]
    return [run["responses_generated"] for run in runs]


def answers(project: Project) -> list[dict[str, dict]]:
    texts = [project.read(f"results/eval/both/{model}/scores/responses.jsonl") for model in MODELS]
    return [{row["id"]: row for row in map(json.loads, text.splitlines())} for text in texts]


@pytest.mark.slow
def test_only_what_was_not_written_yet_is_generated(project):
    first, before = generated(project), answers(project)
    assert all(first) and first[0] == len(before[0])
    evaluation = project.config["eval"]["both"]
    evaluation["exact_match"]["answer_pattern"] = "(.*)"
    evaluation["generation"]["batch_size"] = 2
    assert project.stale() == EVAL
    assert f"{first[0]} of {first[0]} responses are cached" in project.snakemake()
    assert generated(project) == [0, 0]
    evaluation["exact_match"]["limit"] = 9
    manifests = [f"results/eval/both/{model}/manifest.json" for model in MODELS]
    project.snakemake(*manifests)
    after = answers(project)
    for was, now, count in zip(before, after, generated(project), strict=True):
        assert count == len(now) - len(was) == 3
        assert all(now[id]["response"] == row["response"] for id, row in was.items())
    evaluation["generation"]["stop"] = ["a"]
    project.snakemake(*manifests)
    assert generated(project) == [len(now) for now in after]
    assert all("a" not in row["response"] for now in answers(project) for row in now.values())
    # All edits are there, and cleaning leaves those of the last.
    retained = project.folder / "results/.work/.rows"
    keys = {path.name for path in retained.iterdir()}
    project.snakemake("clean_work")
    assert {json.loads(project.read(path))["generation"]["responses"] for path in manifests} < {
        path.name for path in retained.iterdir()
    }
    assert len(keys) == len(list(retained.iterdir())) + 2


def test_the_chat_script_answers_as_the_evaluation_did(finished):
    chat, checked = run_path(str(ROOT / "resources/serve/chat.py")), 0
    for model, rows in zip(MODELS, answers(finished), strict=True):
        loaded = chat["load"](str(finished.folder / "results" / model.replace("-", "/") / "model"))
        for row in rows.values():
            question = row["prompt"].removeprefix("[user] ")
            if not question.startswith("[") and "\n[" not in question:
                assert chat["answer"](loaded, question, 6) == row["response"]
                checked += 1
    assert checked > 4


def test_a_name_that_no_task_has_is_refused_before_anything_runs(project):
    project.config["eval"]["both"]["tasks"] = {"names": ["arc_eazy"]}
    said = project.snakemake("--dry-run", check=False)
    assert "eval.both.tasks.names" in said and "did you mean 'arc_easy'?" in said and "Traceback" not in said
    project.config["eval"]["both"]["tasks"] = {"names": ["arc_easy"]}
    assert project.stale() == EVAL
