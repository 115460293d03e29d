"""A sweep: what it shares, what is found best, and the link to it as the config changes."""

import copy
import re
import shutil

import pytest

from .conftest import Project

pytestmark = pytest.mark.workflow
SORT_BY = "preferences.pairs.reward_margin_nats"


def counted(said: str) -> dict[str, int]:
    """Jobs by rule, from the table of a dry run."""
    return {
        rule: int(jobs) for rule, jobs in re.findall(r"^(\w+) +(\d+)$", said.partition("Job stats:")[2], re.MULTILINE)
    }


def test_a_sweep_has_one_sft_and_one_reference_job(fresh):
    grid = {"beta": [0.05, 0.1], "loss": ["sigmoid", "ipo"], "training.learning_rate": [0.001, 0.002]}
    fresh.config["dpo"]["run"]["grid"] = grid
    jobs = counted(fresh.snakemake("--dry-run"))
    assert (jobs["sft"], jobs["ref_logps"], jobs["dpo"], jobs["eval"], jobs["report"]) == (1, 1, 8, 9, 1)
    # Rows too: of conversations and of pairs.
    assert (jobs["plan"], jobs["pack"]) == (2, 2)


def best(project: Project) -> str | None:
    link = project.folder / "results/best"
    assert link.is_symlink() == link.exists()
    if not link.is_symlink():
        return None
    assert (link / "model.safetensors").is_file()
    return str(link.readlink())


@pytest.mark.slow
def test_the_best_model_is_linked_as_the_sweep_changes(project):
    project.config["dpo"]["more"] = copy.deepcopy(project.config["dpo"]["run"]) | {"beta": 0.9}
    project.config["dpo"]["more"]["training"]["learning_rate"] = 0.01
    project.config["eval"]["both"]["models"].append("dpo:more")
    project.config["report"] = {"sort_by": SORT_BY}
    project.snakemake()
    # It learns ten times as fast.
    assert best(project) == "dpo/more/model"
    assert '"run": "dpo:more"' in project.read("results/report/manifest.json")
    assert "<b>dpo:more</b> comes first" in project.read("results/report/pages/index.html")
    assert "results/best" in project.snakemake("--summary")
    assert project.stale() == set()
    # One that is lost comes back, and nothing is computed for it.
    (project.folder / "results/best").unlink()
    assert project.stale() == {"report"}
    assert "nothing to compute" in project.snakemake()
    assert best(project) == "dpo/more/model"
    # A link to a model that was deleted or is being made again causes no error either.
    shutil.rmtree(project.folder / "results/dpo/more")
    assert "dpo" in project.stale()
    assert "nothing to compute" in project.snakemake()
    assert best(project) == "dpo/more/model"
    # A moved project is as it was.
    project = project.copy_to(project.folder.parent / "moved")
    assert (best(project), project.stale()) == ("dpo/more/model", set())
    # By another figure, the lowest first.
    project.config["report"]["sort_by"] = "conversations.chat.held_out_loss"
    assert project.stale() == {"report"}
    project.snakemake()
    assert best(project) == "dpo/run/model"
    # Back again: yesterday's report and its link.
    project.config["report"]["sort_by"] = SORT_BY
    assert "nothing to compute" in project.snakemake()
    assert best(project) == "dpo/more/model"
    # Without the best, the next one is.
    del project.config["dpo"]["more"]
    project.config["eval"]["both"]["models"].remove("dpo:more")
    project.snakemake()
    assert best(project) == "dpo/run/model"
    # Nothing to sort by, nothing is best.
    del project.config["report"]
    project.snakemake()
    assert best(project) is None


def test_an_unknown_score_is_refused_with_the_known_ones(project):
    project.config["report"] = {"sort_by": "conversations.chat.exact_match.by_task.none.share"}
    said = project.snakemake(check=False)
    assert "no evaluated run of `dpo:` has a number at 'conversations.chat.exact_match.by_task.none.share'" in said
    assert "Traceback" not in said


def test_a_folder_with_the_name_of_the_link_is_not_touched(project):
    own = project.folder / "results/best/mine.txt"
    own.parent.mkdir()
    own.write_text("mine")
    project.config["report"] = {"sort_by": SORT_BY}
    assert "results/best is no link, but report.sort_by links the best model there" in project.snakemake(check=False)
    del project.config["report"]
    project.snakemake()
    assert own.read_text() == "mine"
