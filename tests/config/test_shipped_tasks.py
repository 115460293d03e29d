"""Names of tasks that lm-evaluation-harness ships are known without importing it; others are refused while planning."""

import pytest
from lm_eval.tasks import TaskManager

from snaketune.config import shipped_tasks
from snaketune.config.load import load
from snaketune.config.shipped_tasks import check_shipped_tasks, task_names, tasks_folder
from snaketune.errors import SnaketuneError


@pytest.fixture
def asking(raw):
    def asking(*names: str, **more):
        raw["eval"]["demo"]["tasks"] = {"names": list(names), **more}
        return load(raw)[0]

    return asking


@pytest.mark.parametrize("folder", ["arc", "mmlu", "bbh", "aradice", "super_glue", "benchmarks"])
def test_all_that_lm_eval_finds_is_known(folder):
    place = tasks_folder() / folder
    known = TaskManager(include_path=str(place), include_defaults=False).all_tasks
    assert known and set(known) <= task_names(place)


def test_tasks_tags_and_groups_pass_and_others_are_refused_with_the_nearest(asking):
    check_shipped_tasks(asking("arc_easy", "ai2_arc", "mmlu", "gsm8k"))
    with pytest.raises(SnaketuneError, match=r"eval\.demo\.tasks\.names: .*'arc_eazy'; did you mean 'arc_easy'\?"):
        check_shipped_tasks(asking("arc_easy", "arc_eazy"))


def test_names_of_local_files_are_not_looked_for(asking):
    check_shipped_tasks(asking("my_own", folder="resources/eval_tasks"))


def test_where_it_is_not_installed_all_pass(asking, monkeypatch):
    monkeypatch.setattr(shipped_tasks, "tasks_folder", lambda: None)
    check_shipped_tasks(asking("arc_eazy"))


def test_what_is_there_is_found_in_few_folders(asking, monkeypatch):
    read = []
    monkeypatch.setattr(shipped_tasks, "task_names", lambda place: read.append(place.name) or task_names(place))
    check_shipped_tasks(asking("arc_easy", "hellaswag"))
    assert 0 < len(read) < 20
