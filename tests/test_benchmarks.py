"""The benchmarks run, at a tiny size, and both sides of them do the same work."""

import json
import time

import pytest
import torch
from benchmarks.data_path.rows import numbered
from benchmarks.gpu import measure, peers, worker
from benchmarks.gpu.__main__ import Results, figures, run_part
from benchmarks.gpu.kernels import check
from benchmarks.gpu.measure import preferences
from benchmarks.gpu.peers import preference_peer, sft_peer
from benchmarks.gpu.rows import PROPORTIONS, make_pairs
from benchmarks.gpu.shapes import PREFERENCES, SHAPES, add_adapters, make_model, rehearsed
from benchmarks.gpu.table import table as gpu_table
from benchmarks.jobs import Project
from benchmarks.results import table, write
from benchmarks.sft.__main__ import GOALS, speed
from benchmarks.sft.material import MODEL, made

from snaketune.engine.model.kernels import KERNELS
from tests.models.conftest import CPU

ABOUT = {"rehearsal": False, "date": "2026-11-23", "command": "python -m benchmarks.gpu"}
ROWS = [
    {"question": f"What is {n} plus {n % 7}?", "answer": f"Let me add {n} and {n % 7}.\n#### {n + n % 7}"}
    for n in range(40)
]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    for name, value in {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}.items():
        monkeypatch.setitem(MODEL, name, value)
    raw = tmp_path / "few.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return made(tmp_path, numbered(raw, tmp_path / "rows.jsonl", 3), vocab_size=300)


@pytest.mark.slow
def test_all_sides_train_on_the_same_tokens(project, tmp_path):
    # More steps than an epoch has: each side goes through all rows once.
    result = speed(1, project, warm_up=0, steps=10**6)
    ours, *peers = (
        [result["rounds"][side][0][of] for of in ("tokens", "supervised")]
        for side in ("snaketune", "trl packed", "trl unpacked")
    )
    assert peers == [ours, ours]
    assert 0 < result["cpu_mfu"] < 1
    write(tmp_path / "sft.json", {"speed": result}, GOALS)
    retained = json.loads((tmp_path / "sft.json").read_text(encoding="utf-8"))
    assert retained["cpu_peak_rss_ratio_vs_trl"] == result["cpu_peak_rss_ratio_vs_trl"]
    # Figures that weren't measured are missing, which is reported.
    assert "| `cpu_mfu` | not measured | at least 0.65 |" in table({}, GOALS)


def test_every_kernel_is_known_to_the_gpu_benchmark():
    assert set(worker.KERNELS) == set(KERNELS)


@pytest.mark.parametrize("kernel", ["sdpa", pytest.param("dense", marks=pytest.mark.slow)])
def test_kernels_are_right_in_every_case(kernel):
    result = list(check(kernel, CPU.device, compiled=()))
    assert {entry["status"] for entry in result} <= {"right", "refused"}
    assert {entry["case"] for entry in result if entry["status"] == "right"} >= {
        "documents",
        "prefixes",
        "grouped queries",
        "grouped queries, trees",
    }
    assert {entry["precision"] for entry in result} == {"float32", "bfloat16", "bfloat16 weights"}


def test_wrong_and_failing_kernels_are_reported(monkeypatch):
    right = KERNELS["sdpa"]
    # Values of the token beside: the right shapes, and other tokens.
    monkeypatch.setitem(KERNELS, "sdpa", lambda q, k, v, *others: right(q, k, v.roll(1, dims=2), *others))
    assert {entry["status"] for entry in check("sdpa", CPU.device, compiled=())} <= {"wrong", "refused"}

    def failing(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(KERNELS, "sdpa", failing)
    result = list(check("sdpa", CPU.device, compiled=()))
    assert {entry["status"] for entry in result} <= {"failed", "refused"}
    assert result[0]["why"] == "RuntimeError: no such instruction"


@pytest.mark.parametrize(
    "name", ["7b_lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("23m", "1_5b_full"))]
)
def test_a_plain_loop_replaces_what_the_trainer_lacks(name, monkeypatch):
    shape, settings = rehearsed(SHAPES[name]), {"warm_up": 1, "steps": 2, "compiled": False}
    result = measure.measure(shape, CPU, **settings)
    monkeypatch.setattr(measure, "NEEDED_BY_TRAINER", ("no_such_module",))
    plain = measure.measure(shape, CPU, **settings, deterministic=True)
    assert (result["driven_by"], plain["driven_by"]) == (
        "SftTrainer",
        "a plain loop (no no_such_module for the trainer)",
    )
    for entry in (result, plain):
        assert entry["status"] == "measured"
        # Two steps of four rows of 128, in micro-batches of two, most of them full, half of them supervised.
        assert 0.5 < entry["tokens"] / 1024 <= 1
        assert 0.4 < entry["supervised"] / entry["tokens"] < 0.6
    # Counted by the trainer's meter.
    assert 0 < result["mfu_computed"] < result["mfu"] < 1
    flops = result["mfu"] * result["peak_tflops_per_s"] * 1e12 * result["seconds"]
    assert flops == pytest.approx(result["flops"])
    assert "mfu" not in plain


def test_rows_are_halved_until_they_fit(monkeypatch):
    measured = measure._measured

    def crowded(steps):
        if steps.micro_rows > 1:
            raise torch.OutOfMemoryError
        return measured(steps)

    monkeypatch.setattr(measure, "_measured", crowded)
    result = measure.measure(rehearsed(SHAPES["23m"]), CPU, warm_up=1, steps=1, compiled=False)
    assert (result["rows"], result["out_of_memory_at_rows"]) == (1, [2])
    monkeypatch.setattr(measure, "_measured", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    result = measure.measure(rehearsed(SHAPES["23m"]), CPU, warm_up=1, steps=1)
    assert (result["status"], result["out_of_memory_at_rows"]) == ("failed", [2, 1])


def test_the_peer_trains_on_the_same_shapes():
    result = sft_peer(rehearsed(SHAPES["7b_lora"]), CPU, micro_rows=2, warm_up=1, steps=2)
    assert result["status"] == "measured"
    assert 0.5 < result["tokens"] / 512 <= 1
    assert 0.4 < result["supervised"] / result["tokens"] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("proportion", PROPORTIONS)
def test_preferences_are_trained_beside_their_peers(proportion, monkeypatch):
    shape, settings = rehearsed(PREFERENCES["1_5b"]), {"warm_up": 1, "steps": 2}
    result = [preferences(shape, proportion, CPU, **settings)]
    monkeypatch.setattr("benchmarks.gpu.measure.NEEDED_BY_TRAINER", ("no_such_module",))
    result.append(preferences(shape, proportion, CPU, **settings))
    result += [preference_peer(shape, proportion, CPU, 2, **settings, with_trl=which) for which in (True, False)]
    assert [entry["status"] for entry in result] == ["measured"] * 4
    assert result[0]["driven_by"] == "DpoTrainer"
    assert "plain loop" in result[1]["driven_by"]
    assert "DPOTrainer" in result[2]["peer"]
    assert "plain two-sequence loop" in result[3]["peer"]
    # Peers train on the same pairs, whose prompts they compute twice.
    for name in ("pairs", "tokens", "supervised"):
        assert result[2][name] == result[3][name]
    ours, theirs = (entry["tokens"] / entry["pairs"] for entry in result[1:3])
    assert theirs / ours == pytest.approx({"1:1": 4 / 3, "3:1": 8 / 5}[proportion], rel=0.1)
    assert all(entry["pairs_per_s"] > 0 for entry in result)


def test_the_plain_peer_computes_the_same_log_probabilities():
    shape = rehearsed(PREFERENCES["7b"])
    pairs = make_pairs(2, shape.length, 512, "3:1")[:3]
    model = make_model(shape, CPU)
    logps_2P = peers._logps(add_adapters(model, 4), **peers._padded(pairs))
    expected = []
    for side in (0, 1):
        for pair in pairs:
            ids = torch.from_numpy(pair.sequences[side].astype("int64"))
            logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            expected.append(logits[:-1].gather(1, ids[1:, None])[len(pair.prompt) - 1 :].sum())
    torch.testing.assert_close(logps_2P, torch.stack(expected), rtol=1e-5, atol=1e-4)


def test_an_interrupted_part_leaves_its_results(tmp_path):
    results = Results(tmp_path / "gpu.json", ABOUT)
    results.add("measure 23m", {"status": "measured", "mfu": 0.25, "tokens_per_s": 100.0})
    run_part("facts here", results, time.monotonic(), "--rehearse")
    retained = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert retained["gpu_23m_mfu"] == 0.25
    assert retained["results"]["facts here"][0]["status"] == "skipped"
    assert "gpu_7b_lora_mfu" not in retained
    assert "gpu_23m_speedup_vs_trl" not in retained


def test_no_figure_comes_from_a_rehearsal(tmp_path):
    entry = {"status": "measured", "mfu": 0.25, "tokens_per_s": 100.0}
    results = Results(tmp_path / "gpu.json", ABOUT | {"rehearsal": True})
    results.add("measure 23m", entry)
    assert "gpu_23m_mfu" not in json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    pairs = [{"status": "measured", "prompt_to_completion": ratio, "pairs_per_s": 6.0} for ratio in ("1:1", "3:1")]
    both = {"dpo 7b": pairs, "dpopeer 7b": [{"status": "failed"}, pairs[1] | {"pairs_per_s": 2.0}]}
    assert figures(both) == {"gpu_dpo_7b_3to1_speedup": 3.0}
    faster = figures({"measure 23m": [entry], "peer 23m": [entry | {"tokens_per_s": 40.0}]})
    assert faster == {"gpu_23m_mfu": 0.25, "gpu_23m_speedup_vs_trl": 2.5}


def test_findings_are_a_table_that_can_be_committed():
    measured = {
        "status": "measured",
        "mfu": 0.41,
        "tokens_per_s": 12345.6,
        "peak_memory_gb": 9.87,
    }
    result = {
        "facts here": [{"status": "known", "device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.11.0"}}],
        "kernel varlen": [{"status": "right"}, {"status": "wrong", "case": "trees", "forward": 0.5, "backward": 0.25}],
        "measure 23m": [measured],
        "demo": [{"status": "right", "what": "killed and resumed", "deterministic": True, "same_digest": True}],
        "peer 23m": [{"status": "failed", "why": "no such|thing\nat all"}],
    }
    head, _, *rows = gpu_table(result, ABOUT).splitlines()
    assert head == "NVIDIA H100 80GB HBM3, 2026-11-23, torch 2.11.0: `python -m benchmarks.gpu`"
    assert "| varlen | 1 of 2 | trees: wrong: forward 5.0e-01, backward 2.5e-01 |" in rows
    assert any(row.startswith("| measure 23m | measured | 12,346 |  | 41.0% |") for row in rows)
    assert any("| demo, killed and resumed | right |" in row and "same_digest True" in row for row in rows)
    assert any(row.endswith("| failed: no such\\|thing at all |") for row in rows)
    # Every row of a table has as many cells.
    cells = [row.replace("\\|", "").count("|") for row in rows if row]
    assert set(cells[:3]) == {4} and set(cells[3:]) == {12}
