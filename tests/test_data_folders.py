"""Folders that other programs write: taken whole, and refused where their marks say that they aren't finished."""

from pathlib import Path

import pytest

from snaketune.config.base import files_at
from snaketune.config.corpus_sources import Source
from snaketune.data_folders import data_files

PART = "part-00000-0123abcd-0123-4567-89ab-0123456789ab-c000.snappy.parquet"


def chosen(*names: str, succeeded: bool = False, **contents: bytes) -> list[str]:
    return data_files("d", names, lambda name: contents[Path(name).stem], succeeded)


def refused(*names: str, **contents: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        chosen(*names, **contents)
    return str(caught.value)


def test_marks_and_hidden_files_are_no_data():
    assert chosen("_SUCCESS", PART, f".{PART}.crc", "_metadata", ".git/x.json", "_logs/x.json") == [PART]
    assert chosen("lang=de/a.jsonl", "_x=1/b.jsonl") == ["_x=1/b.jsonl", "lang=de/a.jsonl"]


def test_a_folder_of_spark_is_finished_by_its_mark():
    assert chosen("_SUCCESS", PART, f"lang=de/{PART}") == ["lang=de/" + PART, PART]
    message = refused(PART)
    assert f"'d' holds {PART}, which Spark wrote, and no _SUCCESS" in message
    assert message.endswith("name a pattern, such as d/**/*.parquet")
    # Of two tables, one is finished.
    assert "holds b/part-" in refused("a/_SUCCESS", f"a/{PART}", f"b/{PART}")
    assert chosen(PART, succeeded=True) == [PART]
    # Other programs use such names, too.
    assert chosen("part-00000.parquet", "part.0.parquet") == ["part-00000.parquet", "part.0.parquet"]


@pytest.mark.parametrize(
    "name", ["_temporary", "_temporary/0/_temporary/attempt_1/part-00000", "x/_temporary/0/a.jsonl"]
)
def test_a_temporary_folder_is_of_a_job_that_has_not_finished(name):
    assert f"'d' holds {name}: Spark or Hadoop is writing to it" in refused("_SUCCESS", PART, name)


def test_a_table_of_delta_lake_has_other_versions_too():
    assert "it is a table of Delta Lake" in refused("_SUCCESS", PART, "_delta_log/00000000000000000000.json")


def test_files_about_the_data_are_no_data():
    assert chosen("README.md", "LICENSE", "dataset_infos.json", "data/a.jsonl", "Citation.cff") == ["data/a.jsonl"]
    assert chosen("data-00000-of-00001.arrow", "state.json", "dataset_info.json") == ["data-00000-of-00001.arrow"]
    assert chosen("readme-questions.jsonl", "states.json") == ["readme-questions.jsonl", "states.json"]


@pytest.mark.parametrize(
    "names",
    [
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("train/data-00000-of-00001.arrow", "validation/data-00000-of-00001.arrow", "dataset_dict.json"),
        ("train.jsonl", "dev.jsonl"),
        ("x/training_1.csv", "x/eval_1.csv"),
    ],
)
def test_a_folder_with_several_splits_is_refused(names):
    assert "holds several splits, such as " in refused(*names)
    assert chosen(names[0]) == [names[0]] and chosen(names[1]) == [names[1]]


def test_other_names_are_no_splits():
    assert len(chosen("trainers.jsonl", "testimonials.jsonl", "valuable/a.jsonl", "train.jsonl", "dev-ops.jsonl")) == 5
    # The folder decides.
    assert chosen("train/test_cases.jsonl", "train/test.jsonl") == ["train/test.jsonl", "train/test_cases.jsonl"]


LOGS = ("logs/executor.json", "logs/stats/00000.json", "logs/logs/task_00000.log", "logs/stats.json")


def test_tasks_of_datatrove_are_compared_with_those_completed():
    data, done = ("00000.jsonl.gz", "00001.jsonl.gz"), ("logs/completions/00000", "logs/completions/00001")
    assert chosen(*data, *LOGS, *done, executor=b'{"world_size": 2}') == [*data]
    message = refused(*data, *LOGS, *done, executor=b'{"world_size": 4}')
    assert message.startswith("'d': 2 of 4 tasks of datatrove haven't finished (no logs/completions/00002)")
    # The folder of the logs itself may be that of the data.
    assert "1 of 2 tasks" in refused("executor.json", "completions/00001", "a.jsonl", executor=b'{"world_size": 2}')


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"world_size": null}'])
def test_without_a_number_of_tasks_nothing_is_decided(content):
    assert chosen("a.jsonl", *LOGS, "logs/completions/00000", executor=content) == ["a.jsonl"]


def test_an_executor_without_completions_is_data():
    assert chosen("executor.json", "a.jsonl") == ["a.jsonl", "executor.json"]


def test_a_local_folder_is_checked_and_a_pattern_is_not(tmp_path):
    for name in (f"t/lang=de/{PART}", "t/_temporary/0/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    table, partition = tmp_path / "t", tmp_path / "t/lang=de"
    with pytest.raises(ValueError, match=r"holds _temporary"):
        Source(files=(str(table),))
    assert Source(files=(f"{table}/*/*.parquet",)).files == (str(partition / PART),)
    with pytest.raises(ValueError, match="no _SUCCESS"):
        files_at(str(partition))
    (table / "_SUCCESS").touch()
    assert files_at(str(partition)) == [str(partition / PART)]
