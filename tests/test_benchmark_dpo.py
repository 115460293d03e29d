"""The benchmark of DPO runs, at a tiny size, and both sides of it do the same work."""

import json
import sys
from unittest.mock import patch

import pytest
import torch
from benchmarks.dpo import __main__ as program
from benchmarks.dpo import measure, sides
from benchmarks.dpo.material import SOURCES, made, make_reference
from benchmarks.dpo.measure import curve, speed
from benchmarks.jobs import Project
from benchmarks.results import keep_table
from benchmarks.sft import material as sft_material

from snaketune.engine.model.machine import peak_memory

# Two pairs of each prompt, whose answers begin alike.
ROWS = [
    {"instruction": f"What is {n} plus {n % 7}?", "input": "", "output": "",
     "chosen": f"The sum is {n + n % 7}{'!' * (n % 2)}", "rejected": f"The sum is {n + wrong}, or so I think"}
    for n in range(12) for wrong in (3, 9)
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    folder, data = tmp_path_factory.mktemp("dpo"), tmp_path_factory.mktemp("data")
    (file,) = SOURCES["raschka"]["files"]
    (data / file).parent.mkdir()
    (data / file).write_text(json.dumps(ROWS), encoding="utf-8")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    with patch.dict(sft_material.MODEL, small):
        result = made(folder, data, {"raschka": ("raschka", 16)}, vocab_size=300)
    make_reference(result, "raschka")
    return result


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Each side, which is a process of its own when figures are made."""

    def measured(function, *arguments, **keywords):
        return function(*arguments, **keywords) | {"peak_rss_bytes": peak_memory(torch.device("cpu"))}

    monkeypatch.setattr(measure, "measured", measured)


def test_both_sides_learn_the_same_from_the_same_pairs(project):
    result = curve(project, "raschka", steps=3)
    assert result["curve_max_abs_diff_vs_trl"] < 1e-5
    assert result["losses"]["trl"][0] == pytest.approx(0.6931, abs=1e-4)
    assert result["losses"]["trl"][2] < 0.69
    assert all(result["pairs_by_step"])


@pytest.mark.slow
def test_an_epoch_of_each_side_is_over_the_same_pairs(project):
    result = speed(1, project, "raschka")
    ours, theirs, defaults = (result["rounds"][side][0] for side in ("snaketune", "trl", "trl, defaults"))
    assert ours["pairs"] == theirs["pairs"] == theirs["reference"]["pairs"] == result["pairs"]
    assert sorted(number for step in ours["order"] for number in step) == list(range(result["pairs"]))
    assert ours["tokens"] < theirs["tokens"] < defaults["tokens"]
    assert result["ref_speedup_vs_trl_raschka"] > 0
    assert result["train_speedup_vs_trl_defaults_raschka"] == ours["pairs_per_s"] / defaults["pairs_per_s"]
    # The worst of three counts, and nothing does until all are there.
    details = {"speed-raschka": result}
    assert program.memory(details) == {}
    for name in ("pandalm", "oasst"):
        details[f"speed-{name}"] = {f"peak_rss_ratio_vs_{peer}_{name}": 99.0 for peer in program.PEERS}
    assert program.memory(details) == {"peak_rss_ratio_vs_trl": 99, "peak_rss_ratio_vs_trl_defaults": 99}


@pytest.mark.slow
def test_a_sweep_is_eight_trainings_and_one_reference(project, monkeypatch, tmp_path):
    said = []
    ran = measure.checked
    monkeypatch.setattr(measure, "checked", lambda done: said.append(ran(done)))
    monkeypatch.setattr(measure, "BETAS", measure.BETAS[:1])
    variants = [{"loss": loss, "beta": 0.1} for loss in measure.LOSSES]
    theirs = sides.trl_sweep(project, run="raschka", variants=variants, at_once=(2, 4), epochs=1, learning_rate=1e-4)
    assert [run["variant"]["loss"] for run in theirs["runs"]] == ["sigmoid", "ipo"]
    assert all("rewards/accuracies" in run["last"] for run in theirs["runs"])
    monkeypatch.setattr(measure, "BETAS", (0.05, 0.1, 0.2, 0.5))
    monkeypatch.setattr(measure, "CORES", ("--cores", "1", "--dry-run"))
    with pytest.raises(SystemExit, match="0 variants were trained, expected 8"):
        measure.run_ours(project, "raschka", tmp_path / "sweep")
    plan = [line.split() for line in said[-1].splitlines()]
    assert ["dpo", "8"] in plan
    assert ["ref_logps", "1"] in plan


def test_results_of_single_parts_are_retained(project, monkeypatch, tmp_path, capsys):
    """A run of some parts after others, whose figures are retained."""
    monkeypatch.setattr(program, "made", lambda *_, **__: project)
    monkeypatch.setattr(program, "DOCUMENT", tmp_path / "figures.md")
    for source in SOURCES.values():
        for file in source["files"]:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
    (tmp_path / "figures.md").write_text(
        "before\n<!-- bench-dpo-auto -->\nold\n<!-- /bench-dpo-auto -->\nafter\n", encoding="utf-8"
    )
    out = tmp_path / "dpo.json"
    for part, key in (("speed-raschka", "train_speedup_vs_trl_raschka"), ("curve", "curve_max_abs_diff_vs_trl")):
        parts = {part: lambda key=key: {key: 0.5}}
        monkeypatch.setattr(program, "parts", lambda *_, parts=parts, **__: parts)
        monkeypatch.setattr(sys, "argv", ["dpo", "--only", part, "--out", str(out), "--data", str(tmp_path)])
        program.main()
    retained = json.loads(out.read_text(encoding="utf-8"))
    assert (retained["train_speedup_vs_trl_raschka"], retained["curve_max_abs_diff_vs_trl"]) == (0.5, 0.5)
    text = (tmp_path / "figures.md").read_text(encoding="utf-8")
    assert "| `curve_max_abs_diff_vs_trl` | 0.5 | at most 0.001 |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    with pytest.raises(ValueError, match="has no markers for the table"):
        keep_table(tmp_path / "figures.md", "another", "")
