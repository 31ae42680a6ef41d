"""What compiled regions launch has the region's name and its fused operators."""

from pathlib import Path

import pytest
import torch
from torch import nn

from perfladder import _torch_private
from perfladder.functional.compiled import fused_operators, region_name
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace

CUDA_TRACE = Path(__file__).parents[1] / "data" / "cuda" / "compiled.json.gz"


@pytest.mark.parametrize(
    ("kernel", "operators"),
    [
        ("triton_poi_fused_add_gelu_0", ("add", "gelu")),
        ("triton_per_fused__softmax_native_layer_norm_12", ("_softmax", "native_layer_norm")),
        ("triton_red_fused__to_copy__unsafe_view_mean_1", ("_to_copy", "_unsafe_view", "mean")),
        ("triton_tem_fused_mm_0", ("mm",)),
        ("graph_0_cpp_fused__softmax_add_gelu_mul_native_layer_norm_0", None),
        ("cpp_fused_no_such_operator_add_3", ("no", "such", "operator", "add")),
        ("triton_poi_fused_0", ()),
        ("ampere_sgemm_128x64_tn", ()),
        ("my_fused_kernel", ()),
    ],
)
def test_fused_operators_are_read_from_names(kernel, operators):
    expected = ("_softmax", "add", "gelu", "mul", "native_layer_norm") if operators is None else operators
    assert fused_operators(kernel) == expected


def test_region_names():
    assert region_name("blocks.0", "triton_poi_fused_add_gelu_0", "x") == "compiled region blocks.0: fused add, gelu"
    assert region_name("", "cublas_gemm", "aten::addmm") == "compiled region: addmm"
    assert region_name("net", "copy", "Torch-Compiled Region: 0/0") == "compiled region net"


def test_every_kernel_of_a_recorded_compiled_run_has_a_name():
    table = list_kernels(Trace.read(CUDA_TRACE), only_runs=True)
    rows = [table.row(index) for index in range(table.num_kernels)]
    names = {region_name("net", row.kernel, row.operator or "(none)").partition(": ")[2] for row in rows}
    assert "fused clone, convolution, silu, transpose, view" in names
    assert "fused _scaled_dot_product_efficient_attention, _unsafe_view, add, split, unsqueeze" in names
    assert {"cudnn_convolution", "_efficient_attention_forward", "addmm"} <= names
    assert "" not in names


class Net(nn.Module):
    """A compiled block between plain layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        return torch.neg(self.block(self.first(x)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_compiled_module_is_one_region_and_is_not_compiled_anew(profile, calls_of):
    from torch._inductor import config

    net, x = Net().eval(), torch.randn(4, 8)
    block = net.block
    with torch.no_grad(), config.patch({"cpp.enable_kernel_profile": True}):
        net.block = torch.compile(block)
        net(x)
        before = _torch_private.compile_counters()
        frame, samples, profiler = profile(net, [((x,), {})], names=None)
    change = _torch_private.compile_counters().since(before)
    assert (change.graphs, change.graph_breaks, change.recompiles) == (0, 0, 0)
    assert profiler.coverage.warnings == []
    assert set(frame["module_name"]) == {"first", "block", ""}
    inside = frame[frame["module_name"] == "block"]
    assert set(inside["module"]) == {block}
    assert {"compiled region block: fused gelu", "compiled region block: addmm"} <= set(inside["function_name"])
    assert {("first", "linear"), ("", "torch.neg")} <= calls_of(frame)
    assert [count for count, _ in samples["linear"]] == [1]
    assert profiler.coverage.attributed_share == 1


def test_compiled_function_inside_a_plain_module_is_warned_about(profile):
    results = []

    @torch.compile(backend="eager")
    def double(x):
        return torch.abs(x * 2)

    class Caller(nn.Module):
        def forward(self, x):
            results.append(double(x))

    _, _, profiler = profile(Caller(), [((torch.ones(3),), {})], warmup_iterations=1)
    assert [result.tolist() for result in results] == [[2, 2, 2]] * 2
    assert [warning.code for warning in profiler.coverage.warnings] == ["COMPILED_UNDER_MARKS"]
