"""Reruns: every config key, every kind of edit that must rerun nothing, code, and results that are restored."""

import copy
import json
import os
import re
import shutil
import time
import types
import typing
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from snaketune.config.conditions import Condition
from snaketune.config.load import load
from snaketune.config.sampling import Responses
from snaketune.config.scoring import Scoring
from snaketune.config.workflow import Workflow
from snaketune.stages.cache import code_digest as code
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.status import Results
from snaketune.stages.graph import JobGraph
from snaketune.stages.job_files import job_file_of
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

from .conftest import ROOT, Project
from .reruns import CARD, CORPUS, DPO, EVAL, PACK_SFT, REF, REFUSED, REPORT, SFT, SINGLE, TABLE, TOKENIZER, TOKENS

pytestmark = pytest.mark.workflow


@pytest.mark.parametrize("key", SINGLE)
def test_a_key_alone_changes_the_jobs_that_read_it(finished, key, monkeypatch):
    monkeypatch.chdir(finished.folder)
    before, edit, expected = SINGLE[key]
    one = put(finished.config, before)
    plans = [JobGraph(*load(config)) for config in (one, put(one, edit))]
    specs = [{(j.stage, j.name.split("-")[0]): canonical(j.spec) for j in plan.jobs.values()} for plan in plans]
    changed = {name[0] for name in specs[0] if specs[0][name] != specs[1].get(name)}
    changed -= {"card", "report", "preflight", "calibrate", "timing", "bottleneck", "verification", "reproduction"}
    assert changed == expected


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> set[str]:
    """Return every key that a config can hold, without names of entries."""
    result = set()
    for name, field in model.model_fields.items():
        below = (*path, field.alias or name)
        inner = models_in(field.annotation)
        result |= {leaf for kind in inner for leaf in leaves(kind, below)} if inner else {".".join(below)}
    return result


def models_in(annotation) -> list[type[BaseModel]]:
    if annotation in (Condition, Responses, Scoring):
        # A config spells the first as one text; the others are sections of rounds, with the keys of `sample:` and `score:`.
        return []
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for argument in typing.get_args(annotation) for model in models_in(argument)]


def put(config: dict, edit: dict) -> dict:
    config = copy.deepcopy(config)
    for dotted, value in edit.items():
        *folders, leaf = dotted.split(".")
        section = config
        for folder in folders:
            section = section[int(folder)] if isinstance(section, list) else section.setdefault(folder, {})
        if isinstance(value, str) and value.startswith("="):
            first, second = value[1:].split(".")
            value = copy.deepcopy(config[first][second])
        # A later edit may change what an earlier one has put here, and the table's own values stay as they are.
        section[int(leaf) if isinstance(section, list) else leaf] = copy.deepcopy(value)
    return config


def test_every_config_key_has_a_row():
    assert leaves(Workflow) - REFUSED == set(TABLE) - {"corpora"}


@pytest.fixture(scope="module")
def ready_once(finished, tmp_path_factory) -> Project:
    """A finished project with the files that edits of the table name. Nothing runs in it; it is only read."""
    project = finished.copy_to(tmp_path_factory.mktemp("staleness") / "ready")
    shutil.copy(project.folder / "data/chat.jsonl", project.folder / "data/chat2.jsonl")
    # The same text under another name would change nothing.
    (project.folder / "data/other.jinja").write_text(
        project.read("data/chatml.jinja") + "{# other #}", encoding="utf-8"
    )
    (project.folder / "data/tasks").mkdir()
    (project.folder / "data/tasks/t.yaml").write_text("task: t\n", encoding="utf-8")
    return project


@pytest.fixture
def ready(ready_once) -> Project:
    """The same project with its own config."""
    return Project(ready_once.folder, ready_once.config)


@cache
def code_of(stage: str) -> str:
    """The digest of a stage's code, which no test here edits in place."""
    return code_digest(STAGES[stage].module)


@pytest.mark.parametrize("key", TABLE)
def test_every_config_key_makes_exactly_the_jobs_of_its_row_stale(ready, key, monkeypatch):
    monkeypatch.chdir(ready.folder)
    plan = JobGraph(*load(put(ready.config, TABLE[key][0])))
    results = Results(code_of=code_of, reruns_on=plan.config.reruns_on)
    apart = (
        "preflight",
        "calibrate",
        "ref_pass",
        "teacher_pass",
        "timing",
        "bottleneck",
        "verification",
        "reproduction",
    )
    requested = [job for job in plan.jobs.values() if job.stage not in apart]
    assert {job.stage for job in requested if not results.of(job).current} == TABLE[key][1]


# For Snakemake itself: an edit for each rule that an edit can affect first, and one that affects none.
BY_SNAKEMAKE = [
    "corpora.held_out", "tokenizers.train.vocab_size", "sft.packing.length", "sft.training.learning_rate", "dpo.beta",
    "eval.samples", "report.title", "sft.operation.checkpoint_steps",
]  # fmt: skip
# Before these train, preflight doesn't run again: rows, base and settings are unchanged.
NOTHING_TO_LOOK_AT = {"dpo.beta", "eval.samples", "report.title", "sft.operation.checkpoint_steps"}


@pytest.mark.parametrize("key", BY_SNAKEMAKE)
def test_snakemake_reruns_exactly_the_rules_of_the_row(ready, key):
    ready.config = put(ready.config, TABLE[key][0])
    assert ready.stale() == TABLE[key][1] | (set() if key in NOTHING_TO_LOOK_AT else {"preflight"})


def test_every_command_names_a_job_file_with_the_planned_content(ready, monkeypatch):
    # Characters with a meaning to a shell or to Snakemake.
    ready.config["tracking"] = {"mlflow": {"tracking_uri": "sqlite:///my {runs}'s.db"}}
    said = ready.snakemake("--dry-run", "--forceall", "--printshellcmds")
    monkeypatch.chdir(ready.folder)
    plan = JobGraph(*load(ready.config))
    commands = re.findall(r"python -m snaketune (\S+) (\S+) 2>&1", said)
    # For jobs that are planned differently than before, a dry run writes separate files.
    files = {
        Path(path.replace("/.dry-run/", "/")): (stage, json.loads(Path(path).read_text(encoding="utf-8")))
        for stage, path in commands
    }
    # The batch plan is configured, so that nothing is measured.
    jobs = [
        job
        for job in plan.jobs.values()
        if job.stage not in ("calibrate", "timing", "bottleneck", "verification", "reproduction")
    ]
    assert files.keys() == {job_file_of(job.stage, job.name) for job in jobs}
    for job in jobs:
        stage, held = files[job_file_of(job.stage, job.name)]
        assert held["stage"] == stage == job.stage
        assert held["out"] == job.folder
        assert held["spec"] == json.loads(canonical(job.spec))
        assert held["code"] == code_of(job.stage)
        if STAGES[job.stage].launcher:
            assert held["tracking"] == {"mlflow": {"tracking_uri": "sqlite:///my {runs}'s.db"}}
        if not STAGES[job.stage].reads_manifests:
            read = {role: [other.manifest for other in some] for role, some in job.artifacts.items()} | job.files
            assert held["inputs"] == {role: list(paths) for role, paths in read.items() if paths}


def test_nothing_reruns_for_what_changes_no_meaning(project):
    assert project.stale() == set()  # the project itself is a moved copy

    def turned(value):
        return {k: turned(v) for k, v in reversed(value.items())} if isinstance(value, dict) else value

    project.config = turned(project.config)
    assert project.stale() == set()
    text = "# a comment\n\n" + yaml.safe_dump(project.config, default_flow_style=True, width=40)
    (project.folder / "config.yaml").write_text(text, encoding="utf-8")
    # Otherwise stale() would write the config again.
    project.write_config = lambda: None
    assert project.stale() == set()
    later = time.time() + 60
    for path in [*project.folder.glob("data/*"), *project.folder.glob("results/*/*/manifest.json")]:
        os.utime(path, (later, later))
    assert project.stale() == set()
    assert "Nothing to be done" in project.snakemake()


# Module → the rules that an edit of its code reruns.
CODE = {
    "corpus/layouts/canonical.py": CORPUS,
    "tokenization/creation/train.py": TOKENIZER,
    "tokenization/tokenize.py": TOKENS | SFT,
    "tokenization/corpus_part.py": TOKENS | SFT,
    "engine/packing/best_fit.py": PACK_SFT,
    "packing/write.py": {"write", "pack"} | SFT,
    "packing/shard_writer.py": {"write", "pack"} | SFT,
    # The entry by which a pack identifies its pairs.
    "packing/pairs_digest.py": {"pack"} | SFT,
    "packing/reader.py": SFT,
    "engine/packing/rows.py": {"pack"} | SFT,
    "engine/packing/segments.py": {"pack"} | SFT,
    "training/sft.py": SFT,
    "engine/sft.py": SFT,
    "training/trl_trainer.py": SFT,
    "training/ref_logps.py": REF,
    "training/reference/gather.py": REF,
    "training/reference/compute.py": REF,
    "engine/preference_losses.py": DPO,
    "engine/pair_logps.py": DPO,
    "engine/preference_monitor.py": DPO,
    "config/losses.py": set(),
    "training/dpo.py": DPO,
    "engine/dpo.py": DPO,
    "evaluation/exact_match.py": EVAL,
    "publishing/cards/card.py": CARD,
    "publishing/cards/card_text.py": CARD,
    "publishing/push.py": set(),
    "report/report.py": REPORT,
    "report/page_files.py": REPORT,
    "stages/cache/work_folders.py": set(),
    "tables.py": CORPUS,
    "artifacts/manifest.py": set(),
    "engine/checkpoints.py": SFT,
    "engine/optimizer_states.py": SFT,
    "training/launch/processes.py": SFT,
    "training/launch/worker.py": SFT,
    "engine/model/selftest.py": SFT,
    "stages/host/gpus.py": set(),
    "progress.py": set(),
    "config/training_runs.py": set(),
}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A copy of the package, to edit, from which the planner computes digests."""
    monkeypatch.setattr(code, "PACKAGE_FOLDER", tmp_path / "snaketune")
    shutil.copytree(ROOT / "workflow/snaketune", code.PACKAGE_FOLDER, ignore=shutil.ignore_patterns("__pycache__"))
    return code.PACKAGE_FOLDER


def test_editing_a_module_reruns_the_stages_whose_result_it_shapes(finished, package, monkeypatch):
    monkeypatch.chdir(finished.folder)
    plan = JobGraph(*load(finished.config))

    def digests() -> dict[str, str]:
        modules = code.Modules()
        return {stage: modules.digest(STAGES[stage].module) for stage in STAGES}

    def rerun(job) -> bool:
        return digests_now[job.stage] != planned[job.stage] or any(
            rerun(other) for jobs in job.artifacts.values() for other in jobs
        )

    planned = digests()
    for module, expected in CODE.items():
        path = package / module
        before = path.read_text(encoding="utf-8")
        path.write_text(before + "\n\nNEW_CONSTANT = 1\n", encoding="utf-8")
        digests_now = digests()
        # Modules that the planner shares with later stages rerun those too, but never an earlier one.
        # Preflight and calibration are needed only for trainings that run again.
        asked_apart = {"preflight", "calibrate", "timing", "bottleneck", "verification", "reproduction"}
        assert {job.stage for job in plan.jobs.values() if rerun(job)} - asked_apart == expected, module
        path.write_text(before, encoding="utf-8")


def test_snakemake_sees_an_edited_module(finished, package):
    path = package / "engine/preference_losses.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n\n# A comment changes nothing.\n", encoding="utf-8")
    assert finished.stale() == set()
    path.write_text(path.read_text(encoding="utf-8") + "\n\nNEW_CONSTANT = 1\n", encoding="utf-8")
    assert finished.stale() == CODE["engine/preference_losses.py"]


def test_a_corpus_edit_that_yields_the_same_rows_computes_nothing_after_it(project):
    chat = project.folder / "data/chat.jsonl"
    lines = chat.read_text(encoding="utf-8").splitlines(keepends=True)
    chat.write_text("".join([*lines, lines[0]]), encoding="utf-8")
    assert project.stale() == CORPUS | {"preflight"}
    (pack,) = project.folder.glob("results/pack/chat-*/manifest.json")
    target = str(pack.relative_to(project.folder))
    said = project.snakemake(target)
    assert set(re.findall(r"^(\w+): made ", said, re.MULTILINE)) == {"corpus"}, said
    assert json.loads(project.read("results/corpus/chat/manifest.json"))["counts"]["dropped"]["duplicate"] == 1
    # Nor is a training stale any more, which has the same rows.
    assert not project.stale() & {*TOKENS, "sft"}


def curves(project) -> dict[str, bytes]:
    """TensorBoard's files of the SFT run, by their path."""
    folder = project.folder / "results/sft/run/tensorboard"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_config_put_back_brings_yesterdays_result_back_and_clean_work_frees_the_other(project):
    target, corpus = "results/corpus/chat/manifest.json", project.config["corpora"]["chat"]
    yesterday = project.read(target)
    corpus["held_out"] = 0.4
    assert "corpus: made" in project.snakemake(target)
    assert project.read(target) != yesterday
    corpus["held_out"] = 0.2
    said = project.snakemake(target)
    assert "corpus: nothing to compute" in said
    assert "corpus: made" not in said
    assert project.read(target) == yesterday

    folders = project.folder / "results/.work/corpus"
    assert len([*folders.iterdir()]) == 3
    assert "MB freed" in project.snakemake("clean_work")
    current = {
        json.loads(project.read(f"results/corpus/{name}/manifest.json"))["fingerprint"] for name in ("chat", "pairs")
    }
    assert {path.name for path in folders.iterdir()} == current
    assert "Nothing to be done" in project.snakemake(target)


@pytest.mark.slow
def test_a_model_that_is_brought_back_has_its_curves(project):
    target = "results/sft/run/manifest.json"
    yesterday, drawn = project.read(target), curves(project)
    assert [Path(path).parts[0] for path in drawn] == [json.loads(yesterday)["fingerprint"][:8]]
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.004
    assert "sft: made" in project.snakemake(target)
    assert project.read(target) != yesterday
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.002
    said = project.snakemake(target)
    assert "sft: nothing to compute" in said
    assert "sft: made" not in said
    assert project.read(target) == yesterday
    # Its curves are where they were, those of the other training in a folder of their own.
    assert len(curves(project)) == 2
    assert drawn.items() <= curves(project).items()


def test_two_betas_share_everything_up_to_the_reference(project):
    project.config["dpo"]["other"] = {"extends": "run", "grid": {"beta": [0.3, 0.5]}}
    project.config["eval"]["both"]["models"].append("dpo:other")
    # Other runs are checked again.
    assert project.stale() == DPO | {"preflight"}
    table = project.snakemake("--dry-run")
    assert re.search(r"^dpo +2$", table, re.MULTILINE)
    assert re.search(r"^eval +2$", table, re.MULTILINE)
