"""Nodes that differ: by figures whose answer is known, by a stand-in of SLURM, and this machine itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from snaketune.__main__ import main
from snaketune.cluster.site import Site
from snaketune.diagnostics import node_comparison
from snaketune.errors import SnaketuneError


def node(name: str, factor: float = 1.0, **gpu: str) -> dict[str, Any]:
    return {"node": name, "device": "cuda", "gpu": gpu} | dict.fromkeys(node_comparison.FIGURES, 100 * factor)


def test_nodes_within_five_percent_are_alike_and_one_that_is_slow_is_named_with_what_differs():
    usual = [node("a", 1.01, **{"clocks.sm": "1980 MHz"}), node("b", 0.97, **{"clocks.sm": "1980 MHz"})]
    assert node_comparison.describe_outliers(usual) == []
    (said,) = node_comparison.describe_outliers([*usual, node("c", 0.7, **{"clocks.sm": "1200 MHz"})])
    assert said.startswith("c: matrix products 28% slower than the median, copies")
    assert "clocks.sm is 1200 MHz there, elsewhere 1980 MHz" in said


def test_this_machine_answers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(result[key] > 0 for key in node_comparison.FIGURES)


def test_srun_starts_one_task_per_node_with_the_profiles_settings(tmp_path, monkeypatch, capsys):
    """A fake srun that answers for the requested number of nodes, the last of them slow, and records its arguments."""
    program = tmp_path / "bin/srun"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "open('called', 'w').write(' '.join(sys.argv[1:]))\n"
        "count = int(next(a for a in sys.argv if a.startswith('--nodes=')).split('=')[1])\n"
        f"for n in range(count):\n    print('noise')\n    print(json.dumps({{'node': f'n{{n}}', 'device': 'cuda', 'gpu': {{}}, "
        f"**{{key: 50.0 if n == 2 else 100.0 for key in {list(node_comparison.FIGURES)!r}}}}}))\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "account: me\ngpus_by: gres\ngpus_per_node: {fast: 4}\npartitions: {slow: {}, fast: {max_gpu: 8}}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("SNAKEMAKE_SLURM_PARTITIONS", str(file))
    assert main(["doctor", "--nodes", "3"]) == 0
    said = capsys.readouterr().out
    assert "n2: matrix products 50% slower than the median" in said and "n0:" not in said
    called = Path("called").read_text(encoding="utf-8")
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --partition=fast" in called
    assert "--gres=gpu:1 --account=me" in called and called.endswith("-m snaketune doctor")


def test_a_missing_slurm_or_cluster_file_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAKEMAKE_SLURM_PARTITIONS", raising=False)
    monkeypatch.setattr(node_comparison.shutil, "which", lambda name: None)
    with pytest.raises(SnaketuneError, match="there is no SLURM here"):
        node_comparison.measure_nodes(2)
    monkeypatch.setattr(node_comparison.shutil, "which", lambda name: name)
    with pytest.raises(SnaketuneError, match="make slurm-profile"):
        node_comparison.measure_nodes(2)


def test_nodes_that_do_not_answer_are_reported_with_slurms_output(monkeypatch, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("partitions: {cpu: {}}\n", encoding="utf-8")
    monkeypatch.setenv("SNAKEMAKE_SLURM_PARTITIONS", str(file))
    monkeypatch.setattr(node_comparison.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        node_comparison,
        "srun_command",
        lambda count, site: [sys.executable, "-c", "import sys; sys.exit('no such nodes')"],
    )
    with pytest.raises(SnaketuneError, match="0 nodes answered; SLURM's output: no such nodes"):
        node_comparison.measure_nodes(2)


def test_no_gpus_are_requested_of_a_site_without_any():
    command = node_comparison.srun_command(4, Site.model_validate({"partitions": {"cpu": {}}}))
    assert "--partition=cpu" in command and not [word for word in command if "gpu" in word or "gres" in word]
