"""Kernels and operators, by the names that libraries give them."""

import pytest

from snaketune.diagnostics.timed_training import shares_by_part


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
