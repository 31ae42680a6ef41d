"""Rung 4 and CUDA graphs: kernels of replays get operator and module from a pass without graphs."""

import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from perfladder import _torch_private
from perfladder.errors import WorkloadError
from perfladder.functional.sites import find_module_sites
from perfladder.profiling.graph_off import without_graphs
from perfladder.profiling.graph_pass import GraphPass, pair_replays
from perfladder.profiling.graph_rows import split_by_replay, summarize_replays
from perfladder.report import build_report, render_markdown
from perfladder.rundir import RunDirectory
from perfladder.rungs import capture, kernels
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.kernels import KernelsRequest, KernelsResult
from perfladder.trace.graphs import GraphReplay, ReplayedKernel, attribute_replays
from perfladder.trace.kernels import KernelSummary, list_kernels, summarize_kernels
from perfladder.trace.labels import RUN_KIND
from perfladder.trace.model import Trace
from perfladder.trace.record import span
from perfladder.trace.repeats import add_repeats, take_typical
from perfladder.workload import parse_workload

# torch's own, when Inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

DATA = Path(__file__).parents[1] / "data" / "cuda"
RUNS = 3


def recorded(name):
    return list_kernels(Trace.read(DATA / f"{name}.json.gz"), only_runs=True)


def per_call(table):
    rows = summarize_kernels(table)
    return [row.model_copy(update={"total_us": row.total_us / RUNS, "count": row.count // RUNS}) for row in rows]


def row(kernel="k", total_us=10.0, count=2, **fields):
    known = {"category": "kernel", "operator": None, "outer_operator": None, "function": None, "region": "m:net"}
    return KernelSummary(
        kernel=kernel, total_us=total_us, count=count, mean_us=total_us / count, share=1.0, example_event=0, **known
    ).model_copy(update=fields)


def replay(*kernels, confidence=1.0):
    return GraphReplay(region="m:net", run=0, kernels=list(kernels), confidence=confidence)


def paired(kernel="k", operator="aten::mm", region="m:net.a", duration_us=5.0):
    return ReplayedKernel(
        kernel=kernel,
        duration_us=duration_us,
        operator=operator,
        outer_operator=operator,
        region=region,
        is_paired=True,
    )


@pytest.mark.parametrize("repeats", [1, RUNS], ids=["sums", "typical repeats"])
def test_recorded_replays_get_operators_and_modules_and_the_sums_stay(repeats):
    table = take_typical(recorded("graph"), repeats)
    before, replays = per_call(table), attribute_replays(table, recorded("eager"))
    after = split_by_replay(before, replays, RUNS)
    assert sum(r.total_us for r in after) == pytest.approx(sum(r.total_us for r in before))
    assert sum(r.share for r in after) == pytest.approx(1)
    assert add_repeats(after) == pytest.approx(add_repeats(before))
    assert len(add_repeats(after)) == (RUNS if repeats == RUNS else 0)
    from_graph = [r for r in after if r.is_from_graph]
    assert sum(r.count for r in from_graph) == 12
    assert {r.confidence for r in from_graph} == {1.0}
    assert {r.region for r in from_graph} == {f"untuned_module:net.{part}" for part in ("conv", "attention", "out")}
    assert all(r.operator is not None for r in from_graph)
    others = [r for r in after if not r.is_from_graph]
    assert {r.outer_operator for r in others} == {"aten::add", "aten::sum", "aten::item"}
    assert {r.confidence for r in others} == {None}


def test_recorded_replays_without_another_pass_stay_under_their_launch():
    table = recorded("graph")
    replays = attribute_replays(table, None)
    rows = [r for r in split_by_replay(per_call(table), replays, RUNS) if r.is_from_graph]
    assert sum(r.count for r in rows) == 12
    assert {(r.operator, r.region, r.confidence) for r in rows} == {(None, "untuned_module:net", None)}
    assert {kernels._operator(r) for r in rows} == {"(CUDA graph launch)"}
    (summary,) = summarize_replays(replays, RUNS)
    assert (summary.region, summary.count, summary.num_kernels) == ("untuned_module:net", 1, 12)
    assert summary.confidence is None
    assert summary.total_us == pytest.approx(sum(r.total_us for r in rows))


def test_row_is_divided_among_the_places_that_its_kernels_come_from():
    kernel_a, kernel_b = paired(), paired(region="m:net.b", operator="aten::add", duration_us=2.0)
    missing = ReplayedKernel(kernel="k", duration_us=1.0)
    rows = split_by_replay([row(total_us=10.0, count=4)], [replay(kernel_a, kernel_b, missing, confidence=0.9)], 1)
    assert [(r.operator, r.region, r.total_us, r.count, r.is_from_graph, r.confidence) for r in rows] == [
        ("aten::mm", "m:net.a", 5.0, 1, True, 0.9),
        ("aten::add", "m:net.b", 2.0, 1, True, 0.9),
        (None, "m:net", 2.0, 1, False, None),
        (None, "m:net", 1.0, 1, True, 0.0),
    ]


def test_least_sure_replay_gives_the_confidence_of_a_row():
    (found,) = split_by_replay([row()], [replay(paired()), replay(paired(), confidence=0.5)], 1)
    assert (found.confidence, found.total_us, found.count) == (0.5, 10.0, 2)


def test_rows_of_other_places_are_left_alone():
    other = row(region="m:other")
    assert split_by_replay([other], [replay(paired())], 1) == [other]


def test_report_says_what_graphs_replayed_and_how_sure_their_operators_are(tmp_path):
    table = recorded("graph")
    for plain, words in ((recorded("eager"), "A pass without graphs launches 100"), (None, "No pass without graphs")):
        replays = attribute_replays(table, plain)
        result = KernelsResult(
            stage="net",
            kind="kernels",
            kernels=split_by_replay(per_call(table), replays, RUNS),
            graphs=summarize_replays(replays, RUNS),
            attributed_share=1.0,
        )
        assert KernelsResult.model_validate_json(result.model_dump_json()) == result
        run = RunDirectory.create(
            tmp_path / "runs", parse_workload({"name": "n", "target": "m:f"}), source="n", base_dir=tmp_path
        )
        run.write_result(run.rung_folder(4, "kernels"), "kernels", result, "done", None)
        text = render_markdown(build_report(run.path))
        assert "CUDA graphs replayed 12 kernels" in text
        assert words in text
        assert ("aten::silu (in a graph, 100" in text) == (plain is not None)
        assert ("CUDA graph launch" in text) == (plain is None)


# The pass without graphs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x))


def compiled(how, mode="reduce-overhead"):
    net = Net().eval()
    if how == "wrapper":
        return torch.compile(net, mode=mode)
    if how == "in place":
        net.compile(mode=mode)
    else:
        net.forward = torch.compile(net.forward, mode=mode)
    return net


def options_of(module):
    return _torch_private.inductor_options(_torch_private.find_compiled_call(module).configured)


def current(module):
    call = _torch_private.find_compiled_call(module)
    return vars(module)[call.attribute]


@pytest.mark.parametrize("how", ["wrapper", "in place", "forward"])
def test_compiled_module_runs_without_graphs_inside_the_block_only(how):
    module = compiled(how)
    before = current(module)
    assert options_of(module) == {"triton.cudagraphs": True}
    with without_graphs([module, module]) as changed:
        assert changed == [module]
        assert current(module) is not before
    assert current(module) is before


def test_module_is_put_back_after_an_error():
    module = compiled("wrapper")
    before = current(module)
    with pytest.raises(KeyError), without_graphs([module]):
        raise KeyError
    assert current(module) is before


def test_other_options_are_kept():
    module = compiled("forward", "max-autotune")
    kept = {name: value for name, value in options_of(module).items() if name != "triton.cudagraphs"}
    with without_graphs([module]):
        assert options_of(module) == {**kept, "triton.cudagraphs": False}


@pytest.mark.parametrize(
    "options",
    [None, {"backend": "eager"}, {"mode": "max-autotune-no-cudagraphs"}],
    ids=["plain", "another backend", "no graphs"],
)
def test_modules_without_graphs_are_left_alone(options):
    with without_graphs([Net() if options is None else torch.compile(Net(), **options)]) as changed:
        assert changed == []


@pytest.fixture
def plan(tmp_path):
    """How to run a compiled module once more, here on a CPU."""

    def make(module, run=None, deadline=math.inf):
        def once():
            with torch.no_grad(), span(RUN_KIND, "0"):
                return (run or module)(torch.ones(3, 4))

        return GraphPass(tmp_path / "off.json", find_module_sites(module, "net"), [module], once, once, None, deadline)

    return make


def test_window_without_replays_needs_no_further_pass(plan, tmp_path):
    assert pair_replays(recorded("eager"), plan(compiled("wrapper"))) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_graphs_of_the_code_itself_are_said_to_stay(plan):
    replays, (warning,) = pair_replays(recorded("graph"), plan(Net()))
    assert [found.confidence for found in replays] == [None] * RUNS
    assert warning.code == "GRAPH_KERNELS_NOT_PAIRED"
    assert "captures its graphs itself" in warning.message


def test_failed_pass_costs_the_operators_only(plan):
    def fail(x):
        raise WorkloadError("no memory")

    module = compiled("wrapper")
    replays, (warning,) = pair_replays(recorded("graph"), plan(module, fail))
    assert [found.confidence for found in replays] == [None] * RUNS
    assert "the pass without graphs failed: no memory" in warning.message
    assert options_of(module)["triton.cudagraphs"]


def test_no_pass_is_begun_that_would_end_too_late(plan):
    replays, (warning,) = pair_replays(recorded("graph"), plan(compiled("wrapper"), deadline=time.monotonic() - 1))
    assert [found.confidence for found in replays] == [None] * RUNS
    assert "timeout_s" in warning.message


def test_pass_that_launches_other_kernels_pairs_nothing_and_says_so(plan, tmp_path):
    """Here the pass runs on the CPU, so it launches none of the recorded kernels."""
    replays, (warning,) = pair_replays(recorded("graph"), plan(compiled("wrapper")))
    assert [found.confidence for found in replays] == [0.0] * RUNS
    assert "does not launch 100%" in warning.message
    assert "aten::addmm" in (tmp_path / "off.json").read_text()


class Pipe:
    def __init__(self, stage, device):
        self.stage, self.device = stage, device

    def __call__(self):
        return self.stage(torch.ones(16, 64, device=self.device))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return torch.softmax(self.second(nn.functional.gelu(self.first(x))), dim=-1)


@pytest.fixture
def attribute_kernels(wrap, tmp_path):
    def run(stage) -> KernelsResult:
        """Replay as rung 3 does before, so that graphs are recorded by then."""
        from perfladder.rungs import harness
        from perfladder.rungs.harness import HarnessRequest

        loaded, folder = wrap(Pipe(stage, "cuda"), device="cuda"), str(tmp_path / "capture")
        capture.measure(loaded, CaptureRequest(stage="stage", folder=folder, reference_runs=2))
        harness.measure(loaded, HarnessRequest(folder=folder, repeats=3))
        request = KernelsRequest(folder=folder, trace_path=str(tmp_path / "kernels.trace.json"), repeats=2)
        return kernels.measure(loaded, request)

    return run


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.gpu
def test_kernels_of_a_compiled_stage_with_graphs_have_operators(attribute_kernels, tmp_path):
    stage = torch.compile(Mlp().cuda().eval(), mode="reduce-overhead")
    result = attribute_kernels(stage)
    (graph,) = result.graphs
    assert (graph.region, graph.count) == ("untuned_module:stage", 1)
    assert graph.num_kernels >= 3
    assert graph.confidence > 0.9
    from_graph = [row for row in result.kernels if row.is_from_graph]
    assert sum(row.count for row in from_graph) == graph.num_kernels
    assert "aten::addmm" in {row.operator for row in from_graph}
    assert any((row.operator or "").startswith("triton_") for row in from_graph)
    assert "GRAPH_KERNELS_NOT_PAIRED" not in {warning.code for warning in result.warnings}
    assert sum(row.total_us for row in result.kernels) == pytest.approx(result.total_us)
    assert (tmp_path / result.artifacts["graph_off_trace"]).is_file()
    assert "cudaGraphLaunch" not in (tmp_path / result.artifacts["graph_off_trace"]).read_text()
    assert options_of(stage)["triton.cudagraphs"]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.gpu
def test_kernels_of_a_graph_that_the_code_captures_stand_under_its_launch(attribute_kernels):
    net, given = Mlp().cuda().eval(), torch.ones(16, 64, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            net(given)
        side.synchronize()
        with torch.cuda.graph(graph):
            made = net(given)

    class Graphed(nn.Module):
        """Its memory is no state of the module: what a graph reads and writes must stay where it is."""

        def forward(self, x):
            given.copy_(x)
            graph.replay()
            return made.clone()

    stage = Graphed()
    result = attribute_kernels(stage)
    (found,) = result.graphs
    assert found.confidence is None
    assert "(CUDA graph launch)" in {share.name for share in result.by_operator}
    assert "GRAPH_KERNELS_NOT_PAIRED" in {warning.code for warning in result.warnings}
