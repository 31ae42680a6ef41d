"""Lines that launch Triton kernels: found by Triton's launch hooks, shown where no named call launched."""

import functools
import sys
import threading
import types

import pytest
import torch
from torch import nn

from perfladder.functional.launch_sites import describe_site, find_launching_frame, mark_launch_sites, name_launch
from perfladder.functional.rows import name_functions, share_by_function, split_by_function
from perfladder.functional.sites import ModuleSites, find_module_sites
from perfladder.functional.window import record_marked
from perfladder.report import build_report, render_markdown
from perfladder.rundir import RunDirectory
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.kernels import KernelSummary, list_kernels, summarize_kernels
from perfladder.trace.record import span
from perfladder.workload import parse_workload

HOOK_LIST = """
class HookList:
    def __init__(self):
        self.calls = []

    def add(self, hook):
        self.calls.append(hook)

    def remove(self, hook):
        self.calls.remove(hook)

    def __call__(self, *args):
        for hook in self.calls:
            hook(*args)
"""


def code_of(module, source):
    """Run source as a module of that name, in a file of that name."""
    space = {"__name__": module}
    exec(compile(source, f"/srv/{module.replace('.', '/')}.py", "exec"), space)
    return types.SimpleNamespace(**space)


@pytest.fixture
def triton(monkeypatch):
    """A stand-in for what of Triton the hooks touch: `launch(work)` is a launch."""
    made = code_of("triton.knobs", HOOK_LIST)
    enter, leave = made.HookList(), made.HookList()
    knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    code = code_of(
        "triton.runtime.jit",
        "def run(enter, leave, work):\n    enter(None)\n    work()\n    leave(None)\n",
    )
    knobs.launch = functools.partial(code.run, enter, leave)  # which has no frame of its own
    knobs.chains = (enter, leave)
    return knobs


def launches(trace):
    """Positions of the spans of launches."""
    found = [index for index, label in enumerate(trace.labels) if label is not None and label.kind == "launch_site"]
    return [position for position, name in enumerate(trace.forest.name_id.tolist()) if name in found]


class Net(nn.Module):
    """Launches a kernel of its own; on the CPU that is an operator."""

    def __init__(self, launch):
        super().__init__()
        self.launch = launch

    def forward(self, x):
        self.launch(lambda: torch.neg(x))
        return x


def test_span_of_a_launch_names_file_line_and_function(triton, tmp_path):
    net = Net(triton.launch)
    line = Net.forward.__code__.co_firstlineno + 1
    with torch.no_grad():
        trace, warnings = record_marked(
            tmp_path / "t.json", find_module_sites(net, "net"), lambda: net(torch.ones(3)), activities=["cpu"]
        )
    (label,) = [label for label in trace.labels if label is not None and label.kind == "launch_site"]
    assert label.name.endswith(f"test_launch_sites.py:{line} (Net.forward)")
    assert not label.name.startswith("/")
    assert warnings == []
    assert [chain.calls for chain in triton.chains] == [[], []]


def test_hooks_come_off_after_an_error_too(triton):
    with pytest.raises(KeyError), mark_launch_sites():
        raise KeyError
    assert [chain.calls for chain in triton.chains] == [[], []]


def test_launch_that_fails_closes_its_span_at_the_next_one(triton, tmp_path):
    def fail():
        raise ValueError("no such grid")

    def run():
        for work in (fail, lambda: torch.ones(2)):
            try:
                triton.launch(work)
            except ValueError:
                torch.zeros(2)

    trace, _ = record_marked(tmp_path / "t.json", ModuleSites(), run, activities=["cpu"])
    spans = launches(trace)
    assert len(spans) == 2
    parents = {int(trace.forest.parent[position]) for position in spans}
    assert not parents & set(spans)


def test_threads_have_spans_of_their_own(triton, tmp_path):
    """The worker's launch is still open when this thread's begins and ends."""
    inside, go_on = threading.Event(), threading.Event()

    def wait():
        inside.set()
        go_on.wait(5)

    def run():
        worker = threading.Thread(target=lambda: triton.launch(wait))
        worker.start()
        inside.wait(5)
        triton.launch(lambda: None)
        go_on.set()
        worker.join()

    trace, _ = record_marked(tmp_path / "t.json", ModuleSites(), run, activities=["cpu"])
    spans = launches(trace)
    assert len(spans) == 2
    (first, second) = sorted(spans, key=lambda position: trace.forest.start_ns[position])
    assert trace.forest.thread[first] != trace.forest.thread[second]
    assert trace.forest.end_ns[first] > trace.forest.end_ns[second]


@pytest.mark.parametrize("knobs", [None, types.SimpleNamespace(), "one hook"])
def test_without_a_list_of_hooks_nothing_is_seen_or_changed(knobs, monkeypatch):
    if knobs == "one hook":
        knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))
    if knobs is None:
        monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    with mark_launch_sites() as is_seen:
        assert is_seen is False


def frame_in(*modules):
    """The frame of a call through functions of these modules, the first one outermost."""
    inner = sys._getframe
    for module in reversed(modules):
        inner = code_of(module, "def make(inner):\n    return lambda: inner()\n").make(inner)
    return inner()


def test_innermost_line_that_is_not_of_triton_or_torch_launches():
    frame = find_launching_frame(frame_in("app.model", "liger.ops", "torch.library", "triton.runtime.autotuner"))
    assert frame.f_globals["__name__"] == "liger.ops"
    assert describe_site(frame.f_code, frame.f_lineno) == "liger/ops.py:2 (make.<locals>.<lambda>)"


def test_what_inductor_generated_has_no_line():
    assert find_launching_frame(frame_in("app.model", "torch._inductor.runtime.triton_heuristics", "triton.x")) is None


def test_module_whose_name_only_begins_alike_is_the_programs():
    frame = find_launching_frame(frame_in("torchvision.ops", "triton.runtime.jit"))
    assert frame.f_globals["__name__"] == "torchvision.ops"


def test_nothing_but_machinery_has_no_line():
    frame = types.SimpleNamespace(f_globals={"__name__": "triton.x"}, f_back=None)
    assert find_launching_frame(frame) is None


def test_file_is_named_as_the_path_leads_to_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["/srv", "/srv/app", str(tmp_path)])
    for module, name in (("app.models.net", "models/net.py"), ("lib.net", "lib/net.py")):
        function = code_of(module, "def forward(): pass").forward
        assert describe_site(function.__code__, 7) == f"{name}:7 (forward)"
    monkeypatch.setattr(sys, "path", [])
    assert describe_site(function.__code__, 7) == "lib/net.py:7 (forward)"


# Tables

SITE = "models/net.py:42 (Net.forward)"


@pytest.fixture
def device_table(tmp_path):
    """Two kernels of one name from two lines of a module, one in a functional call, and an operator's kernel."""
    import json

    from perfladder.trace.labels import encode_label
    from perfladder.trace.model import Trace

    events = []

    def add(cat, name, start, duration, **args):
        place = {"pid": 0, "tid": 7} if cat == "kernel" else {"pid": 100, "tid": 1}
        events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start + 0.001, "dur": duration, "args": args, **place}
        )

    def launch(number, start, name, label=None):
        if label:
            add("cpu_op", encode_label("launch_site", label), start, 8)
        add("cuda_driver", "cuLaunchKernelEx", start + 1, 5, correlation=number)
        add("kernel", name, start + 20, number, correlation=number, device=0, stream=7)

    add("cpu_op", encode_label("profiled_run", "0"), 0, 1000)
    add("cpu_op", encode_label("untuned_module", "net"), 5, 900)
    launch(1, 10, "add_kernel", SITE)
    launch(2, 50, "add_kernel", "models/net.py:50 (Net.forward)")
    add("cpu_op", encode_label("function", "linear"), 100, 50)
    launch(3, 110, "mm_kernel", SITE)
    add("cpu_op", "aten::neg", 200, 50)
    launch(4, 210, "neg_kernel")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return list_kernels(Trace.read(path), only_runs=True)


def test_kernels_have_the_line_that_launched_them(device_table):
    rows = {(row.kernel, row.function, row.operator, row.launch_site) for row in summarize_kernels(device_table)}
    assert rows == {
        ("add_kernel", None, None, SITE),
        ("add_kernel", None, None, "models/net.py:50 (Net.forward)"),
        ("mm_kernel", "linear", None, SITE),
        ("neg_kernel", None, "aten::neg", None),
    }
    assert {device_table.row(index).region for index in range(4)} == {"untuned_module:net"}


def test_rung_names_a_launch_where_no_named_call_is(device_table):
    marked = summarize_kernels(device_table)
    plain = [row.model_copy(update={"function": None, "launch_site": None}) for row in marked]
    both = [row for row in plain if row.kernel == "add_kernel"]
    one = both[0].model_copy(update={"total_us": 30.0, "count": 2, "share": 1.0})
    rows = split_by_function([one], marked)
    assert [(row.launch_site, row.total_us) for row in rows] == [
        ("models/net.py:50 (Net.forward)", pytest.approx(20)),
        (SITE, pytest.approx(10)),
    ]
    names = name_functions(rows, ["net", "net"], set())
    assert names == ["add_kernel (models/net.py:50)", "add_kernel (models/net.py:42)"]
    assert share_by_function(rows, names) == pytest.approx(1)
    assert name_functions(rows, ["net", "net"], {"net"}) == ["compiled region net"] * 2
    assert KernelSummary.model_validate_json(rows[0].model_dump_json()) == rows[0]


def test_frame_keeps_its_six_columns_and_names_the_launch(device_table):
    from perfladder.functional.frames import PROFILE_COLUMNS, Rows

    net = nn.Identity()
    sites = find_module_sites(net, "net")
    rows = Rows(device_table, sites)
    frame = rows.frame()
    assert list(frame.columns) == list(PROFILE_COLUMNS)
    assert list(frame["function_name"]) == [
        "add_kernel (models/net.py:42)",
        "add_kernel (models/net.py:50)",
        "linear",
        "(none)",
    ]
    assert list(frame["op"]) == ["(none)", "(none)", "(none)", "aten::neg"]
    assert rows.attributed_us == pytest.approx(1 + 2 + 3)


def test_report_shows_the_line(device_table, tmp_path):
    result = KernelsResult(stage="net", kind="kernels", kernels=summarize_kernels(device_table), attributed_share=1.0)
    run = RunDirectory.create(
        tmp_path / "runs", parse_workload({"name": "n", "target": "m:f"}), source="n", base_dir=tmp_path
    )
    run.write_result(run.rung_folder(4, "kernels"), "kernels", result, "done", None)
    assert f" at {SITE} |" in render_markdown(build_report(run.path))


def test_name_of_a_launch():
    assert name_launch("add_kernel", SITE) == "add_kernel (models/net.py:42)"


# Triton itself


KERNEL = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, 2 * tl.load(x + place, mask=place < n), mask=place < n)


def double(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
    return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return double(self.linear(x))
"""


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.gpu
def test_triton_kernel_has_the_line_that_launched_it(tmp_path, monkeypatch, profile):
    (tmp_path / "own_triton.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("own_triton")
    from triton import knobs

    net, x = module.Net().cuda().eval(), torch.ones(32, 64, device="cuda")
    line = next(n for n, text in enumerate(KERNEL.splitlines(), 1) if "double_kernel[(" in text)
    before = list(knobs.runtime.launch_enter_hook.calls)
    frame, _, profiler = profile(net, [((x,), {})], warmup_iterations=2)
    assert knobs.runtime.launch_enter_hook.calls == before
    rows = frame[frame["kernel"] == "double_kernel"]
    assert list(rows["function_name"]) == [f"double_kernel (own_triton.py:{line})"]
    assert list(rows["module_name"]) == [""]
    assert "linear" in set(frame["function_name"])
    assert profiler.coverage.attributed_share > 0.99
    with torch.no_grad():
        trace, _ = record_marked(tmp_path / "t.json", find_module_sites(net, "net"), lambda: _run(net, x))
    (row,) = [row for row in summarize_kernels(list_kernels(trace)) if row.kernel == "double_kernel"]
    assert row.launch_site == f"own_triton.py:{line} (double)"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what Inductor imports
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.gpu
def test_kernels_that_inductor_generated_have_no_line(tmp_path):
    net, x = (
        torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Softmax(-1)).cuda()),
        torch.ones(32, 64).cuda(),
    )
    with torch.no_grad():
        net(x)
        trace, _ = record_marked(tmp_path / "t.json", find_module_sites(net, "net"), lambda: _run(net, x))
    rows = summarize_kernels(list_kernels(trace))
    assert any(row.kernel.startswith("triton_") for row in rows)
    assert {row.launch_site for row in rows} == {None}


def _run(net, x):
    with span("profiled_run", "0"):
        net(x)
        torch.accelerator.synchronize()
