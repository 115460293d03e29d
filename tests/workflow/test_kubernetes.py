"""Jobs as pods of Kubernetes, through Snakemake's own executor: planned by the profile, and run by a cluster's stand-in."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .command_line import snakemake
from .conftest import ROOT, Project, copy_code
from .shims.cluster import start

pytestmark = pytest.mark.workflow
pytest.importorskip("snakemake_executor_plugin_kubernetes", reason="pip install 'snaketune[kubernetes]'")
pytest.importorskip("snakemake_storage_plugin_fs", reason="pip install 'snaketune[kubernetes]'")
CORPUS = "results/corpus/chat/manifest.json"


@pytest.fixture
def volume(tmp_path) -> Path:
    """A folder on the volume, with data, a config, and a profile that names the place."""
    folder = tmp_path / "volume"
    Project(folder).write_data().write_config()
    (folder / "results").mkdir()
    shutil.copytree(ROOT / "profiles/kubernetes", folder / "profiles/kubernetes")
    profile = folder / "profiles/kubernetes/config.yaml"
    profile.write_text(profile.read_text(encoding="utf-8").replace("/mnt/snaketune", str(folder)), encoding="utf-8")
    return folder


def arguments(*more: str) -> list[str]:
    return [
        *more,
        "--profile",
        "profiles/kubernetes",
        "--configfile",
        "config.yaml",
        "--seconds-between-status-checks=1",
    ]


def plan(volume: Path, *more: str) -> tuple[int, str]:
    return snakemake(arguments("--snakefile", str(ROOT / "Snakefile"), "--dry-run", *more), volume)


def test_the_profile_plans_the_demo(volume):
    status, said = plan(volume)
    assert status == 0, said
    for rule in ("corpus", "sft", "ref_logps", "dpo", "eval", "card", "report"):
        assert f"rule {rule}:" in said
    training = re.search(r"rule sft:(?s:.*?)resources: (.*)", said)[1]
    for resource in ("gpu=1", "gpu_manufacturer=nvidia", "scale=0", "mem_mb=3600"):
        assert resource in training


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("rsync"), reason="Snakemake's storage plugin fs copies by rsync, which isn't here")
def test_a_pod_takes_the_code_from_the_volume_and_leaves_result_and_work_there(volume, tmp_path):
    # The code is there too.
    profile = volume / "profiles/kubernetes/config.yaml"
    text = profile.read_text(encoding="utf-8")
    shutil.rmtree(volume / "profiles")
    copy_code(volume)
    profile.write_text(text, encoding="utf-8")
    cluster, config = start(tmp_path)
    # Its client reads KUBECONFIG when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments(CORPUS)],
        cwd=volume, env=os.environ | {"KUBECONFIG": str(config)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    assert json.loads((volume / CORPUS).read_text(encoding="utf-8"))["payload"]
    assert list((volume / "results/.work/corpus").glob("*/payload/train-00000.arrow"))
    assert f"Creating symlink for on-demand retrieval of {volume}/data/chat.jsonl" in cluster.logs()
    (job,) = cluster.jobs.values()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "snaketune"
    assert {"name": "snaketune", "mountPath": str(volume)} in container["volumeMounts"]
    requested = {"cpu": "1000m", "memory": "1400M", "ephemeral-storage": "50000M", "nvidia.com/gpu": "0"}
    assert container["resources"]["limits"].items() >= requested.items()
    # Current results stay so, and stale ones are forced, as on other platforms.
    assert "Nothing to be done" in plan(volume, CORPUS)[1]
    config = yaml.safe_load((volume / "config.yaml").read_text(encoding="utf-8"))
    config["corpora"]["chat"]["held_out"] = 0.3
    (volume / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "rule corpus:" in plan(volume, CORPUS)[1]


def test_storages_that_the_planner_could_not_read_are_refused(volume):
    status, said = plan(volume, CORPUS, "--default-storage-prefix", "/elsewhere")
    assert status != 0
    assert "results have to be in the working directory" in said


def test_the_profile_names_one_folder():
    profile = yaml.safe_load((ROOT / "profiles/kubernetes/config.yaml").read_text(encoding="utf-8"))
    folder = profile["default-storage-prefix"]
    assert [volume.split(":")[1] for volume in profile["kubernetes-persistent-volumes"]] == [folder]
    assert set(re.findall(r"/mnt/[^/;]+", profile["precommand"])) == {folder}


def test_a_training_on_several_nodes_is_refused(volume):
    """Planned it may be, as it may be where there is no SLURM."""
    config = yaml.safe_load((volume / "config.yaml").read_text(encoding="utf-8"))
    config["sft"]["run"]["operation"] = {"gpus": 0, "nodes": 2}
    (volume / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    status, said = snakemake(arguments("--snakefile", str(ROOT / "Snakefile")), volume)
    assert status != 0
    assert "operation.nodes: 2 nodes need a SLURM batch job" in said
