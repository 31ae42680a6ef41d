"""`perfladder attribute`: any trace file, by the command line and as a function."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from documents import printed
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.errors import TraceError
from perfladder.profiling.attribute import analyse_traces

RUNNER = CliRunner()
CUDA = Path(__file__).parents[1] / "data" / "cuda"


def rank_trace(folder, rank, *, num_ranks=2, header=True):
    """A step of 100 us: a kernel of 30 us, a collective of 40 us beside a copy, and a wait. Times are microseconds."""

    def event(cat, name, start, duration, *, device=False, stream=7, **args):
        place = {"pid": 0, "tid": stream} if device else {"pid": 10 + rank, "tid": 1}
        more = {"device": 0, "stream": stream} if device else {}
        return {"ph": "X", "cat": cat, "name": name, "ts": start + 0.001, "dur": duration, "args": args | more} | place

    events = [
        event("user_annotation", "ProfilerStep#3", 0, 100),
        event("user_annotation", "my step", 5, 90),
        event("cpu_op", "aten::mm", 10, 10),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 25, 2, correlation=2),
        event("cuda_runtime", "cudaStreamSynchronize", 60, 30),
        event("kernel", "gemm", 20, 30, device=True, correlation=1),
        event("kernel", "ncclDevKernel_AllReduce", 40, 40, device=True, stream=8, correlation=2),
        event("gpu_user_annotation", "my step", 20, 60, device=True),
    ]
    document = {"traceEvents": events}
    if header:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": num_ranks}
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def test_one_trace_tells_kernels_annotations_idle_streams_and_overlap(tmp_path):
    found = analyse_traces([rank_trace(tmp_path, 0, num_ranks=1)]).traces[0]
    assert [(row.kernel, row.total_us) for row in found.kernels] == [("ncclDevKernel_AllReduce", 40), ("gemm", 30)]
    assert found.kernels[1].operator == "aten::mm"
    assert {(row.key, row.device_type, row.count) for row in found.annotations} == {
        ("ProfilerStep*", "CPU", 1),
        ("my step", "CPU", 1),
        ("my step", found.device_types[-1], 1),
    }
    assert found.idle.busy_us == pytest.approx(60)
    assert found.idle.idle_us == pytest.approx(40)
    parts = found.idle.waiting_for_launch_us + found.idle.in_synchronization_us + found.idle.other_us
    assert parts == pytest.approx(found.idle.idle_us)
    assert found.idle.in_synchronization_us == pytest.approx(10)
    assert [(row.stream, row.busy_us) for row in found.timeline.streams] == [(7, 30), (8, 40)]
    assert found.timeline.overlap.overlap_us == pytest.approx(10)
    assert found.warnings == []


def test_steps_and_annotations_of_a_foreign_trace_are_its_runs_and_regions(tmp_path):
    run = analyse_traces([rank_trace(tmp_path, 0, num_ranks=1)]).traces[0].regions.runs[0]
    assert run.run_index == 3
    assert [(row.name, row.cpu_time_us, row.device_time_us) for row in run.regions] == [("my step", 90, 70)]
    assert run.residual.cpu_time_us == pytest.approx(10)


def test_several_ranks_are_told_apart_and_the_missing_ones_named(tmp_path):
    paths = [rank_trace(tmp_path, rank, num_ranks=4) for rank in (2, 0)]
    analyses = analyse_traces(paths)
    assert [found.rank for found in analyses.traces] == [0, 2]
    assert [w.code for w in analyses.warnings] == ["MISSING_RANKS"]
    assert "[1, 3]" in analyses.warnings[0].message
    text = analyses.markdown()
    assert "# 2 traces" in text
    assert "MISSING_RANKS" in text


def test_ranks_that_are_twice_there_or_unknown_are_told(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [rank_trace(tmp_path, 0), rank_trace(tmp_path / "other", 0), rank_trace(tmp_path, 7, header=False)]
    assert [w.code for w in analyse_traces(paths).warnings] == ["MISSING_RANKS", "DUPLICATED_RANKS", "UNKNOWN_RANKS"]


def test_our_own_trace_shows_runs_and_regions(pipe, x, profile, tmp_path):
    profile(pipe, x, trace_file=tmp_path / "trace.json.gz")
    analyses = analyse_traces([tmp_path / "trace.json.gz"])
    runs = analyses.traces[0].regions.runs
    assert [row.region_id for row in runs[0].regions] == ["untuned_module:unet", "untuned_module:vae.decode"]
    assert analyses.traces[0].is_host_only
    assert "_(residual)_" in analyses.markdown()


def test_anyones_trace_on_the_command_line(tmp_path):
    path = tmp_path / "plain.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function("mine"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.export_chrome_trace(str(path))
    compressed = tmp_path / "plain.json.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, compressed):
        result = RUNNER.invoke(app, ["attribute", str(file)])
        assert result.exit_code == 0
        assert "`aten::mm`" in result.stdout
        assert "`mine`" in result.stdout


def test_json_is_one_document(tmp_path):
    paths = [str(rank_trace(tmp_path, rank)) for rank in (0, 1)]
    result = RUNNER.invoke(app, ["attribute", *paths, "--json", "--limit", "1"])
    document = printed("attribute", result.stdout)
    assert document["schema_version"] == 1
    assert [len(found["kernels"]) for found in document["traces"]] == [1, 1]
    assert document["warnings"] == []


@pytest.mark.parametrize("content", [None, "", "{}", "not json", '{"traceEvents": []}'])
def test_what_is_no_trace_ends_with_one_message(content, tmp_path):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    result = RUNNER.invoke(app, ["attribute", str(path)])
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert "Traceback" not in result.output
    with pytest.raises(TraceError):
        analyse_traces([path])


def rocm_trace(folder):
    """A trace with the names that ROCm's tracer writes."""
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.001, "dur": 30, "pid": 5, "tid": 5},
        {"cat": "cuda_runtime", "name": "hipLaunchKernel", "ts": 5.001, "dur": 5, "pid": 5, "tid": 5},
        {"cat": "cuda_runtime", "name": "hipMemcpyWithStream", "ts": 40.001, "dur": 20, "pid": 5, "tid": 5},
        {"cat": "cuda_runtime", "name": "hipDeviceSynchronize", "ts": 70.001, "dur": 10, "pid": 5, "tid": 5},
        {"cat": "kernel", "name": "Cijk_Ailk_Bljk_SB", "ts": 20.001, "dur": 15, "pid": 2, "tid": 0},
        {"cat": "gpu_memcpy", "name": "CopyDeviceToHost", "ts": 50.001, "dur": 8, "pid": 2, "tid": 0},
        {"cat": "kernel", "name": "rcclGenericKernel", "ts": 60.001, "dur": 4, "pid": 2, "tid": 1},
    ]
    ids = {"hipLaunchKernel": 1, "Cijk_Ailk_Bljk_SB": 1, "hipMemcpyWithStream": 2, "CopyDeviceToHost": 2}
    for event in events:
        place = {"device": 2, "stream": event["tid"]} if event["pid"] == 2 else {}
        event |= {"ph": "X", "args": {"correlation": ids.get(event["name"], 0)} | place}
    path = folder / "rocm.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_rocm_names_are_understood(tmp_path):
    found = analyse_traces([rocm_trace(tmp_path)]).traces[0]
    assert [(row.kernel, row.total_us, row.operator) for row in found.kernels] == [
        ("Cijk_Ailk_Bljk_SB", 15, "aten::mm"),
        ("CopyDeviceToHost", 8, None),
        ("rcclGenericKernel", 4, None),
    ]
    assert [(row.kind, row.total_us) for row in found.timeline.copies] == [("DtoH", 8)]
    assert found.timeline.overlap.communication_us == 4
    assert [(row.device, row.stream) for row in found.timeline.streams] == [(2, 0), (2, 1)]
    assert {warning.code for warning in found.warnings} == {"UNLINKED_DEVICE_EVENTS"}


def test_a_cut_cuda_trace_is_partial_and_says_so(tmp_path):
    text = gzip.decompress((CUDA / "eager.json.gz").read_bytes())
    path = tmp_path / "cut.json"
    path.write_bytes(text[: len(text) // 2])
    result = RUNNER.invoke(app, ["attribute", str(path)])
    assert result.exit_code == 0
    assert "TRUNCATED_FILE" in result.stdout
    assert "Traceback" not in result.output


@pytest.mark.parametrize("scene", sorted(path.name.split(".")[0] for path in CUDA.glob("*.json.gz")))
def test_real_cuda_traces_are_readable(scene):
    result = RUNNER.invoke(app, ["attribute", str(CUDA / f"{scene}.json.gz")])
    assert result.exit_code == 0
    assert "NVIDIA H200" in result.stdout
    assert ("UNTRUSTED_GRAPH_TIMES" in result.stdout) == (scene == "graph")
    assert "perfladder.profiled_run" not in result.stdout


def test_folders_and_binaries_end_with_one_message(tmp_path):
    binary = tmp_path / "model.bin"
    binary.write_bytes(bytes(range(256)) * 64)
    for path in (tmp_path, binary):
        result = RUNNER.invoke(app, ["attribute", str(path)])
        assert result.exit_code == 2
        assert "as a trace" in result.stderr or "is no trace" in result.stderr
        assert "Traceback" not in result.output
