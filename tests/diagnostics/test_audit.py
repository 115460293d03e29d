"""The audit, with measurements whose cause is known; benchmarks/doctored.py tries it on real runs."""

from typing import Any

import pytest

from snaketune.config.diagnose import slow_settings
from snaketune.config.training_runs import Learning
from snaketune.diagnostics.audit import as_markdown, audit
from snaketune.diagnostics.step_profile import shares_by_part
from snaketune.diagnostics.switches import Audited
from snaketune.stages.specs import AuditSpec, Variant

from .test_diagnosis import RUN

PACK: dict[str, Any] = {
    "row_length": 512,
    "packing_metadata": {"packing_efficiency": 99.0, "lost_to_length": {"rows": 0, "tokens": 0, "enough": None}},
    "counts": {"train": {"tokens": 50_000, "read_tokens": 50_000, "pieces": 500, "kept": 500, "read": 500}},
}
CURVE: dict[str, Any] = {
    "trials": [
        {"fits": True, "micro_batch_rows": rows, "gradient_checkpointing": False, "tokens_per_second": speed}
        for rows, speed in ((1, 1000.0), (2, 1800.0), (4, 2000.0))
    ],
}
CURVE["best"] = CURVE["trials"][-1]


def measured(speed: float = 2000.0, **other: Any) -> dict[str, Any]:
    parts = {"attention": 0.1, "optimizer": 0.1, "products": 0.5, "copies": 0.1, "other": 0.15, "waiting": 0.05}
    return {
        "fits": True, "why": "", "tokens_per_second": speed, "waited_share": 0.0, "mfu": 0.5, "mfu_computed": 0.45,
        "parts": parts, "compiled": False, "kernel": "sdpa", "micro_batch_rows": 4, "accumulation": 2,
        "gradient_checkpointing": False, "device": "cpu", "trainable_parameters": 5e8, "processes": 1,
    } | other  # fmt: skip


def audited(
    pack: dict = PACK, findings: list | None = None, variants: dict | None = None, **baseline: Any
) -> dict[str, Any]:
    training = Learning(learning_rate=1e-3, batch_rows=8)
    names = (Variant(name="baseline"), *(Variant(name=name, changes={"some": "change"}) for name in variants or {}))
    spec = AuditSpec(
        key="sft.demo", kind="sft", training=training, micro_batch_rows=4, gradient_checkpointing="auto", variants=names
    )
    run = Audited(spec, pack, CURVE, {"baseline": measured(**baseline)} | (variants or {}))
    return audit(run, findings or [])


def test_a_sound_run_is_reported_as_limited_by_compute():
    audit = audited()
    assert all((one["brings_percent"] or 0) < 5 for one in audit["switches"])
    assert audit["holds_back"] == "compute: 45% of the device's peak is used, and no switch gains 5%"


@pytest.mark.parametrize(
    ("given", "cause", "percent"),
    [
        ({"micro_batch_rows": 1}, "the micro-batch: too few rows per batch", 100.0),
        ({"variants": {"packed": measured(6000.0)}}, "padding: each row of a batch", 200.0),
        (
            {"gradient_checkpointing": True, "variants": {"activations-kept": measured(2600.0)}},
            "recomputed activations",
            30.0,
        ),
        ({"variants": {"precision-auto": measured(8000.0)}}, "float32 products", 300.0),
        ({"variants": {"fused-optimizer": measured(2300.0)}}, "an optimizer in many small kernels", 15.0),
        ({"variants": {"compile-auto": measured(2600.0, compiled=True)}}, "layers in many small kernels", 30.0),
        ({"waited_share": 0.5}, "the loader: steps wait", 100.0),
        ({"device": "NVIDIA H100", "parts": {"products": 0.2, "waiting": 0.75}}, "small kernels", 300.0),
    ],
)
def test_the_largest_cause_is_named_first(given, cause, percent):
    audit = audited(**given)
    assert audit["holds_back"].startswith(cause)
    assert audit["switches"][0]["brings_percent"] == pytest.approx(percent, abs=0.5)


def test_tokens_that_rows_lose_count_as_what_they_would_have_taught():
    lost = {"rows": 100, "tokens": 20_000, "enough": 1024}
    pack = PACK | {"packing_metadata": PACK["packing_metadata"] | {"lost_to_length": lost}}
    audit = audited(pack=pack)
    assert audit["holds_back"].startswith("dropped tokens") and "packing.length: 1024" in audit["holds_back"]


def test_wrong_supervision_is_named_before_slowness():
    finding = {
        "severity": "warns",
        "key": "sft.demo.packing.train_on",
        "found": "only 0.1% is supervised",
        "do": "look",
    }
    cause = audited(findings=[finding], micro_batch_rows=1)["holds_back"]
    assert cause.startswith("what is learned: sft.demo.packing.train_on")
    # And then what it would have said without.
    assert "As for speed: the micro-batch" in cause


def test_findings_of_a_run_with_the_same_prefix_are_not_shown():
    other = {"severity": "warns", "key": "sft.demo2.packing.train_on", "found": "nothing is supervised", "do": "look"}
    own = other | {"key": "sft.demo", "found": "something"}
    assert audited(findings=[other, own])["findings"] == [own]


@pytest.mark.parametrize(
    ("variant", "switch", "set_to"),
    [
        ("activations-kept", "gradient checkpointing", "on; off doesn't fit"),
        ("packed", "packing", "off; on doesn't fit"),
        ("precision-auto", "precision", "float32; auto doesn't fit"),
        ("fused-optimizer", "optimizer", "adamw_torch_fused; adamw_torch_fused doesn't fit"),
    ],
)
def test_a_change_that_doesnt_fit_is_no_advice(variant, switch, set_to):
    gone = {"fits": False, "why": "out of memory"}
    audit = audited(gradient_checkpointing=True, variants={variant: gone})
    (row,) = [one for one in audit["switches"] if one["switch"] == switch]
    assert row["set_to"] == set_to and row["brings_percent"] == 0 and row["do"] == ""


def test_a_run_that_does_not_fit_is_reported():
    audit = audited(fits=False, why="out of memory with micro-batches of 4 rows")
    assert audit["holds_back"] == "memory: out of memory with micro-batches of 4 rows"
    assert "What holds it back: memory" in as_markdown(audit)


def test_the_table_shows_how_each_effect_is_known():
    said = as_markdown(audited(micro_batch_rows=1))
    assert (
        "| micro-batch | 1 rows x 2 (8 a step) | +100.0% | measured | sft.demo.training.micro_batch_rows: auto, or 4 |"
        in said
    )
    assert "| chunked head | on; saves 10% of the operations | +0.0% | counted |" in said
    assert "| compile | auto, off, as it gains nothing or isn't available | +0.0% | estimated |" in said
    assert "| attention kernel | sdpa; attention is 10% of a step | at most +11% | estimated |" in said
    assert "| optimizer | adamw_torch_fused, 10% of a step; its states take up to 4 GB, and 1 in 8 bits |" in said


def test_kernels_are_assigned_to_parts_by_name():
    cuda = [
        ("void cutlass::Kernel2<gemm>", 50.0),
        ("flash_fwd_kernel", 20.0),
        ("Memcpy HtoD", 5.0),
        ("elementwise", 5.0),
    ]
    assert shares_by_part(cuda, 100.0) == {
        "other": 0.05, "attention": 0.2, "optimizer": 0.0, "products": 0.5, "communication": 0.0, "copies": 0.05,
        "waiting": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("triton_tem_fused_mm_1", "products"),
        ("aten::_scaled_mm", "products"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("triton_poi_fused_add_mul_silu_0", "other"),
        ("triton_red_fused__to_copy_mean_rsqrt_3", "other"),
        ("cpp_fused_native_layer_norm_1", "other"),
        ("void at::native::GammaBetaBackwardCUDAKernelTemplate<float>", "other"),
        ("aten::_log_softmax", "other"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_kernels_are_known_by_the_names_that_libraries_give_them(kernel, part):
    assert {name: share for name, share in shares_by_part([(kernel, 50.0)], 100.0).items() if share} == {
        part: 0.5,
        "waiting": 0.5,
    }


def test_what_is_usually_slow_is_tried():
    slow = {"gradient_checkpointing": True, "precision": "float32", "optimizer": "adamw_torch", "compile": False}
    operation = RUN.operation.model_copy(update={"activation_offloading": True})
    run = RUN.model_copy(update={"training": RUN.training.model_copy(update=slow), "operation": operation})
    assert slow_settings(RUN) == {}
    tried = ["activations-kept", "activations-on-device", "precision-auto", "fused-optimizer", "compile-auto"]
    assert list(slow_settings(run)) == tried
