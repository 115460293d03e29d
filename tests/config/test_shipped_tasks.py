"""Task names are checked against the files of lm-evaluation-harness while planning, without importing it."""

import pytest
from lm_eval.tasks import TaskManager

from snaketune.config import task_files
from snaketune.config.load import load
from snaketune.config.task_files import check_shipped_tasks, task_names, tasks_folder
from snaketune.errors import SnaketuneError


@pytest.fixture
def config_with_tasks(raw):
    def config_with_tasks(*names: str, **more):
        raw["eval"]["demo"]["tasks"] = {"names": list(names), **more}
        return load(raw)[0]

    return config_with_tasks


@pytest.mark.parametrize("folder", ["arc", "mmlu", "bbh", "aradice", "super_glue", "benchmarks"])
def test_every_task_that_lm_eval_finds_is_known(folder):
    place = tasks_folder() / folder
    known = TaskManager(include_path=str(place), include_defaults=False).all_tasks
    assert known and set(known) <= task_names(place)


def test_unknown_tasks_are_refused_with_the_nearest_name(config_with_tasks):
    check_shipped_tasks(config_with_tasks("arc_easy", "ai2_arc", "mmlu", "gsm8k"))
    with pytest.raises(SnaketuneError, match=r"eval\.demo\.tasks\.names: .*'arc_eazy'; did you mean 'arc_easy'\?"):
        check_shipped_tasks(config_with_tasks("arc_easy", "arc_eazy"))


def test_names_of_local_tasks_are_not_checked(config_with_tasks):
    check_shipped_tasks(config_with_tasks("my_own", folder="resources/eval_tasks"))


def test_without_lm_eval_every_name_is_accepted(config_with_tasks, monkeypatch):
    monkeypatch.setattr(task_files, "tasks_folder", lambda: None)
    check_shipped_tasks(config_with_tasks("arc_eazy"))


def test_existing_tasks_are_found_in_few_folders(config_with_tasks, monkeypatch):
    read = []
    monkeypatch.setattr(task_files, "task_names", lambda place: read.append(place.name) or task_names(place))
    check_shipped_tasks(config_with_tasks("arc_easy", "hellaswag"))
    assert 0 < len(read) < 20
