"""`snakemake smoke`: the same entries with less of everything. tests/workflow/test_smoke.py runs it."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from snaketune.config.load import load
from snaketune.config.task_files import TaskFiles, task_files
from snaketune.diagnostics.smoke import ANSWERS, PROVES, ROWS, SCRATCH, check_smoke_run, smoke_config, write_smoke_run
from snaketune.errors import SnaketuneError
from snaketune.models import small_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [ROOT / "config/config.yaml", *sorted((ROOT / "config/recipes").glob("*.yaml"))]


@pytest.fixture
def shipped(monkeypatch):
    """The project's folder, in which the data of recipes count as present."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("snaketune.config.load._check_files", lambda config: None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_smoke_run_of_each_shipped_config_has_all_its_entries(shipped, path):
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    whole, variants = load(raw)
    small, small_variants = load(smoke_config(raw, lambda base: base if "path" in base else base | SCRATCH))
    for section in ("corpora", "tokenizers", "sample", "score", "eval"):
        assert getattr(small, section).keys() == getattr(whole, section).keys()
    # Two values of each key of a grid, and all rounds.
    for section in ("sft", "dpo", "reward"):
        names = {name for variant in small_variants[section].values() for name in variant}
        assert names <= getattr(whole, section).keys()
        assert all(variant[0] in names for variant in variants[section].values())
    for corpus in small.corpora.values():
        read = [source for source in corpus.sources if not source.files or "selected-" not in source.files[0]]
        assert all(source.max_rows <= ROWS for source in read)
    for run in (*small.sft.values(), *small.dpo.values(), *small.reward.values()):
        assert (run.operation.gpus, run.operation.nodes, run.training.batch_rows) == (0, 1, 2)
        assert run.operation.launch == "single"
    for name, evaluation in small.eval.items():
        assert evaluation.samples == ANSWERS
        assert evaluation.exact_match.limit == (ANSWERS if "exact_match" in raw["eval"][name] else None)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_moe", "unknown-family"])
def test_a_small_model_of_the_family_and_vocabulary_stands_for_the_base(tmp_path, monkeypatch, capsys, family):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    known = family != "unknown-family"
    config = AutoConfig.for_model(family if known else "qwen2", vocab_size=151_936).to_dict()
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    if not known:

        def smaller(config, further):
            if config.model_type == "qwen2":
                raise KeyError("a size that isn't known")
            return original(config, further)

        original = small_model.smaller
        monkeypatch.setattr(small_model, "smaller", smaller)
    raw = {
        "corpora": {"a": {"kind": "text", "sources": [{"files": ["a.txt"]}]}},
        "sft": {"x": {"base": {"path": "base"}}, "y": {"extends": "x"}},
    }
    write_smoke_run(json.dumps(raw | {"sft.y.base.path": "base"}), tmp_path / "smoke")
    written = json.loads((tmp_path / "smoke/config.json").read_text())
    assert [run["base"] for run in written["sft"].values()] == [{"path": "model-0"}] * 2
    small = AutoConfig.from_pretrained(tmp_path / "smoke/model-0")
    assert (small.model_type, small.vocab_size) == (family if known else "llama", 151_936)
    assert (tmp_path / "smoke/model-0/model.safetensors").stat().st_size < 100e6
    assert ("a Llama stands for it" in capsys.readouterr().out) == (not known)


def test_responses_are_short_and_other_rows_stand_for_selected_ones(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").touch()
    (tmp_path / "mine.py").touch()
    training = {"epochs": 1, "batch_rows": 4, "learning_rate": 0.001}
    config = {
        "corpora": {
            "chat": {"kind": "conversations", "sources": [{"files": ["chat.jsonl"]}]},
            **{
                kind: {"kind": kind, "sources": [{"scores": "right", **how}]}
                for kind, how in {
                    "preferences": {"pairs": "best-worst", "margin": 0.5},
                    "unpaired": {"good_from": 1, "bad_to": 0},
                }.items()
            },
        },
        "tokenizers": {"small": {"train": {"corpora": ["chat"]}}},
        "sft": {"run": {"base": SCRATCH, "corpus": "chat", "tokenizer": "small", "training": training}},
        "sample": {
            "tries": {
                "model": "sft:run", "prompts": {"corpora": ["chat"]}, "responses": 8,
                "generation": {"temperature": 1.0, "max_new_tokens": 500}, "operation": {"engine": "vllm", "parts": 4},
            }
        },
        "score": {
            "right": {"samples": "tries", "by": {"answer": {}}},
            "own": {"samples": "tries", "by": {"python": "mine.py"}},
            "both": {"samples": "tries", "by": {"sum": {"right": 1.0, "own": 1.0}}},
        },
    }  # fmt: skip
    write_smoke_run(json.dumps(config), tmp_path / "smoke")
    smoke = json.loads((tmp_path / "smoke/config.json").read_text())
    assert smoke["sample"]["tries"]["operation"] == {"engine": "transformers", "gpus": 0}
    assert smoke["sample"]["tries"]["responses"] == 2 and smoke["sample"]["tries"]["prompts"]["limit"] == 2
    assert smoke["score"]["own"]["by"]["python"] == str(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path / "smoke")
    planned, _ = load(smoke)
    assert not planned.corpora["preferences"].sampled
    for kind in ("preferences", "unpaired"):
        (source,) = planned.corpora[kind].sources
        assert len((tmp_path / "smoke" / source.files[0]).read_text().splitlines()) == 20


def test_local_tasks_are_found_from_the_smoke_runs_folder(tmp_path, monkeypatch):
    """Twice, as for a second smoke run."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text("{}\n")
    task = {"task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/rows.jsonl"}}}
    (tmp_path / "tasks/t.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.chdir(tmp_path)
    raw = {"eval": {"a": {"tasks": {"folder": "tasks", "names": ["t"]}}}}
    for _ in range(2):
        write_smoke_run(json.dumps(raw), tmp_path / "results/smoke")
    monkeypatch.chdir(tmp_path / "results/smoke")
    assert task_files("tasks") == TaskFiles(inside=("tasks/t.yaml",), outside=("data/rows.jsonl",))


def test_a_run_that_ended_says_what_it_shows_and_another_one_fails(tmp_path, capsys):
    with pytest.raises(SnaketuneError, match="the smoke run didn't end"):
        check_smoke_run(tmp_path)
    report = tmp_path / "results/report/pages/index.html"
    report.parent.mkdir(parents=True)
    report.touch()
    check_smoke_run(tmp_path)
    assert PROVES[1] in capsys.readouterr().out
