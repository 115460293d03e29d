"""What limits a run, with measurements whose cause is known; benchmarks/doctored.py tries it on real runs."""

import json
from typing import Any

import pytest

from snaketune.config.doctor import Doctor
from snaketune.diagnostics.bottleneck import as_markdown, examine
from snaketune.stages.specs import BottleneckSpec, Variant, canonical
from tests.config.test_doctor import RUN

from .test_comparison import timing

PACK: dict[str, Any] = {
    "row_length": 512,
    "packing_metadata": {"packing_efficiency": 99.0},
    "counts": {"train": {"tokens": 50_000, "pieces": 500}},
}
CURVE: dict[str, Any] = {
    "trials": [
        {"fits": True, "micro_batch_rows": rows, "gradient_checkpointing": False, "tokens_per_second": speed}
        for rows, speed in ((1, 1000.0), (2, 1800.0), (4, 2000.0))
    ],
}
CURVE["best"] = CURVE["trials"][-1]
# Settings of a run that are slow on most machines.
SLOW = RUN.model_copy(
    update={
        "training": RUN.training.model_copy(
            update={
                "gradient_checkpointing": True,
                "precision": "float32",
                "optimizer": "adamw_torch",
                "compile": False,
            }
        ),
        "operation": RUN.operation.model_copy(update={"activation_offloading": True}),
    }
)


def measured(speed: float = 2000.0, **other: Any) -> dict[str, Any]:
    parts = {"attention": 0.1, "optimizer": 0.1, "products": 0.5, "copies": 0.1, "other": 0.15, "waiting": 0.05}
    return timing(speed) | {
        "waited_share": 0.0, "mfu": 0.45, "parts": parts, "compiled": False, "kernel": "sdpa", "micro_batch_rows": 4,
        "accumulation": 2, "gradient_checkpointing": False, "expected_memory_gb": 2.2,
    } | other  # fmt: skip


def examined(
    findings: list | None = None,
    variants: dict[str, list[dict]] | None = None,
    pack: dict = PACK,
    rounds: int = 1,
    **baseline: Any,
) -> dict[str, Any]:
    """Return what is said about a run. Args: variants: by name, what was measured of changes in each round."""
    values = {"packing.strategy": "none", "training.gradient_checkpointing": True, "training.precision": "float32"}
    values |= {"training.optimizer": "adamw_torch", "training.compile": False, "training.batch_rows": 8}
    others = {"packed": {"packing.strategy": "best-fit-decreasing"}, "more": {"training.batch_rows": 16}}
    changes = Doctor(changes=others).tried_on(SLOW)
    tried = (
        Variant(name=name, changes=changes[name], baseline={key: values[key] for key in changes[name]})
        for name in variants or {}
    )
    spec = BottleneckSpec(key="sft.demo", variants=(Variant(name="baseline"), *tried))
    # Like the spec of the stage.
    spec = BottleneckSpec.model_validate_json(canonical(spec))
    timings = {"baseline": [measured(**baseline)] * rounds} | (variants or {})
    return examine(spec, pack, CURVE, timings, findings or [])


def test_a_sound_run_is_reported_as_limited_by_compute():
    result = examined()
    assert all((one["brings_percent"] or 0) < 5 for one in result["settings"])
    assert result["limit"] == "compute: 45% of the device's peak is used, and no setting gains 5%"


def test_without_a_gain_the_largest_part_of_a_step_is_named():
    assert examined(mfu=0.2)["limit"] == (
        "no setting gains 5%: 50% of a step are matrix products, 15% other work, at 20% of the device's peak"
    )
    assert examined(mfu=0.2, parts={})["limit"] == "no setting gains 5%"


@pytest.mark.parametrize(
    ("given", "cause", "percent"),
    [
        ({"micro_batch_rows": 1}, "the micro-batch: too few rows per batch", 100.0),
        ({"variants": {"packed": [measured(6000.0)]}}, "padding: each row of a batch", 200.0),
        ({"variants": {"activations-kept": [measured(2600.0)]}}, "recomputed activations", 30.0),
        ({"variants": {"precision-auto": [measured(8000.0)]}}, "float32 products", 300.0),
        ({"variants": {"fused-optimizer": [measured(2300.0)]}}, "an optimizer in many small kernels", 15.0),
        ({"variants": {"compile-auto": [measured(2600.0, compiled=True)]}}, "layers in many small kernels", 30.0),
        (
            {"variants": {"more": [measured(2600.0)]}},
            "a setting, training.batch_rows: 8 (tried 16) (+30% measured); sft.demo.training.batch_rows: 16",
            30.0,
        ),
        ({"waited_share": 0.5}, "the loader: steps wait", 100.0),
        ({"device": "NVIDIA H100", "parts": {"products": 0.2, "waiting": 0.75}}, "small kernels", 300.0),
        (
            {"pack": PACK | {"packing_metadata": {"packing_efficiency": 80.0}}},
            "padding: rows that documents don't fill (+25% counted); sft.demo.packing.length: longer",
            25.0,
        ),
    ],
)
def test_the_largest_cause_is_named_first(given, cause, percent):
    result = examined(**given)
    assert result["limit"].startswith(cause)
    assert result["settings"][0]["brings_percent"] == pytest.approx(percent, abs=0.5)


def test_a_change_that_alters_what_is_learned_is_marked():
    other = {"more": [timing(4000, loss=9)]}
    result = examined(variants=other)
    mark = "not comparable: at equal tokens its loss is 9 instead of 3"
    assert (result["settings"][0]["brings_percent"], result["settings"][0]["do"]) == (100, mark)
    assert result["limit"].startswith("compute")
    # Packed rows have more tokens per step, and yet padding is what limits the run.
    said = examined(variants={"packed": other["more"]})["limit"]
    assert said.startswith("padding: each row of a batch") and said.endswith(f".strategy: best-fit-decreasing; {mark}")


def test_wrong_supervision_is_named_before_slowness():
    finding = {
        "severity": "warns",
        "key": "sft.demo.packing.train_on",
        "found": "only 0.1% is supervised",
        "do": "look",
    }
    cause = examined(findings=[finding], micro_batch_rows=1)["limit"]
    assert cause.startswith("what is learned: sft.demo.packing.train_on")
    # And then what it would have said without.
    assert "As for speed: the micro-batch" in cause


def test_findings_of_a_run_with_the_same_prefix_are_not_shown():
    other = {"severity": "warns", "key": "sft.demo2.packing.train_on", "found": "nothing is supervised", "do": "look"}
    demo = other | {"key": "sft.demo", "found": "something"}
    assert examined(findings=[other, demo])["findings"] == [demo]


def test_a_change_that_doesnt_fit_is_no_advice():
    unfit = {"fits": False, "why": "out of memory with micro-batches of 64 rows"}
    result = examined(variants={"fused-optimizer": [unfit], "precision-auto": [measured(3000.0)]})
    (row,) = [one for one in result["settings"] if one["setting"] == "fused-optimizer"]
    tried = "training.optimizer: adamw_torch (tried adamw_torch_fused)"
    assert row["set_to"] == f"{tried}; doesn't fit: out of memory with micro-batches of 64 rows"
    assert row["brings_percent"] is None and row["do"] == ""
    assert result["settings"][0]["brings_percent"] == 50


def test_a_run_that_does_not_fit_is_reported():
    result = examined(fits=False, why="out of memory with micro-batches of 4 rows")
    assert result["limit"] == "memory: out of memory with micro-batches of 4 rows"
    assert "What limits it: memory" in as_markdown(result)


def test_the_table_shows_what_is_measured_and_expected_and_how_it_is_known():
    finding = {"severity": "warns", "key": "sft.demo", "found": "something", "do": "look"}
    variants = {"fused-optimizer": [measured(2420.0), measured(2460.0)]}
    said = as_markdown(examined([finding], variants, micro_batch_rows=1, rounds=2))
    for line in (
        "- warns: sft.demo: something; look",
        "On cpu: 2,000 tokens/s, 45% of the device's peak (4,444 tokens/s); 2.00 GB (2.20 expected); loss 3.000 after 1,050 "
        "tokens. Rounds: 2.",
        "| micro-batch | 1 rows x 2 | +100.0 |  |  | measured | sft.demo.training.micro_batch_rows: auto, or 4 |",
        "| fused-optimizer | training.optimizer: adamw_torch (tried adamw_torch_fused) | +22.0 (+21.0 to +23.0) | 2.00 | 3.000 "
        "| measured | sft.demo.training.optimizer: adamw_torch_fused |",
        "| packing | on, 99.0% of the rows' positions hold tokens (one document a row: 19.5%) | +1.0 |  |  | counted |  |",
        "| attention kernel | sdpa; 10% of a step, so at most +11% |  |  |  | estimated |  |",
        "Of a step: 10% attention, 10% optimizer, 50% products, 10% copies, 15% other, 5% waiting.",
    ):
        assert line in said
    noted = examined(variants={"packed": [measured(2000.0, device="NVIDIA H100")]}, micro_batch_rows=3)
    assert json.dumps(noted, allow_nan=False)
    assert "Note: between timings, devices differed" in as_markdown(noted)
    assert "| micro-batch | 3 rows x 2 |  |  |  | not known here |  |" in as_markdown(noted)
