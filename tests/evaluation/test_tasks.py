"""Tasks of lm-evaluation-harness: the rows that are there now, and every score that they give."""

import gzip
import json
import os

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snaketune.errors import SnaketuneError
from snaketune.evaluation.tasks import run_tasks
from tests.models.conftest import tiny_model

DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: [w5, w6]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
FILTERED = """
output_type: generate_until
generation_kwargs: {max_gen_toks: 2, until: [w9]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: strict-match, filter: [{function: regex, regex_pattern: "(w5)"}, {function: take_first}]}
"""


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """Scores of a task with these lines, asked about rows with this answer in a file of always the same time."""
    shared = tmp_path / "shared"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", shared)
    words = {f"w{n}": n for n in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "state").mkdir()
    model = tiny_model("llama")

    def asking(lines: str, answer: str, name: str = "rows.jsonl") -> dict[str, float]:
        path = tmp_path / name
        text = "".join(json.dumps({"q": "w7 w8", "a": answer}) + "\n" for _ in range(2)).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        os.utime(path, (1e9, 1e9))
        (tmp_path / "tasks/t.yaml").write_text(f"task: t\n{DATA.format(path=path)}{lines}")
        found = run_tasks(model, tmp_path / "tokenizer", tmp_path / "tasks", ("t",), None, 1, tmp_path / "state")
        assert not list((tmp_path / "state").iterdir())
        assert datasets.config.HF_DATASETS_CACHE is shared
        return found["t"]

    return asking


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_replaced_by_another_of_the_same_time_is_read_again(scores, name):
    assert scores(CHOICE, "w5", name)["acc"] + scores(CHOICE, "w6", name)["acc"] == 1.0


def test_scores_under_a_filter_keep_its_name(scores):
    assert list(scores(FILTERED, "w5")) == ["exact_match,strict-match"]


def test_a_task_without_a_number_is_refused(scores):
    with pytest.raises(SnaketuneError, match=r"eval\.tasks\.names: t in .* gives no score"):
        scores("output_type: multiple_choice\ndoc_to_choice: [w5, w6]\nmetric_list: []\n", "w5")
