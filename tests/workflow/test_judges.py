"""A run with a judge: its scores, win rates and the report; an edit of the rubric asks again and samples nothing."""

import json

import pytest

from tests.sampling.stand_in import MODEL, StandIn, serving

from .conftest import Project
from .reruns import SAMPLED

pytestmark = [pytest.mark.workflow, pytest.mark.slow]


def reply(messages: list[dict[str, str]]) -> str:
    text = messages[0]["content"]
    if "response A" not in text:
        return f"Score: {1 + len(text) % 10}"
    first, second = (text.partition(f" response {name}\n")[2].partition("\n====")[0] for name in "AB")
    return "Verdict: A" if len(first) > len(second) else "Verdict: B"


def test_a_judge_scores_responses_and_compares_models(project: Project):
    about = StandIn(None, judge=reply)
    (project.folder / "rubric.md").write_text("Longer is better.")
    with serving(about) as url:
        judge = {"engine": {"url": url, "model": MODEL}, "rubric": "rubric.md"}
        project.config["sample"] = {"tries": SAMPLED}
        project.config["score"] = {"worth": {"samples": "tries", "by": {"judge": judge}}}
        models = project.config["eval"]["both"]["models"]
        project.config["eval"]["both"]["judge"] = judge | {"against": models[0], "prompts": 4}
        planned = project.snakemake("--dry-run")
        assert f"Sent to {url}, out of this workflow: prompts and responses of" in planned
        project.snakemake()
        assert json.loads(project.read("results/judge/worth/manifest.json"))["counts"]["scored"] == 12
        (compared,) = (project.folder / "results/compare/both").iterdir()
        scores = json.loads((compared / "verdicts/win_rate.json").read_text())
        assert scores["prompts"] == 4 and scores["unclear"] == 0.0
        assert "<h3>Judged" in project.read("results/report/pages/index.html")
        asked = len(about.bodies)
        assert project.stale() == set()
        (project.folder / "rubric.md").write_text("Shorter is better.")
        assert project.stale() == {"judge", "compare", "report"}
        project.snakemake()
        assert len(about.bodies) == 2 * asked
