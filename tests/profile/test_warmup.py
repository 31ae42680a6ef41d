"""The warm-up inside the window is in no table and raises no warning, also on a device. Times are microseconds."""

import json

import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.labels import encode_label
from perfladder.trace.model import Trace
from perfladder.trace.operators import operator_table
from perfladder.trace.regions import report_regions
from perfladder.trace.timeline import report_timeline

REGION = encode_label("untuned_module", "unet")


def host(name, start, duration, cat="cpu_op", **args):
    # A fraction of a microsecond, so that the file does not look like one with rounded times.
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start + 0.001, "dur": duration, "args": args}


def kernel(start, duration, correlation):
    args = {"device": 0, "stream": 7, "correlation": correlation}
    return host("matmul_kernel", start, duration, "kernel") | {"pid": 0, "tid": 7, "args": args}


def run_events(kind, index, start, correlation):
    """A run of 100 us with a region of 60 us, which launches a kernel of 40 us."""
    return [
        host(encode_label(kind, str(index)), start, 100),
        host(REGION, start + 10, 60),
        host("cudaLaunchKernel", start + 20, 5, "cuda_runtime", correlation=correlation),
        kernel(start + 30, 40, correlation),
    ]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    events = [*run_events("warmup_run", 0, 1000, 1), *run_events("profiled_run", 0, 2000, 2)]
    path.write_text(json.dumps({"traceEvents": events}))
    return Trace.read(path)


def test_a_warmup_raises_no_warning(trace):
    report = report_regions(trace)
    assert report.warnings == ()
    assert report.unattributed_device_time_us == 0
    assert report.unattributed_device_time_fraction == 0


def test_a_warmup_is_in_no_table(trace):
    attribution = attribute(trace)
    report = report_regions(trace, attribution)
    assert [run.device_time_us for run in report.runs] == [40]
    assert [(node.calls, node.device_time_us) for node in report.region_tree] == [(1, 40)]
    kernels = [row for row in operator_table(trace, only_runs=True) if row.key == "matmul_kernel"]
    assert [row.count for row in kernels] == [1]
    assert [row.num_events for row in report_timeline(trace, attribution).devices] == [1]
    assert [row.num_events for row in report_timeline(trace).devices] == [2]


def test_work_outside_runs_and_warmups_is_still_told(tmp_path):
    path = tmp_path / "trace.json"
    events = [*run_events("profiled_run", 0, 2000, 2), *run_events("other", 0, 3000, 3)]
    path.write_text(json.dumps({"traceEvents": events}))
    codes = {str(warning.code) for warning in report_regions(Trace.read(path)).warnings}
    assert codes == {"UNATTRIBUTED_DEVICE_TIME", "EVENTS_OUTSIDE_RUNS"}


def test_exclusive_and_entered_regions(tmp_path):
    """A root method of 80 us with a module of 30 us and an entered parent of 20 us (its child: 15 us) inside."""
    path = tmp_path / "trace.json"
    events = [
        host(encode_label("profiled_run", "0"), 0, 100),
        host(encode_label("untuned_module", "generate"), 10, 80),
        host(encode_label("untuned_module", "head"), 15, 30),
        host(encode_label("untuned_module", "body"), 50, 20),
        host(encode_label("aot_module", "body.core"), 52, 15),
        host("cudaLaunchKernel", 80, 2, "cuda_runtime", correlation=5),
        kernel(85, 4, 5),
        kernel(96, 1, 6),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    trace = Trace.read(path)
    attribution = attribute(trace, entered={"untuned_module:body"}, exclusive={"untuned_module:generate"})
    run = report_regions(trace, attribution).runs[0]
    assert {row.name: (round(row.cpu_time_us, 3), row.device_time_us) for row in run.regions} == {
        "generate": (80 - 30 - 15, 4),
        "head": (30, 0),
        "body.core": (15, 0),
    }
    assert run.residual.cpu_time_us == pytest.approx(20)
    assert run.residual.device_time_us == pytest.approx(1)
    assert run.residual.host.total_us == pytest.approx(20)
