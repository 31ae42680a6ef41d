"""What adds up: fractions to one, parts to the residual, both to the wall clock, and self times to spans."""

import json

import numpy as np
import pytest
import torch

from perfladder.trace.model import Trace
from perfladder.trace.residual import Part

PARTS = [f"{part.name.lower()}_us" for part in Part]


@pytest.fixture
def profiled(pipe, x, profile, tmp_path):
    """Runs of some milliseconds with modules, glue between them, and operators outside any module."""
    noise = torch.randn(64, 64)

    def infer(value):
        for _ in range(5):
            value = pipe(value.repeat(1, 2)[:, :8], steps=20).repeat(1, 2)
            (noise @ noise).sum().item()
        return value

    path = tmp_path / "trace.json"
    return profile(pipe, x, inference_function=infer, measured_runs=3, trace_file=path), path


def end(event):
    return event["ts"] + event["dur"]


def union_us(events):
    covered, reach = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        covered += max(end(event) - max(event["ts"], reach), 0.0)
        reach = max(reach, end(event))
    return covered


def test_fractions_and_residual_are_one(profiled):
    for run in profiled[0].data["runs"]:
        covered = sum(row["cpu_time_fraction"] for row in run["regions"])
        assert covered + run["residual"]["cpu_time_fraction"] == pytest.approx(1, abs=1e-3)


def test_regions_and_residual_agree_with_the_wall_clock(profiled):
    """The clock is the host's, the times are the profiler's."""
    for run in profiled[0].data["runs"]:
        covered_us = sum(row["cpu_time_us"] for row in run["regions"]) + run["residual"]["cpu_time_us"]
        assert covered_us == pytest.approx(run["timing"]["wall_time_us"], rel=0.01)


def test_parts_of_the_residual_cover_it_and_agree_with_a_plain_loop(profiled):
    result, path = profiled
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    is_host = [e for e in spans if e["cat"] in ("cpu_op", "user_annotation")]
    names = {f"perfladder.{row['region_id']}" for run in result.data["runs"] for row in run["regions"]}
    for run in result.data["runs"]:
        (span,) = (e for e in is_host if e["name"] == f"perfladder.profiled_run:{run['run_index']}")
        inside = [e for e in is_host if span["ts"] <= e["ts"] and end(e) <= end(span) and e is not span]
        regions = [e for e in inside if e["name"] in names]
        outside = [e for e in inside if not any(r["ts"] <= e["ts"] and end(e) <= end(r) + 1e-3 for r in regions)]
        operators = [e for e in outside if e["name"].startswith("aten::")]
        collector = [e for e in outside if e["name"].startswith("perfladder.garbage_collection")]
        host = run["residual"]["host"]
        computed = host["operator_dispatch_us"] + host["operator_compute_us"]
        assert computed == pytest.approx(union_us(operators), abs=0.5)
        assert host["python_us"] == pytest.approx(span["dur"] - union_us([*outside, *regions]), abs=0.5)
        assert host["garbage_collection_us"] == pytest.approx(union_us(collector), abs=0.5)
        parts_us = sum(host[part] for part in PARTS)
        assert parts_us >= 0.95 * run["residual"]["cpu_time_us"]
        assert parts_us == pytest.approx(run["residual"]["cpu_time_us"], rel=1e-6)


def test_self_times_of_each_thread_add_up_to_its_outermost_spans(profiled):
    trace = Trace.read(profiled[1])
    forest = trace.forest
    assert forest.num_overlaps == 0
    for thread in np.unique(forest.thread):
        mine = forest.thread == thread
        assert forest.self_ns[mine].sum() == forest.duration_ns[mine & (forest.parent < 0)].sum()
    assert trace.window_ns is not None  # the profiler's own root is known and no span
    assert not any(name.startswith("PyTorch Profiler") for name in trace.names)
