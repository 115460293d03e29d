"""Which edits have reference log-probabilities computed again, and which take those that are there: every key of `dpo`, and
what the keys before it come to."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from snaketune.config.load import load
from snaketune.stages.cache.fingerprint import fingerprint, read_artifacts, read_files
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job, result_at
from tests.stages.demo_jobs import job_of

from .reruns import LORA, PRETRAINED, TABLE
from .test_staleness import put

pytestmark = pytest.mark.workflow

# Keys of `dpo` whose edit in the table gives other log-probabilities, with the same weights and pairs.
OTHER = {
    "dpo.training.precision": {"dpo.run.training.precision": "bfloat16"},
    "dpo.quantization.type": TABLE["dpo.quantization.type"][0],
    "dpo.quantization.double": TABLE["dpo.quantization.double"][0],
    "dpo.reference.path": {"dpo.run.reference": PRETRAINED},
    "dpo.reference.revision": {"dpo.run.reference": {**PRETRAINED, "revision": "f00"}},
    **{
        f"dpo.reference.rope.{key}": TABLE[f"dpo.reference.rope.{key}"][0]
        for key in ("type", "factor", "original_max_position_embeddings")
    },
    "dpo.reference_pass.token_logps": {"dpo.run.reference_pass": {"token_logps": True}},
    "dpo.ld_alpha": TABLE["dpo.ld_alpha"][0],
}
# Of these edits in the table, the losses have no reference, or other rows.
ELSEWHERE = {"dpo.simpo_gamma", "dpo.cpo_alpha", "dpo.desirable_weight", "dpo.undesirable_weight"}
# These edits are of what it is made from, and a run has to show them.
MADE_FROM = {"dpo.from", "dpo.corpus", "dpo.packing.length", "dpo.packing.overflow", "dpo.packing.order"}
SAME = {
    key: TABLE[key][0] for key in TABLE if key.startswith("dpo.") and key not in OTHER.keys() | MADE_FROM | ELSEWHERE
} | {
    # The value of `auto` on a CPU.
    "precision: float32": {"dpo.run.training.precision": "float32"},
    "lora in float32": {"dpo.run.lora": LORA},
}


def known_by(job: Job) -> list[str]:
    """The job's own fingerprint, then those that count as the same."""
    artifacts = {
        role: [result_at(WORK_ROOT.parents[1] / one.manifest) for one in some] for role, some in job.artifacts.items()
    }
    loaded = job_of(job.stage, Path(), job.spec, operation=job.operation, device="cpu")
    return [
        fingerprint(replace(key, code="c"), read_artifacts(artifacts, key.by) | read_files({}, WORK_ROOT), None)
        for key in loaded.cache_keys()
    ]


def reference_in(config: dict) -> Job:
    plan = JobGraph(*load(config))
    (job,) = plan.job("dpo", "run").artifacts["ref_logps"]
    return job


@pytest.mark.parametrize("key", SAME)
def test_what_a_run_does_with_its_reference_reuses_it(finished, key, monkeypatch):
    monkeypatch.chdir(finished.folder)
    trusted = key == "dpo.reference.trust_remote_code"
    before = put(finished.config, OTHER["dpo.reference.path"]) if trusted else finished.config
    assert known_by(reference_in(put(before, SAME[key])))[0] == known_by(reference_in(before))[0]


@pytest.mark.parametrize("key", OTHER)
def test_what_moves_log_probabilities_has_them_computed_again(finished, key, monkeypatch):
    monkeypatch.chdir(finished.folder)
    expected = known_by(reference_in(finished.config))[0]
    changed = known_by(reference_in(put(finished.config, OTHER[key])))
    assert expected not in changed
    # Results with the values of single tokens serve runs that don't need them.
    if key in ("dpo.reference_pass.token_logps", "dpo.ld_alpha"):
        assert changed[0] in known_by(reference_in(finished.config))


def test_other_kernels_and_devices_count_as_the_same_if_configured(finished, monkeypatch):
    monkeypatch.chdir(finished.folder)
    shared = put(finished.config, {"dpo.run.reference_pass": {"share_kernels": True}})
    own, retained = known_by(reference_in(finished.config))
    accepted = known_by(reference_in(shared))
    assert accepted[:2] == [own, retained]
    assert len(accepted) == len(set(accepted)) > 6


@pytest.mark.slow
def test_names_rows_and_parts_reuse_it_and_weights_and_pairs_do_not(project, monkeypatch):
    """One run of many: what each reference took from where is in its log."""
    # Jobs side by side.
    project.cores = 2
    run, base = project.config["dpo"].pop("run"), project.config["sft"]["run"]
    corpora, tokenizers = project.config["corpora"], project.config["tokenizers"]
    project.config["eval"] = {}
    corpora["in-parts"] = corpora["pairs"] | {"parts": 2}
    corpora["seeded"] = corpora["pairs"] | {"split_seed": 5}
    tokenizers["renamed"] = tokenizers["small"]
    sft = {
        "renamed": base,
        "other-tokenizer-name": base | {"tokenizer": "renamed"},
        "learned": base | {"training": base["training"] | {"learning_rate": 0.01}},
    }
    project.config["sft"] |= sft
    reuse = {
        "renamed": {},
        "longer-rows": {"packing": {"length": 512}},
        "corpus-in-parts": {"corpus": "in-parts"},
        **{f"from-{name}": {"from": name} for name in ("renamed", "other-tokenizer-name")},
        "lora": {"lora": LORA},
        "scattered": {"packing": {"length": 300}, "reference_pass": {"parts": 2}},
    }
    again = {
        "from-learned": {"from": "learned"},
        "other-split": {"corpus": "seeded"},
        "truncated": {"packing": {"length": 160, "overflow": "truncate"}},
        "in-bfloat16": {"training": run["training"] | {"precision": "bfloat16"}},
    }
    project.config["dpo"] = {name: run | edit for name, edit in (reuse | again).items()}
    monkeypatch.chdir(project.folder)
    here = JobGraph(*load(project.config))
    jobs = {name: here.job("dpo", name).artifacts["ref_logps"][0] for name in reuse | again}
    said = project.snakemake("--keep-going", *dict.fromkeys(job.manifest for job in jobs.values()))
    made = {name for _, name in re.findall(r"^(ref_logps|ref_pass): made (\S+) in", said, re.MULTILINE)}
    assert made == {jobs[name].folder for name in again}
    # Each manifest has the spec of its own job, so that nothing is stale afterwards.
    assert "Nothing to be done" in project.snakemake(*dict.fromkeys(job.manifest for job in jobs.values()))


def test_parts_are_jobs_which_a_result_that_is_there_does_not_need(project):
    target = "results/dpo/run/manifest.json"
    for parts in (2, 3, 1):
        project.config["dpo"]["run"]["reference_pass"] = {"parts": parts}
        assert project.stale(target) == set()
    project.config["dpo"]["run"] |= {"reference_pass": {"parts": 2}}
    project.config["dpo"]["run"]["training"] |= {"precision": "bfloat16"}
    table = project.snakemake("--dry-run", target)
    assert re.search(r"^ref_pass +2$", table, re.MULTILINE) and re.search(r"^ref_logps +1$", table, re.MULTILINE)


@pytest.mark.slow
def test_parts_are_jobs_whose_results_are_gathered_and_not_computed_again(project, monkeypatch):
    project.config["dpo"]["run"] |= {"reference_pass": {"parts": 2}}
    project.config["dpo"]["run"]["training"] |= {"precision": "bfloat16"}
    project.config["eval"] = {}
    monkeypatch.chdir(project.folder)
    (job,) = JobGraph(*load(project.config)).job("dpo", "run").artifacts["ref_logps"]
    said = project.snakemake("results/dpo/run/manifest.json")
    made = re.findall(r"^(ref_logps|ref_pass|dpo): made (\S+) in", said, re.MULTILINE)
    parts = [("ref_pass", f"results/ref_pass/{job.name}/{part}-of-2") for part in (1, 2)]
    assert sorted(made) == sorted([*parts, ("ref_logps", job.folder), ("dpo", "results/dpo/run")])
    counts = [json.loads(project.read(f"{folder}/manifest.json"))["counts"]["pairs"] for _, folder in parts]
    whole = json.loads(project.read(job.manifest))["counts"]["pairs"]
    assert {split: counts[0][split] + counts[1][split] for split in whole} == whole
    assert all(count["train"] for count in counts)
    # They have served; in how many parts it would be computed is nothing to compute it for.
    shutil.rmtree(project.folder / "results/ref_pass")
    for parts in (2, 3, 1):
        project.config["dpo"]["run"]["reference_pass"] = {"parts": parts}
        assert project.stale("results/dpo/run/manifest.json") == set()


def test_a_later_run_with_token_logps_does_not_change_the_others(project, monkeypatch):
    project.config["dpo"]["tails"] = project.config["dpo"]["run"] | {"ld_alpha": 0.5}
    table = project.snakemake("--dry-run")
    assert re.search(r"^dpo +1$", table, re.MULTILINE) and re.search(r"^ref_logps +1$", table, re.MULTILINE)
    assert not re.search(r"^eval ", table, re.MULTILINE)
    # If there is no result yet, one pass serves all.
    for folder in ("ref_logps", ".work/ref_logps"):
        shutil.rmtree(project.folder / "results" / folder)
    monkeypatch.chdir(project.folder)
    here = JobGraph(*load(project.config))
    plain, detailed = (here.job("dpo", name).artifacts["ref_logps"][0] for name in ("run", "tails"))
    said = project.snakemake(plain.manifest)
    assert re.findall(r"^ref_logps: made (\S+) in", said, re.MULTILINE) == [detailed.folder]
    assert f"nothing to compute; {plain.folder} is the result of" in said
