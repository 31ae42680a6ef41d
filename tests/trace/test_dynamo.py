"""Spans of torch.compile's runtime are no operators; their self time stays in the sums, under one name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from perfladder.profiling.attribute import analyse_trace
from perfladder.trace.dynamo import RUNTIME_NAME, is_runtime
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.model import Trace
from perfladder.trace.operators import key_averages, operator_table, top_operators
from perfladder.trace.record import record_window, span
from perfladder.trace.residual import HostParts, Part

COMPILED = Path(__file__).parents[1] / "data" / "cuda" / "compiled.json.gz"


class Net(nn.Module):
    """Two compiled regions: the sum between them breaks the graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        print(end="")
        return y + 1


@pytest.fixture(scope="module", params=["eager", "aot_eager"])
def trace(request, tmp_path_factory):
    """A window of two runs of a module that was compiled before it."""
    torch._dynamo.reset()
    net, x = torch.compile(Net().eval(), backend=request.param), torch.ones(4, 8)
    path = tmp_path_factory.mktemp("compiled") / "trace.json"
    with torch.no_grad():
        net(x)
        with record_window(path, activities=["cpu"]):
            for index in range(2):
                with span("profiled_run", str(index)), span("untuned_module", "net"):
                    net(x)
    return Trace.read(path)


def test_torch_writes_the_spans_that_are_known_here(trace):
    """If a new torch names them otherwise, this tells."""
    found = {name.partition(":")[0] for name in trace.names if is_runtime(name)}
    assert {"TorchDynamo Cache Lookup", "Torch-Compiled Region"} <= found
    others = {name for name in trace.names if not name.startswith(("aten::", "perfladder.")) and not is_runtime(name)}
    assert others <= {"PyTorch Profiler (0)"}


def test_kernel_table_has_one_row_for_the_runtime_and_adds_up(trace):
    table = list_kernels(trace, only_runs=True)
    rows = summarize_kernels(table)
    assert [(row.kernel, row.operator) for row in rows if is_runtime(row.kernel)] == [(RUNTIME_NAME, RUNTIME_NAME)]
    raw = [row for row in operator_table(trace, only_runs=True) if not row.key.startswith("perfladder.")]
    assert sum(row.total_us for row in rows) == pytest.approx(sum(row.self_cpu_time_total_us for row in raw))
    runtime = next(row for row in rows if row.kernel == RUNTIME_NAME)
    own = [row for row in raw if is_runtime(row.key)]
    assert runtime.total_us == pytest.approx(sum(row.self_cpu_time_total_us for row in own))
    assert runtime.count == sum(row.count for row in own)


def test_operators_inside_a_compiled_region_are_outermost_ones(trace):
    rows = summarize_kernels(list_kernels(trace, only_runs=True))
    by_kernel = {row.kernel: row.outer_operator for row in rows}
    assert by_kernel["aten::addmm"] in ("aten::linear", "aten::addmm")
    assert all((row.outer_operator or "aten::").startswith("aten::") for row in rows)


def test_operator_view_has_one_row_and_the_same_sum(trace):
    raw = operator_table(trace)
    shown = top_operators(raw, limit=1000)
    (runtime,) = [row for row in shown if is_runtime(row.key)]
    assert runtime.key == RUNTIME_NAME
    assert runtime.cpu_time_total_us == runtime.self_cpu_time_total_us
    assert sum(row.self_cpu_time_total_us for row in shown) == pytest.approx(
        sum(row.self_cpu_time_total_us for row in raw)
    )
    assert RUNTIME_NAME in {row.key for row in key_averages(trace)["cpu_time_total"]}


def test_runtime_is_dispatch_and_computes_nothing(trace):
    from perfladder.trace.attribution import attribute

    parts = HostParts(trace, attribute(trace)).part
    lookups = [name == "TorchDynamo Cache Lookup" for name in trace.names]
    positions = [index for index, name in enumerate(trace.forest.name_id.tolist()) if lookups[name]]
    assert {int(parts[index]) for index in positions} == {Part.OPERATOR_DISPATCH}


def test_trace_without_compiled_code_has_no_such_row(scene):
    scene.run(0, 0, 100).op("aten::add", 10, 20)
    trace = scene.trace()
    assert [row.key for row in top_operators(operator_table(trace)) if is_runtime(row.key)] == []
    assert list_kernels(trace).trace is trace


def test_spans_of_several_regions_are_one_row_in_each_module(scene):
    scene.run(0, 0, 1000)
    for index, name in enumerate(("a", "b")):
        begin = 10 + 100 * index
        scene.label("untuned_module", name, begin, 90).op("TorchDynamo Cache Lookup", begin + 1, 5)
        scene.op(f"Torch-Compiled Region: {index}/0", begin + 10, 50).op("aten::add", begin + 20, 10)
    rows = summarize_kernels(list_kernels(scene.trace(), only_runs=True))
    found = {(row.region, row.kernel, row.outer_operator): (row.count, row.total_us) for row in rows}
    assert found == {
        **{(f"untuned_module:{name}", RUNTIME_NAME, None): (2, pytest.approx(45)) for name in ("a", "b")},
        **{(f"untuned_module:{name}", "aten::add", "aten::add"): (1, pytest.approx(10)) for name in ("a", "b")},
    }


def test_call_of_an_inductor_graph_keeps_its_own_row_since_fused_kernels_hide_in_it(scene):
    scene.run(0, 0, 1000).op("Torch-Compiled Region: 0/0", 10, 90).op("## Call CompiledFxGraph f1 ##", 20, 50)
    rows = summarize_kernels(list_kernels(scene.trace(), only_runs=True))
    found = {row.kernel: (row.total_us, row.outer_operator) for row in rows}
    assert found == {
        "## Call CompiledFxGraph f1 ##": (pytest.approx(50), None),
        RUNTIME_NAME: (pytest.approx(40), None),
    }


def test_kernels_of_a_recorded_compiled_window_have_real_operators():
    rows = summarize_kernels(list_kernels(Trace.read(COMPILED), only_runs=True))
    assert all(row.outer_operator is None or row.outer_operator.startswith(("aten::", "triton_")) for row in rows)
    assert {"aten::addmm", "aten::_scaled_dot_product_efficient_attention", "aten::convolution"} <= {
        row.outer_operator for row in rows
    }


def test_analysis_of_a_recorded_file_shows_one_row_too():
    analysis = analyse_trace(COMPILED)
    assert [row.key for row in analysis.operators if is_runtime(row.key)] == [RUNTIME_NAME]
