"""The files that a task of lm-evaluation-harness consists of; files that can't be tracked are refused."""

import gzip

import pytest

from snaketune.config.task_files import task_files
from snaketune.corpus.selecting.evaluation_ngrams import texts_of_file
from snaketune.errors import SnaketuneError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file below the working directory."""
    monkeypatch.chdir(tmp_path)

    def writing(path: str, text: str = "x") -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    writing("tasks/t.yaml", "task: t\ndataset_path: json\n")
    return writing


def test_every_file_of_the_folder_counts_in_any_compression(write):
    names = ["a.parquet", "b.arrow", "c.json.gz", "d.csv.gz", "e.jsonl.zst", "f.txt", "deep/g.jsonl", "utils.py"]
    for name in names:
        write(f"tasks/{name}")
    for name in ("README.md", ".hidden", "__pycache__/utils.cpython-311.pyc"):
        write(f"tasks/{name}")
    files = task_files("tasks")
    assert set(files.inside) == {f"tasks/{name}" for name in [*names, "t.yaml"]}
    assert files.outside == ()
    assert set(files.data) == {f"tasks/{name}" for name in names if name != "utils.py"}


@pytest.mark.parametrize(
    ("task", "outside"),
    [
        ("dataset_kwargs: {data_files: {test: data/a.parquet, train: [data/b.jsonl.gz]}}", ["a.parquet", "b.jsonl.gz"]),
        ("dataset_kwargs: {data_files: data/*.parquet}", ["a.parquet"]),
        ("dataset_kwargs: {data_dir: data/rows, data_files: {test: c.csv}}", ["rows/c.csv"]),
        ("dataset_path: ./data/rows", ["rows/c.csv", "rows/d.csv"]),
        ("dataset_path: data/rows", ["rows/c.csv", "rows/d.csv"]),
        ("dataset_path: data", ["a.parquet", "b.jsonl.gz", "base.yml", "helpers.py", "rows/c.csv", "rows/d.csv"]),
        ("dataset_path: json\ndataset_kwargs: {data_files: data/a.parquet}", ["a.parquet"]),
        ("dataset_kwargs: {data_dir: data/rows}", ["rows/c.csv", "rows/d.csv"]),
        ("include: ../data/base.yml", ["a.parquet", "base.yml"]),
        ("include: [../data/base.yml]", ["a.parquet", "base.yml"]),
        ("doc_to_text: !function ../data/helpers.text", ["helpers.py"]),
        ("fewshot_config: {samples: !function data.helpers.text}", ["helpers.py"]),
        ("group: g\n_: [{task: u, include: ../data/base.yml}]", ["a.parquet", "base.yml"]),
        # Followed by their names: the Hub, and libraries.
        ("dataset_path: openai/gsm8k\ndataset_kwargs: {data_files: test.parquet}", []),
        ("doc_to_text: !function lm_eval.tasks.gsm8k.utils.text", []),
        ("dataset_kwargs: {data_files: tasks/t.yaml}", []),
    ],
)
def test_files_outside_the_folder_that_a_task_names_count(write, task, outside):
    for name in ("a.parquet", "b.jsonl.gz", "rows/c.csv", "rows/d.csv", "helpers.py"):
        write(f"data/{name}")
    # Not what `dataset_path: json` means.
    write("json/e.json")
    write("data/base.yml", "dataset_kwargs: {data_files: data/a.parquet}")
    write("tasks/t.yaml", f"task: t\n{task}\n")
    files = [path.replace("tasks/../", "") for path in task_files("tasks").outside]
    assert files == [f"data/{name}" for name in outside]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("dataset_kwargs: {data_files: gone.jsonl}", r"data_files: 'gone\.jsonl' doesn't exist .*couldn't be detected"),
        ("dataset_kwargs: {data_files: gone/*.jsonl}", r"no file matches 'gone/\*\.jsonl'"),
        (
            "dataset_kwargs: {data_files: 'https://some.where/a.csv'}",
            "changes of 'https:.*' can't be detected; download it",
        ),
        ("dataset_path: ./gone", r"dataset_path: 'gone' doesn't exist"),
        ("include: gone.yaml", r"include: 'tasks/gone\.yaml' doesn't exist"),
        ("doc_to_text: !function gone_utils.text", r"there is no tasks/gone_utils\.py, and no library 'gone_utils'"),
        ("a: [", r"tasks/t\.yaml can't be read as YAML"),
    ],
)
def test_untraceable_files_are_refused(write, task, message):
    write(
        "tasks/t.yaml", f"task: t\ndataset_path: json\n{task}\n" if "dataset_path" not in task else f"task: t\n{task}"
    )
    with pytest.raises(SnaketuneError, match=message):
        task_files("tasks")


def test_plain_text_of_a_task_is_compared_line_by_line(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.tsv.gz"
    plain.write_text("one\ntwo\n")
    packed.write_bytes(gzip.compress(b"three\tfour\n"))
    assert [row.text.split() for path in (plain, packed) for row in texts_of_file(path)] == [
        ["one"], ["two"], ["three", "four"]
    ]  # fmt: skip
