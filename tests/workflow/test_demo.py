"""The embedded default, whole: the demo's files, and what the small model must have learned at the end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, made_once, wrong_modes

pytestmark = pytest.mark.workflow


def test_the_demo_files_are_what_their_scripts_write(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "resources/demo/make_demo.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(ROOT / "resources/eval_tasks/make_demo_choice.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_demo_choice.py"], check=True)
    name = "demo_choice.jsonl"
    assert (tmp_path / name).read_bytes() == (ROOT / "resources/eval_tasks" / name).read_bytes()


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A copy of the project after `snakemake`."""
    return made_once(tmp_path_factory, "demo", run_demo)


def run_demo(folder: Path) -> None:
    folder.mkdir()
    for name in ("Snakefile", "workflow", "config", "profiles", "envs", "resources"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    # As a user runs it: in bfloat16 products where the processor has units for them, and with a server of its own for the jobs,
    # since the other tests' server has other products.
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    del variables["ONEDNN_MAX_CPU_ISA"]
    # So small a model learns no faster on more cores, and these are those of other tests.
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        umask=0o022,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.slow
def test_the_modes_of_all_results_are_those_of_the_umask(demo):
    assert wrong_modes(demo / "results", 0o022) == {}


def scores(demo: Path, model: str) -> dict:
    return json.loads((demo / f"results/eval/demo/{model}-demo/scores/scores.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_model_learns_the_tasks_and_then_the_habit(demo):
    base, sft, dpo = (scores(demo, model) for model in ("base", "sft", "dpo"))
    exact = {
        name: s["conversations"]["demo-chat"]["exact_match"] for name, s in (("base", base), ("sft", sft), ("dpo", dpo))
    }
    assert exact["base"]["share"] <= 0.02
    assert exact["sft"]["share"] >= 0.85
    # Half of an interval of 320 responses.
    assert exact["dpo"]["share"] >= exact["sft"]["share"] - 0.03
    assert dpo["preferences"]["demo-preferences"]["reward_accuracy"] >= 0.9
    assert exact["dpo"]["mean_response_tokens"] < 0.85 * exact["sft"]["mean_response_tokens"]
    assert sft["tasks"]["demo_choice"]["acc"] > base["tasks"]["demo_choice"]["acc"]


@pytest.mark.slow
def test_the_habit_is_visible_in_the_samples(demo):
    brief = {}
    for model in ("sft", "dpo"):
        with (demo / f"results/eval/demo/{model}-demo/scores/responses.jsonl").open("rb") as file:
            responses = [json.loads(line)["response"] for line in file]
        brief[model] = sum(r.startswith("Answer: ") and "\n" not in r.strip() for r in responses) / len(responses)
    assert brief["sft"] < 0.8
    assert brief["dpo"] > 0.9


@pytest.mark.slow
def test_the_best_of_the_sweep_is_linked_and_recorded(demo):
    output = json.loads((demo / "results/report/manifest.json").read_text(encoding="utf-8"))["best"]
    pairs = {
        path.name.removeprefix("dpo-"): json.loads((path / "scores/scores.json").read_text(encoding="utf-8"))
        for path in demo.glob("results/eval/demo/dpo-*")
    }
    assert len(pairs) == 2
    accuracy = {name: s["preferences"]["demo-preferences"]["logp_accuracy_per_token"] for name, s in pairs.items()}
    assert output["value"] == max(accuracy.values()) == accuracy[output["run"].removeprefix("dpo:")]
    assert (demo / "results/best").resolve() == (demo / "results" / output["payload"]).resolve()
    page = (demo / "results/report/pages/index.html").read_text(encoding="utf-8")
    assert f"<b>{output['run']}</b> comes first" in page
    assert "Won: from the rejected to the chosen response" in page
    assert not [name for name in demo.glob("results/dpo/*/manifest.json") if '"stopped"' in name.read_text("utf-8")]


def test_every_count_adds_up_from_raw_rows_to_trained_tokens(finished):
    for name, file in (("chat", "chat"), ("pairs", "preferences")):
        corpus = json.loads(finished.read(f"results/corpus/{name}/manifest.json"))["counts"]
        raw = finished.read(f"data/{file}.jsonl").count("\n")
        retained = corpus["kept"]
        assert raw == corpus["read"]
        assert (
            raw
            == corpus["quarantined"]["total"]
            + corpus["dropped"]["duplicate"]
            + retained["train"]
            + retained["held_out"]
        )
        (path,) = finished.folder.glob(f"results/pack/{name}-*/manifest.json")
        packed = json.loads(path.read_text(encoding="utf-8"))["counts"]
        for split in ("train", "held_out"):
            assert packed[split]["read"] == retained[split]
            assert packed[split]["read"] == packed[split]["kept"] + sum(packed[split]["dropped"].values())
        if name == "chat":
            trained = json.loads(finished.read("results/sft/run/manifest.json"))["counts"]
            assert trained["tokens_per_epoch"] == packed["train"]["tokens"]
