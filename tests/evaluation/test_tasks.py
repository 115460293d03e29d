"""Tasks of lm-evaluation-harness: local rows are read again, shipped tasks come from the cache, scores have intervals."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from lm_eval import tasks as lm_eval_tasks
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snaketune.config.evaluations import TaskSettings
from snaketune.errors import SnaketuneError
from snaketune.evaluation.task_code import refuse_code
from snaketune.evaluation.tasks import prepared_tasks, run_tasks
from tests.models.conftest import tiny_model

SHIPPED = Path(lm_eval_tasks.__file__).parent
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
COMMIT = "210d026faf9955653af8916fad021475a3f00453"


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer without a chat template."""
    words = {f"w{n}": n for n in range(97)}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "state").mkdir()
    return tmp_path / "tokenizer"


@pytest.fixture
def local(tmp_path, tokenizer, monkeypatch):
    """Scores a task with these YAML lines on rows with these answers, in a file whose time is always the same."""
    shared = tmp_path / "shared"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", shared)
    (tmp_path / "tasks").mkdir()
    model = tiny_model("llama")

    def asking(lines: str, *answers: str, name: str = "rows.jsonl", **questions) -> SimpleNamespace:
        path = tmp_path / name
        text = "".join(
            json.dumps({"q": f"w7 w{8 + n}", "a": answer}) + "\n" for n, answer in enumerate(answers)
        ).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        os.utime(path, (1e9, 1e9))
        (tmp_path / "tasks/t.yaml").write_text(f"task: t\n{DATA.format(path=path)}{lines}")
        config = TaskSettings(**({"names": ["t"]} | questions))
        with prepared_tasks(config, tmp_path / "tasks", tokenizer, tmp_path / "state") as prepared:
            scores = run_tasks(model, prepared, config, 1)
        assert not list((tmp_path / "state").iterdir())
        assert datasets.config.HF_DATASETS_CACHE is shared
        return SimpleNamespace(**scores)

    return asking


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_replaced_file_with_the_same_time_is_read_again(local, name):
    both = [local(CHOICE, answer, answer, name=name).tasks["t"]["acc"] for answer in ("w5", "w6")]
    assert sum(both) == 1.0


def test_scores_with_a_filter_include_its_name(local):
    results = local(FILTERED, *["w5"] * 5)
    assert (
        list(results.tasks["t"])
        == list(results.task_stderrs["t"])
        == list(results.task_intervals["t"])
        == ["exact_match,strict-match"]
    )


def test_a_task_without_a_numeric_score_is_refused(local):
    with pytest.raises(SnaketuneError, match=r"eval\.tasks\.names: t in .* gives no numeric score"):
        local("output_type: multiple_choice\ndoc_to_choice: [w5, w6]\nmetric_list: []\n", "w5")


def test_intervals_use_lm_evals_standard_error(local):
    results = local(CHOICE, *["w5", "w6"] * 5, "w5")
    share, stderr = results.tasks["t"]["acc"], results.task_stderrs["t"]["acc"]
    assert 0 < share < 1 and stderr == pytest.approx((share * (1 - share) / 10) ** 0.5, abs=1e-4)
    assert results.task_intervals["t"]["acc"] == pytest.approx(
        # Student's t with ten degrees of freedom.
        [max(0, share - 2.228 * stderr), min(1, share + 2.228 * stderr)],
        abs=4e-4,
    )
    # One document has no standard error, and that of a few is unreliable.
    assert local(CHOICE, "w5").task_intervals["t"] == {}
    few = local(CHOICE, "w5", "w6", "w5", "w6")
    assert few.task_stderrs["t"] and few.task_intervals["t"] == {}


def test_bootstrapped_intervals_are_reproducible(local, monkeypatch):
    monkeypatch.setattr("snaketune.evaluation.tasks.BOOTSTRAP", 50)
    lines = CHOICE.replace("metric: acc, aggregation: mean", "metric: mcc, aggregation: matthews_corrcoef")
    both = [local(lines, *["w5", "w6"] * 4).task_intervals for _ in range(2)]
    assert both[0] == both[1]
    assert len(both[0]["t"]["mcc"]) == 2


@pytest.fixture
def seen(monkeypatch):
    """Texts of the first request of each call of the model."""
    texts = []
    loglikelihood = HFLM.loglikelihood
    monkeypatch.setattr(
        HFLM, "loglikelihood", lambda self, requests: texts.append(requests[0].args[0]) or loglikelihood(self, requests)
    )
    return texts


def test_few_shot_examples_and_instructions_precede_the_question(local, seen):
    examples = f"{CHOICE}fewshot_split: test\nfewshot_config: {{sampler: first_n}}\n"
    local(examples, "w5", "w6", "w5", few_shot=1, system_instruction="w40 ")
    assert seen[0].startswith("w40 ") and seen[0].count("w7") == 2
    local(examples, "w5", "w6", "w5")
    assert seen[1].count("w7") == 1


def test_the_chat_template_is_applied_where_there_is_one_or_as_configured(local, tokenizer, seen):
    with pytest.raises(SnaketuneError, match=r"chat_template is true, but the tokenizer has none"):
        local(CHOICE, "w5", "w6", chat_template=True)
    local(CHOICE, "w5", "w6")
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}w30 {{ m.content }} w31 {% endfor %}")
    for configured in ("auto", False):
        local(CHOICE, "w5", "w6", chat_template=configured)
    assert [text.split() for text in seen] == [["w7", "w8"], ["w30", "w7", "w8", "w31"], ["w7", "w8"]]
    examples = f"{CHOICE}fewshot_split: test\nfewshot_config: {{sampler: first_n}}\n"
    for turns in (True, False):
        local(examples, "w5", "w6", few_shot=1, few_shot_as_multiturn=turns)
    assert [text.count("w30") for text in seen[3:]] == [3, 1]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Shipped tasks reduced to `arc`, since indexing all takes 15 s; its data in the cache of `datasets`, no network."""
    arc = {"include_path": str(SHIPPED / "arc"), "include_defaults": False}
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda: MANAGER(**arc))
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("ARC-Easy", "ARC-Challenge"):
        cached(tmp_path / f"cache/allenai___ai2_arc/{name}/0.0.0/{COMMIT}", name)


MANAGER = lm_eval_tasks.TaskManager


def cached(folder: Path, name: str) -> None:
    """Write a repository's data as `datasets` caches it."""
    rows = [
        {
            "id": str(n), "question": f"w7 w{8 + n}", "answerKey": "AB"[n % 2],
            "choices": {"text": ["w5", "w6"], "label": ["A", "B"]},
        }
        for n in range(6)
    ]  # fmt: skip
    made = datasets.Dataset.from_list(rows)
    folder.mkdir(parents=True)
    splits = datasets.SplitDict()
    for split in ("train", "validation", "test"):
        with datasets.arrow_writer.ArrowWriter(
            features=made.features, path=str(folder / f"ai2_arc-{split}.arrow")
        ) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        splits.add(datasets.SplitInfo(split, num_examples=len(rows), dataset_name="ai2_arc"))
    datasets.DatasetInfo(
        features=made.features, builder_name="parquet", dataset_name="ai2_arc", config_name=name, version="0.0.0",
        splits=splits, download_checksums={f"hf://datasets/allenai/ai2_arc@{COMMIT}/{name}/test.parquet": {"num_bytes": 1}},
    ).write_to_directory(str(folder))  # fmt: skip


def test_shipped_tasks_run_by_name_without_a_network(shipped, tokenizer, tmp_path):
    questions = TaskSettings(names=["ai2_arc"], few_shot=2, limit=5)
    with prepared_tasks(questions, None, tokenizer, tmp_path / "state") as prepared:
        assert prepared.data == {"allenai/ai2_arc": [COMMIT]}
        scores = run_tasks(tiny_model("llama"), prepared, questions, 4)
    assert set(scores["tasks"]) == {"arc_easy", "arc_challenge"}
    assert set(scores["tasks"]["arc_easy"]) == set(scores["task_intervals"]["arc_easy"]) == {"acc", "acc_norm"}


def test_uncached_data_are_refused_without_a_network(shipped, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "empty")
    with (
        pytest.raises(SnaketuneError, match=r"arc_easy of lm-evaluation-harness can't be loaded"),
        prepared_tasks(TaskSettings(names=["arc_easy"]), None, tokenizer, tmp_path / "state"),
    ):
        pass


def test_an_unknown_name_is_refused_with_the_nearest(shipped, tokenizer, tmp_path):
    with (
        pytest.raises(SnaketuneError, match=r"lm-evaluation-harness has no 'arc_eazy'; did you mean 'arc_easy'\?"),
        prepared_tasks(TaskSettings(names=["arc_eazy"]), None, tokenizer, tmp_path / "state"),
    ):
        pass


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("humaneval", "humaneval", "humaneval runs code that the model writes (unsafe_code)"),
        ("humaneval", "humaneval_instruct", "runs code that the model writes (unsafe_code)"),
        ("mbpp", "mbpp_instruct", "runs code that the model writes"),
        ("cruxeval", "cruxeval_input_cot", "runs code that the model writes"),
        (
            "mmlu-redux-spanish",
            "mmlu_redux_spanish_generative",
            "needs code that comes with its data set (trust_remote_code)",
        ),
    ],
)
def test_shipped_tasks_that_run_code_are_refused(folder, name, said):
    index = MANAGER(include_path=str(SHIPPED / folder), include_defaults=False).task_index
    with pytest.raises(SnaketuneError, match="remove the task") as error:
        refuse_code(index, (name,))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("unsafe_code: true", "unsafe_code"),
        ("dataset_kwargs: {trust_remote_code: true}", "trust_remote_code"),
        ("metric_list: [{metric: code_eval}]", "code_eval"),
        ("process_results: !function own.score", "code_eval"),
        ("include: base", "unsafe_code"),
    ],
)
@pytest.mark.parametrize("selected", ["t", "some", "all", "deep", "inline"])
def test_code_is_refused_in_tasks_tags_and_groups(tmp_path, lines, said, selected):
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\nmetric = load('code_eval')\n")
    (tmp_path / "base").write_text("unsafe_code: true\n")
    (tmp_path / "t.yaml").write_text(f"task: t\ntag: some\ndataset_path: x/y\n{lines}\n")
    (tmp_path / "fine.yaml").write_text("task: fine\ntag: some\ndataset_path: x/y\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [fine, {task: t, num_fewshot: 1}]\n")
    (tmp_path / "deep.yaml").write_text("group: deep\ntask: [{group: new, task: [some]}]\n")
    (tmp_path / "inline.yaml").write_text("group: inline\ntask: [all, {task: new, unsafe_code: true}]\n")
    index = MANAGER(include_path=str(tmp_path), include_defaults=False).task_index
    refuse_code(index, ("fine",))
    with pytest.raises(SnaketuneError) as error:
        refuse_code(index, ("fine", selected))
    assert said in str(error.value) or selected == "inline"
