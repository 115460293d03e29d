"""The user interface: dry runs, graphs, summaries, recipes, errors, the report."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from .command_line import snakemake
from .conftest import ROOT, Project, copy_code, rules_in

pytestmark = pytest.mark.workflow
RECIPES = sorted((ROOT / "config/recipes").glob("*.yaml"))


def put_first(monkeypatch, folder: Path, program: str, script: str) -> None:
    """Let a program be found before all others of its name."""
    tool = folder / "tools" / program
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def three_gpus(tmp_path, monkeypatch) -> None:
    """A machine whose nvidia-smi lists three."""
    for name in ("CUDA_VISIBLE_DEVICES", "SNAKEMAKE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    put_first(monkeypatch, tmp_path, "nvidia-smi", "seq 0 2")


def provided_in(said: str) -> tuple[int, ...]:
    """Cores and GPUs that a run says it may use."""
    result = re.search(r"Provided cores: (\d+)(?s:.*)Provided resources: gpu=\D*(\d+)", said)
    assert result, said
    return tuple(int(number) for number in result.groups())


@pytest.fixture
def cloned(finished, tmp_path) -> Path:
    """A clone with the results of its config, but for the report."""
    folder = finished.copy_to(tmp_path / "project").folder
    copy_code(folder)
    (folder / "config").mkdir()
    # A spec of the report as with hundreds of jobs, longer than Linux allows for one argument (128 KiB).
    config = finished.config | {"report": {"note": "All of it. " * 20_000}}
    (folder / "config/config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "results/report/manifest.json").unlink()
    return folder


def test_a_bare_snakemake_plans_the_config_of_a_clone_with_what_the_machine_has(cloned, three_gpus):
    status, said = snakemake(["--dry-run"], cloned, apart=True)
    assert status == 0, said
    assert rules_in(said) == {"report"}


@pytest.mark.slow
def test_a_bare_snakemake_runs_the_config_of_a_clone_with_what_the_machine_has(cloned, three_gpus):
    status, said = snakemake([], cloned, apart=True)
    assert status == 0, said
    assert provided_in(said) == (os.cpu_count(), 3)
    assert (cloned / "results/report/manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "provided"),
    [
        (["--cores", "7", "--resources", "gpu=2"], (7, 2)),
        # Beside another profile the default one limits nothing to this machine.
        (["--profile", "ours"], (5, 9)),
    ],
)
def test_command_line_and_another_profile_win(project, three_gpus, arguments, provided):
    (project.folder / "ours").mkdir()
    (project.folder / "ours/config.yaml").write_text("cores: 5\nresources: [gpu=9]\n", encoding="utf-8")
    assert provided_in(cleaning(project, *arguments)) == provided


def test_a_machine_without_gpus_runs_as_many_jobs_as_it_has_cores_for(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert provided_in(cleaning(project)) == (os.cpu_count(), os.cpu_count())


def cleaning(project: Project, *arguments: str) -> str:
    """Run the shortest job that there is, with the default profile."""
    project.write_config()
    command = ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml", *arguments, "--", "clean_work"]
    status, said = snakemake(command, project.folder)
    assert status == 0, said
    return said


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans(recipe, tmp_path):
    config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    (tmp_path / "resources").symlink_to(ROOT / "resources")
    files = [
        file
        for corpus in config["corpora"].values()
        for source in corpus["sources"]
        for file in source.get("files", ())
        if not file.startswith("resources/")
    ]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}\n")
    for evaluation in config.get("eval", {}).values():
        if folder := evaluation.get("tasks", {}).get("folder"):
            (tmp_path / folder).mkdir()
            for name in evaluation["tasks"]["names"]:
                (tmp_path / folder / f"{name}.yaml").write_text(f"task: {name}\n", encoding="utf-8")
    status, said = snakemake(
        ["--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path), "-n", "--configfile", str(recipe)],
        tmp_path,
    )
    assert status == 0, said
    requested = {"corpus", "tokenizer", "tokenize", "plan", "write", "pack", "sft", "card", "report"}
    # Models that don't fit on one GPU need nothing else.
    requested |= {"eval"} if "70b" not in recipe.stem else set()
    requested |= {"ref_logps", "dpo"} if "dpo" in config else set()
    assert requested <= rules_in(said)
    # A line for each job, and what all take.
    lines, jobs = said.splitlines(), sum(int(count) for count in re.findall(r"^total +(\d+)", said, re.MULTILINE)[:1])
    (total,) = (line for line in lines if line.startswith("in all"))
    assert any(re.fullmatch("stage +jobs +hours +GPU hours +memory GB +disk GB", line) for line in lines)
    assert float(total.split()[-1]) >= 0.1
    assert int(total.split()[2]) == jobs - 1 == len([line for line in lines if re.match(r"Job \d", line)]) - 1
    assert len(lines) < 30 + 5 * jobs


def test_all_recipes_ship():
    assert [path.stem for path in RECIPES] == [
        "distill-smollm2", "distill", "gpt-oss-20b-lora", "gsm8k-local", "llama3.1-70b-qlora-2x8", "mistral-7b-qlora",
        "mixed-data", "phi3-mini-qlora", "qwen2.5-7b-lora", "qwen3-8b-full", "qwen3.5-27b-lora", "reward-demo",
        "rounds-smollm2", "rounds", "smollm2-135m", "tiny-23m",
    ]  # fmt: skip


def test_several_nodes_are_planned_anywhere_and_refused_before_anything_runs_without_slurm(fresh, monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    fresh.config["sft"]["run"]["operation"] = {"gpus": 0, "nodes": 2}
    said = fresh.snakemake("-n")
    assert "sft/run: 2 processes (ddp), one on the CPU on each of 2 nodes, by srun --nodes=2" in said
    for rank in range(2):
        assert f"  node {rank + 1}: python -m accelerate.commands.launch" in said
        assert f"--machine_rank {rank} --main_process_ip" in said
    assert "digraph" in fresh.snakemake("--rulegraph")
    refused = fresh.snakemake(check=False)
    assert "operation.nodes: 2 nodes need a SLURM batch job" in refused
    assert [path.name for path in (fresh.folder / "results").iterdir()] == [".jobs"]
    # Targets that don't need them are made.
    fresh.snakemake("results/corpus/chat/manifest.json")
    assert (fresh.folder / "results/corpus/chat/manifest.json").is_file()


def test_a_run_is_a_line_per_job_and_ends_with_what_it_made(finished):
    lines = (finished.folder.parent / "micro.log").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("Select jobs", "Execute ", "Finished jobid", "sample"))]
    ending = "\n".join(lines[-15:])
    assert "dpo:run is better than" in ending or "No significant difference" in ending or "dpo:run is worse" in ending
    assert re.search(r"^ +sft:run +dpo:run$", ending, re.MULTILINE)
    assert "\nreport  results/report/pages/index.html\nmodel   results/dpo/run/model\nchat    python " in ending


def test_jobs_run_in_the_environment_of_a_snakemake_that_is_not_activated(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    fresh.snakemake("results/corpus/chat/manifest.json")
    assert (fresh.folder / "results/corpus/chat/manifest.json").is_file()


def test_a_second_run_has_nothing_to_do(finished):
    assert "Nothing to be done" in finished.snakemake()


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        # Whole, though all results are current.
        ("--rulegraph", 'label = "tokenize'),
        ("--dag", 'label = "tokenize'),
        ("--summary", "results/dpo/run/manifest.json"),
        ("--lint", "good condition"),
    ],
)
def test_graphs_summary_and_lint(finished, argument, shown):
    assert shown in finished.snakemake(argument)


def test_snakemake_lists_the_results_whose_slice_of_the_config_has_changed(project):
    project.config["dpo"]["run"]["beta"] = 0.5
    listed = project.snakemake("--list-params-changes")
    assert "results/dpo/run/manifest.json" in listed
    assert "results/sft/run/manifest.json" not in listed


def test_snakemakes_own_report_holds_every_page_with_its_caption(project):
    project.snakemake("--report", "report.html")
    html = project.read("report.html")
    for page in ("index.html", "packing.html", "evaluation.csv", "evaluation.json", "samples.html", "data.csv", "variants.csv",
                 "preferences.html"):  # fmt: skip
        assert page in html
    for caption in ("The whole run on one page", "the first of each corpus by id"):
        assert caption in html
    # The slice of the config that the report reads.
    assert "spec" in html and "sort_by" in html


def test_the_report_page_is_one_file_without_network(finished):
    page = finished.read("results/report/pages/index.html")
    assert "<svg" in page
    for outside in ("<script", 'src="http', 'href="http', "@import"):
        assert outside not in page


REFUSED = [
    ({"sft": {"run": {"corpsu": "chat"}}}, "sft.run.corpsu: unknown key; did you mean 'corpus'?"),
    ({"sft": {"run": {"training": {"learning_rate": "fast"}}}}, "sft.run.training.learning_rate: found 'fast'"),
    ({"dpo": {"run": {"from": "rum"}}}, "dpo.run.from: there is no 'rum' under `sft:`; did you mean 'run'?"),
    ({"corpora": {"chat": {"sources": [{"files": ["data/chta.jsonl"]}]}}}, "'data/chta.jsonl' is not a file"),
]


def merge(below: dict, above: dict) -> dict:
    return below | {k: merge(below[k], v) if isinstance(v, dict) and k in below else v for k, v in above.items()}


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_wrong_config_is_refused_before_anything_runs(fresh, change, said):
    fresh.config = merge(fresh.config, change)
    shown = fresh.snakemake(check=False)
    assert said in shown
    assert "Traceback" not in shown
    assert not fresh.made()


def test_a_config_on_the_command_line_is_not_merged(fresh):
    # With the default config's stages mixed in, the plan would also hold demo-chat.
    assert "demo-chat" not in fresh.snakemake("--dry-run")


def test_what_preflight_finds_is_not_tried_again(project, monkeypatch):
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.004
    put_first(monkeypatch, project.folder, "python", "exit 1")
    said = project.snakemake("results/preflight/run/manifest.json", "--retries", "2", check=False)
    assert "Error in rule preflight" in said
    assert "Trying to restart" not in said


def test_too_many_bad_rows_stop_the_run_with_where_they_are(fresh):
    path = fresh.folder / "data/chat.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(['{"messages": 1}', "not json", *lines[:50]]) + "\n", encoding="utf-8")
    said = fresh.snakemake("results/corpus/chat/manifest.json", check=False)
    assert "data/chat.jsonl" in said
    assert "max_quarantined_fraction" in said
    assert "Traceback" not in said
    assert not (fresh.folder / "results/corpus/chat/manifest.json").exists()
    fresh.config["corpora"]["chat"]["max_quarantined_fraction"] = 0.1
    fresh.snakemake("results/corpus/chat/manifest.json")
    quarantined = [json.loads(line) for line in fresh.read("results/corpus/chat/rows/quarantine.jsonl").splitlines()]
    assert [(row["file"], row["line"]) for row in quarantined] == [("data/chat.jsonl", 1), ("data/chat.jsonl", 2)]
