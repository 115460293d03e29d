"""The benchmarks run, at a tiny size, and both sides of them do the same work."""

import json

import pytest
from benchmarks.sft.__main__ import table, write
from benchmarks.sft.material import Material, made, numbered
from benchmarks.sft.speed import speed

ROWS = [
    {"question": f"What is {n} plus {n % 7}?", "answer": f"Let me add {n} and {n % 7}.\n#### {n + n % 7}"}
    for n in range(40)
]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    folder = tmp_path_factory.mktemp("sft")
    raw = folder / "few.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return made(folder, numbered(raw, folder / "rows.jsonl", 100), vocab_size=300)


def test_all_sides_train_on_the_same_tokens(material, tmp_path):
    # More steps than an epoch has: each side goes through all rows once.
    found = speed(1, material, warm_up=0, steps=10**6)
    ours, *peers = (
        [found["rounds"][side][0][of] for of in ("tokens", "supervised")]
        for side in ("snaketune", "trl packed", "trl unpacked")
    )
    assert peers == [ours, ours]
    assert 0 < found["cpu_share_of_gemm_peak"] < 1
    write(tmp_path / "sft.json", {"speed": found})
    kept = json.loads((tmp_path / "sft.json").read_text(encoding="utf-8"))
    assert kept["cpu_peak_rss_ratio_vs_trl"] == found["cpu_peak_rss_ratio_vs_trl"]
    # What wasn't measured isn't there, and is said.
    assert "demo_s" not in kept
    assert "| `demo_s` | not measured | at most 240 |" in table(kept["details"])
