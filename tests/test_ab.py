"""The verdict of `make ab`, by rounds whose answer is known; and that a side has the code of its commit."""

import random
import subprocess
import sys
from pathlib import Path

from benchmarks.ab import side, table, verdict

ROOT = Path(__file__).parents[1]


def rounds(*speeds: tuple[float, float], memory: float = 1.0, loss: float = 1.0) -> list[tuple[dict, dict]]:
    a = {"peak_memory_gb": 2.0, "loss": 3.0}
    b = {"peak_memory_gb": 2.0 * memory, "loss": 3.0 * loss}
    return [(a | {"tokens_per_second": one}, b | {"tokens_per_second": other}) for one, other in speeds]


def test_a_difference_is_one_only_where_rounds_agree():
    assert verdict(rounds((100, 112), (90, 101), (80, 89.5)))["said"].startswith("B 12.0% ± ")
    assert verdict(rounds((112, 100), (101, 90), (89.5, 80)))["said"].split(",")[0].endswith("slower")
    assert verdict(rounds((100, 120), (100, 85), (100, 104)))["said"].startswith("no difference in speed shown (+2.0%")


def test_equal_sides_differ_significantly_one_time_in_twenty():
    draw = random.Random(0)
    result = [
        verdict(rounds(*((draw.gauss(100, 5), draw.gauss(100, 5)) for _ in range(4))))["said"].startswith("B")
        for _ in range(2000)
    ]
    assert sum(result) / len(result) < 0.07


def test_one_round_gives_no_verdict():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ab", "--base", "HEAD", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "one round can't show the noise" in done.stderr


def test_differing_memory_and_loss_are_reported():
    said = verdict(rounds((100, 112), (90, 101), (80, 89.5), memory=1.3, loss=1.01))["said"]
    assert said.endswith("memory +30.0%, loss +1.00%: not the same training")


def test_the_table_has_medians_and_extremes():
    assert "| tokens_per_second | 90 (80 to 100) | 101 (89.5 to 112) |" in table(
        rounds((100, 112), (90, 101), (80, 89.5))
    )


def test_a_side_is_its_commit_and_the_other_the_working_tree(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n", encoding="utf-8")
    commit = side(tmp_path / "A", "HEAD", tmp_path / "config.yaml")
    tree = side(tmp_path / "B", "", tmp_path / "config.yaml")
    content = subprocess.run(["git", "show", "HEAD:Snakefile"], cwd=ROOT, capture_output=True, check=True).stdout
    assert (commit / "Snakefile").read_bytes() == content
    assert (tree / "Snakefile").read_bytes() == (ROOT / "Snakefile").read_bytes()
    assert (tree / "ab.yaml").read_text(encoding="utf-8") == "a: 1\n" and not (tree / "results/sft").is_dir()
