"""The GPU benchmark runs on a machine with torch and transformers and few other packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_runs_without_this_projects_environment(tmp_path):
    """An unrelated package named `benchmarks` is installed too."""
    (tmp_path / "strangers/benchmarks").mkdir(parents=True)
    (tmp_path / "strangers/benchmarks/__init__.py").write_text("raise ImportError('a stranger')\n", encoding="utf-8")
    paths = [str(Path(__file__).with_name("bare")), str(tmp_path / "strangers")]
    out = tmp_path / "gpu.json"
    parts = ["--only", "measure 23m", "demo", "--out", str(out)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", *parts],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [entry["status"] for entry in results["measure 23m"]] == ["measured"]
    assert results["measure 23m"][0]["graphs_compiled_after_warm_up"] == 0
    assert results["measure 23m"][0]["driven_by"] == "a plain loop (no pydantic for the trainer)"
    assert "| measure 23m, a plain loop" in out.with_suffix(".md").read_text(encoding="utf-8")
    assert results["demo"] == [{"status": "skipped", "why": "not installed: pydantic, rensa, tenacity"}]
