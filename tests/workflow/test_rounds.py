"""Rounds as a whole: kills in every stage, what an edit reruns, a round that makes too little, and the report."""

import json
import os
import signal
import subprocess
import time

import pytest

from .command_line import environment
from .conftest import Project
from .test_survival import processes, wait_until_ended

pytestmark = [pytest.mark.workflow, pytest.mark.slow]
# Longer responses are better; of a model that was hardly trained, no answer is right.
SCORER = "def score(prompt, response, row):\n    return float(len(response))\n"
STAGES = ("prompts", "generate", "sample", "score", "select", "corpus", "tokenize", "ref_logps", "dpo")
LAST = "results/dpo/self-2/manifest.json"


@pytest.fixture
def rounds(project) -> Project:
    (project.folder / "scorer.py").write_text(SCORER)
    project.config["dpo"]["self"] = {
        "from": "run", "rounds": 2, "reference": "start", "packing": {"length": 256}, "mix": {"pairs": 0.5},
        "sample": {
            "prompts": {"corpora": ["chat"], "limit": 12}, "responses": 3,
            "generation": {"temperature": 1.0, "max_new_tokens": 24, "stop": [" ", "e", "\n"]}, "operation": {"gpus": 0},
        },
        "score": {"by": {"python": "scorer.py"}},
        "pairs": {"rule": "best-worst", "min_rows": 4},
        "training": {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 1.0e-3},
    }  # fmt: skip
    # One split for all corpora.
    project.config["corpora"]["pairs"]["held_out"] = project.config["corpora"]["chat"]["held_out"]
    project.config["eval"]["both"]["models"] = ["sft:run", "dpo:self"]
    project.config["eval"]["both"]["kl_from"] = "sft:run"
    return project


def payload(project: Project, manifest: str = LAST) -> dict[str, str]:
    return {name: entry["digest"] for name, entry in json.loads(project.read(manifest))["payload"].items()}


def test_rounds_that_are_killed_in_every_stage_end_with_the_same_bytes(rounds, tmp_path):
    undisturbed = rounds.copy_to(tmp_path / "undisturbed")
    undisturbed.snakemake(LAST)
    killed = []
    for stage in STAGES:
        running = subprocess.Popen(
            rounds.command(LAST), cwd=rounds.folder, env=environment(), process_group=0, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while running.poll() is None and not (found := processes(f"snaketune {stage} ", rounds.folder)):
            time.sleep(0.02)
        if running.poll() is None:
            for number in found:
                os.kill(number, signal.SIGKILL)
            killed.append(stage)
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        wait_until_ended(rounds)
        rounds.snakemake("--unlock")
    # A stage that is over before it is seen isn't killed; the long ones are.
    assert {"generate", "dpo"} <= set(killed)
    rounds.snakemake(LAST)
    assert payload(rounds) == payload(undisturbed)
    for stage in ("sample", "score", "corpus"):
        manifest = f"results/{stage}/self-2/manifest.json"
        assert payload(rounds, manifest) == payload(undisturbed, manifest)


def test_an_edit_of_a_round_and_a_further_round_leave_the_rounds_before_alone(rounds):
    rounds.snakemake()
    page = rounds.read("results/report/pages/index.html")
    assert '<section id="rounds">' in page and "KL, nats/token" in page and "dpo:self-2" in page
    first = payload(rounds, "results/dpo/self-1/manifest.json")
    rounds.config["dpo"]["self"]["rounds"] = [{}, {"beta": 0.3}]
    assert rounds.stale() == {"dpo", "eval", "card", "report"}
    listed = rounds.snakemake("--dry-run", LAST)
    assert "dpo/self-1" not in listed
    rounds.config["dpo"]["self"]["rounds"] = 3
    stale = rounds.stale()
    assert {"prompts", "generate", "sample", "score", "select", "corpus", "dpo"} <= stale and "sft" not in stale
    rounds.snakemake()
    assert payload(rounds, "results/dpo/self-1/manifest.json") == first
    # A round that makes too little ends the run, with the reason and the last model.
    rounds.config["dpo"]["self"]["rounds"] = [{}, {}, {}, {"pairs.min_rows": 500}]
    said = rounds.snakemake(check=False)
    assert "fewer than min_rows: 500" in said and "The last model is dpo:self-3" in said
    assert (rounds.folder / "results/dpo/self-3/manifest.json").is_file()
    rounds.config["dpo"]["self"]["rounds"] = 3
    assert rounds.stale() == set()


def test_no_held_out_prompt_is_trained_on_in_any_round(rounds):
    """Of all corpora that the rounds train on, and are evaluated on."""
    from snaketune.tables import read_table

    rounds.snakemake()
    held_out: set[str] = set()
    trained: set[str] = set()
    for name in ("chat", "pairs", "self-1", "self-2"):
        for split, prompts in (("held_out", held_out), ("train", trained)):
            for row in read_table(rounds.folder / f"results/corpus/{name}/rows/{split}-00000.arrow").to_pylist():
                turns = row["messages"] if "messages" in row else row["prompt"]
                prompts.add("\n".join(turn["content"] for turn in turns if turn["role"] in ("system", "user"))[:200])
    assert held_out and trained and not held_out & trained
    # As preflight writes it of a held-out prompt that is trained on (tests/diagnostics/test_leaks.py).
    assert "are trained on in" not in rounds.read("results/preflight/run-2/findings/findings.json")
