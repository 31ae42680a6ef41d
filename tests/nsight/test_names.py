import pytest

from perfladder.nsight.names import function_name, is_same_kernel

ATEN = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<f>({lambda(int)#1})>(int, f)"


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN"),
        (ATEN, "elementwise_kernel"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(cutlass_80_tensorop_s1688gemm::Params)", "Kernel2"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*, int)", "softmax_warp_forward"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, 4>(int*)", "CatArrayBatchedCopy"),
        ("gemv(float const*, int)", "gemv"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(cublasGemvParamsEx)", "kernel"),
    ],
)
def test_the_function_is_found_in_a_demangled_name(kernel, function):
    assert function_name(kernel) == function
    assert function_name(function) == function


def test_the_same_kernel_is_known_in_both_spellings():
    torch_name = "void at::native::vectorized_elementwise_kernel<4, f<float>, std::array<char*, 2ul> >(int, f<float>)"
    ncu_name = "void at::native::vectorized_elementwise_kernel<(int)4, f<float>, std::array<char *, (unsigned long)2>>("
    ours = "void at::native::vectorized_elementwise_kernel<(int)4, f<float>>(int, f<float>)"
    assert is_same_kernel("void at::native::vectorized_elementwise_kernel<4, f<float> >(int, f<float>)", ours) is True
    assert is_same_kernel(torch_name, ncu_name + "int)") is None
    assert is_same_kernel("vectorized_elementwise_kernel", ncu_name + "int)") is True
    assert is_same_kernel("reduce_kernel", ncu_name + "int)") is False
