"""Kernel families, on names of real kernels: of recorded windows, and of libraries that these do not use."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from perfladder.trace.families import (
    FAMILIES,
    KERNEL_RULES,
    OPERATOR_RULES,
    Family,
    classify_kernel,
    classify_operator,
    families_of,
    families_of_groups,
    is_compiled_kernel,
    unfused_family,
)
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.model import Trace

DATA = Path(__file__).parents[1] / "data"
SCENES = sorted(path.name.split(".")[0] for path in (DATA / "cuda").glob("*.json.gz"))

KERNELS = [
    ("nvjet_tst_256x256_64x4_2x1_v_bz_coopA_TNT", Family.GEMM),
    (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        Family.GEMM,
    ),
    ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", Family.GEMM),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(cublasGemvParamsEx)", Family.GEMM),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)", Family.GEMM),
    ("triton_tem_fused_addmm_relu_3", Family.GEMM),
    ("void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, true>(int, int, int)", Family.CONVOLUTION),
    ("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_cudnn", Family.CONVOLUTION),
    ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>", Family.CONVOLUTION),
    ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(nchw2nhwc_params)", Family.LAYOUT),
    ("void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, true, false>(params)", Family.LAYOUT),
    ("batched_transpose_32x32_half", Family.LAYOUT),
    ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_cudnn", Family.CONVOLUTION),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", Family.ATTENTION),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false>(Params)", Family.ATTENTION),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)", Family.ATTENTION),
    ("triton_tem_fused_flex_attention_0", Family.ATTENTION),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", Family.NORMALIZATION),
    ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)", Family.NORMALIZATION),
    ("void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float, float)", Family.NORMALIZATION),
    ("triton_red_fused_native_group_norm_2", Family.NORMALIZATION),
    ("void at::native::vectorized_elementwise_kernel<4, GroupNormKernelImplInternal<float>>", Family.NORMALIZATION),
    ("triton_poi_fused_native_layer_norm_1", Family.ELEMENTWISE),
    ("triton_per_fused__softmax_4", Family.REDUCTION),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>", Family.REDUCTION),
    ("void at::native::_norm_reduce_kernel", Family.REDUCTION),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Iter)>", Family.COPY),
    ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>", Family.COPY),
    ("Memcpy HtoD (Pageable -> Device)", Family.COPY),
    ("CopyDeviceToHost", Family.COPY),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Family.COMMUNICATION),
    ("Cijk_Ailk_Bljk_SB_MT128x128x16", Family.GEMM),
    ("my_own_kernel", Family.OTHER),
]
OPERATORS = [
    ("aten::addmm", Family.GEMM),
    ("aten::mkldnn_convolution", Family.CONVOLUTION),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", Family.ATTENTION),
    ("aten::native_group_norm", Family.NORMALIZATION),
    ("aten::linalg_vector_norm", Family.REDUCTION),
    ("aten::_softmax", Family.REDUCTION),
    ("aten::mul", Family.ELEMENTWISE),
    ("aten::add_", Family.ELEMENTWISE),
    ("aten::maximum", Family.ELEMENTWISE),
    ("aten::copy_", Family.COPY),
    ("aten::cat", Family.COPY),
    ("aten::as_strided", Family.OTHER),
    ("graph_0_cpp_fused_native_layer_norm_0", Family.NORMALIZATION),
    ("c10d::allreduce_", Family.COMMUNICATION),
    ("mylib::strange", Family.OTHER),
]


@pytest.mark.parametrize(("name", "family"), KERNELS)
def test_kernel_is_told_by_its_name(name, family):
    assert classify_kernel(name) is family


@pytest.mark.parametrize(("name", "family"), OPERATORS)
def test_operator_is_told_by_its_name(name, family):
    assert classify_operator(name) is family


def test_operator_decides_where_the_name_says_nothing_or_only_how_it_is_done():
    assert classify_kernel("my_own_kernel", "aten::native_layer_norm") is Family.NORMALIZATION
    assert classify_kernel("sm80_xmma_gemm_f32f32_cublas", "aten::cudnn_convolution") is Family.CONVOLUTION
    assert classify_kernel("sm80_xmma_gemm_f32f32_cublas", "aten::addmm") is Family.GEMM
    assert classify_kernel("reduce_kernel", "aten::addmm") is Family.REDUCTION


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", "elementwise"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
            "reduction",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 4, 64, 64>", "copy"),
        ("triton_poi_fused_native_layer_norm_1", None),
        ("nvfuser_pointwise_f0_c1_r0_g0(Tensor<float, 1, 1>)", None),
        ("Memcpy DtoD (Device -> Device)", None),
        ("nvjet_tst_256x256_64x4_2x1_v_bz_coopA_TNT", None),
        ("my_own_kernel", None),
    ],
)
def test_what_a_compiler_could_fuse_is_of_one_operator_and_not_fused_yet(name, family):
    assert unfused_family(name) == family
    assert is_compiled_kernel(name) is name.startswith(("triton_", "nvfuser_"))


def test_a_convolution_is_one_where_changing_the_layout_takes_longer(scene):
    scene.run(0, 0, 100).op("aten::cudnn_convolution", 5, 50)
    for number, name, duration in ((1, "nchwToNhwcKernel", 30), (2, "sm90_xmma_fprop_cudnn", 10)):
        scene.call("cudaLaunchKernel", 10 * number, 5, number).kernel(name, 100 * number, duration, number)
    table = list_kernels(scene.trace())
    rows = {row.kernel: row.family for row in summarize_kernels(table)}
    assert rows == {"nchwToNhwcKernel": "layout", "sm90_xmma_fprop_cudnn": "convolution"}
    whole = families_of_groups(table, np.arange(2), np.zeros(2, np.int64), ["aten::cudnn_convolution"])
    assert whole == [Family.CONVOLUTION]
    apart = families_of_groups(table, np.arange(2), np.arange(2), ["a", "b"])
    assert set(apart) == {Family.LAYOUT, Family.CONVOLUTION}


def test_each_rule_says_whose_names_it_reads_and_why():
    for rule in (*KERNEL_RULES, *OPERATOR_RULES):
        assert len(rule.source) > 3
        assert len(rule.why) > 3
    assert {rule.family for rule in KERNEL_RULES} == set(FAMILIES) - {Family.COMMUNICATION, Family.OTHER}


def test_only_a_kernel_that_spins_is_unknown_in_the_recorded_windows():
    unknown, seen = set(), set()
    for scene in SCENES:
        for row in summarize_kernels(list_kernels(Trace.read(DATA / "cuda" / f"{scene}.json.gz"))):
            seen.add(row.family)
            if row.family == Family.OTHER:
                unknown.add(row.kernel)
    assert unknown == {"at::cuda::(anonymous namespace)::spin_kernel(long)"}
    assert seen >= {"gemm", "convolution", "attention", "elementwise", "reduction", "copy"}


@pytest.mark.parametrize("scene", SCENES)
def test_recorded_attention_and_copies_by_a_plain_loop(scene):
    with gzip.open(DATA / "cuda" / f"{scene}.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    table = list_kernels(Trace.read(DATA / "cuda" / f"{scene}.json.gz"))
    family = families_of(table)
    attention = sum(e["dur"] for e in events if e["cat"] == "kernel" and e["name"].startswith("fmha_"))
    copies = sum(
        e["dur"]
        for e in events
        if e["cat"] in ("gpu_memcpy", "gpu_memset")
        or (e["cat"] == "kernel" and any(part in e["name"] for part in ("direct_copy", "FillFunctor", "CatArray")))
    )
    for wanted, total in ((Family.ATTENTION, attention), (Family.COPY, copies)):
        mine = family == FAMILIES.index(wanted)
        assert int(table.duration_ns[mine].sum()) == pytest.approx(total * 1e3)


def test_operators_of_a_cpu_have_families_too():
    table = list_kernels(Trace.read(DATA / "cpu_small.json"))
    family = families_of(table)
    assert len(family) == table.num_kernels
    names = {FAMILIES[number] for number in np.unique(family)}
    assert {Family.CONVOLUTION, Family.NORMALIZATION, Family.ELEMENTWISE, Family.REDUCTION} <= names


def test_nothing_has_no_families(scene):
    assert not len(families_of(list_kernels(scene.add("user_annotation", "x", 0, 1).trace())))
