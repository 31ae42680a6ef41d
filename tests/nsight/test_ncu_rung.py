"""Rung 5 in the ladder, in a run and on the command line; and with a real `ncu` on a GPU."""

import dataclasses
import shutil
import textwrap
from types import SimpleNamespace

import pytest
from documents import printed
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.doctor.checks import check_ncu
from perfladder.errors import InputError
from perfladder.findings import Finding, rungs_to_skip
from perfladder.ladder import LAST_RUNG, RUNGS, climb, rung_named
from perfladder.nsight import api
from perfladder.nsight.preflight import Gpu, check_machine
from perfladder.profiling.shares import Share
from perfladder.report import build_report, render_markdown
from perfladder.rundir import RunDirectory, read_model
from perfladder.rungs import ncu
from perfladder.rungs.base import RungContext
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.tasks.metrics import metrics_of
from perfladder.trace.critical import Boundness
from perfladder.trace.kernels import KernelSummary

TARGET = """
    import torch
    from torch import nn

    class Pipe:
        def __init__(self):
            self.stage = nn.Linear(1024, 1024)

        def __call__(self):
            return [self.stage(torch.ones(256, 1024)) for _ in range(3)]

    def build():
        return Pipe()
"""
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, float*)"


@pytest.fixture
def kernels():
    """What rung 4 of a GPU says where one kernel has all the time."""

    def make(verdict="device", kind="kernels", name=ELEMENTWISE):
        row = KernelSummary(
            kernel=name,
            category="kernel",
            operator="aten::add",
            outer_operator="aten::add",
            function=None,
            region="r:stage",
            count=1,
            total_us=5.0,
            mean_us=5.0,
            share=1.0,
            example_event=0,
        )
        return KernelsResult(
            stage="stage",
            kind=kind,
            call_index=2,
            repeats=3,
            bound=Boundness(verdict=verdict, statement="-"),
            kernels=[row],
            by_kernel=[Share(name=name, total_us=5.0, share=1.0, count=1)],
        )

    return make


@pytest.fixture
def run(captured, tmp_path):
    """A run directory with a capture and a rung 4."""

    def make(*results):
        file, capture = captured
        made = RunDirectory.create(tmp_path / "runs", file.workload, source="test", base_dir=file.base_dir)
        shutil.copytree(capture, made.path / "3-capture")
        for result in (CaptureResult(stage="stage", folder="3-capture"), *results):
            rung = rung_named(result.rung)
            made.write_result(made.rung_folder(rung.number, rung.name), rung.name, result, result.status, result.reason)
        return made

    return make


@pytest.fixture
def context(captured, run, monkeypatch, preflight):
    """A rung's context after those rungs, on a machine with a GPU; it notes when the device is freed."""

    def make(*results):
        made = run(*results)
        folder = made.rung_folder(5, "ncu")
        known = {r.rung: r for r in (CaptureResult(stage="stage", folder="3-capture"), *results)}
        freed = []
        monkeypatch.setattr(ncu, "_gpu_of", lambda context: None)
        monkeypatch.setattr(ncu, "check_machine", lambda gpu: preflight())
        info = SimpleNamespace(device="cuda:0")
        found = RungContext(captured[0], info, None, None, known, folder, free_device=lambda: freed.append(True))
        return found, freed

    return make


def test_the_rung_is_optional_and_the_last_one():
    rung = rung_named("ncu")
    assert (rung.number, rung.is_optional, RUNGS[-1] is rung) == (5, True, True)
    assert LAST_RUNG == "kernels"


@pytest.mark.parametrize("kind", ["outside_dominates", "not_replayable", "replay_output_differs"])
def test_findings_that_make_kernels_needless_make_this_one_needless(kind):
    found = Finding(kind=kind, rung="r", claim="c", evidence=[], uncertainty="u", refuted_by="r", next_experiment="n")
    assert "ncu" in rungs_to_skip([found])


def test_the_kernel_with_the_open_question_is_profiled(context, kernels, install_ncu, streaming):
    install_ncu(streaming)
    made, freed = context(kernels())
    result = ncu.run(made)
    assert (result.status, result.verdict, freed) == ("done", "memory", [True])
    assert (result.kernel, result.call_index) == (ELEMENTWISE, 2)
    assert (made.folder / "kernel.ncu-rep").is_file()


def test_without_a_question_it_is_skipped_and_says_how_to_ask(context, kernels):
    result = ncu.run(context(kernels(verdict="host"))[0])
    assert result.status == "skipped"
    assert "perfladder ncu CAPTURE --kernel NAME" in result.reason


def test_it_needs_kernels_of_a_gpu(context, kernels):
    made, freed = context(kernels(kind="operators"))
    result = ncu.run(made)
    assert result.status == "not_applicable"
    assert "operators of a CPU" in result.reason
    assert ncu.run(dataclasses.replace(made, results={})).status == "not_applicable"
    assert freed == []


def test_in_a_run_it_becomes_rung_5_of_record_and_report(run, kernels, install_ncu, streaming, captured, monkeypatch):
    install_ncu(streaming)
    monkeypatch.setattr(api, "nvidia_gpu", lambda index: Gpu(name="NVIDIA H200", capability=(9, 0), uuid="test"))
    made = run(kernels())
    result = api.profile_capture(made.path / "3-capture", workload=captured[0])
    assert (result.kernel, result.verdict) == (ELEMENTWISE, "memory")
    again = RunDirectory.open(made.path)
    assert [entry.name for entry in again.record.rungs] == ["capture", "kernels", "ncu"]
    assert read_model(made.path / "5-ncu" / "ncu.json", NcuResult) == result
    report = build_report(made.path)
    assert report.artifacts["ncu report"] == "5-ncu/kernel.ncu-rep"
    assert report.ncu.verdict == "memory"
    text = render_markdown(report)
    assert "## Nsight Compute on `vectorized_elementwise_kernel`" in text
    assert "Memory limits it" in text


def test_metrics_are_utilization_and_never_a_duration(context, kernels, install_ncu, streaming):
    sections = {**streaming.sections, "Time": {"gpu__time_duration.sum": 9000.0}}
    install_ncu(dataclasses.replace(streaming, sections=sections))
    result = ncu.run(context(kernels())[0])
    assert "gpu__time_duration.sum" in {row.metric for row in result.values}
    metrics = metrics_of(result)
    assert metrics["launch/0/gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"] == 92.0
    assert not [name for name in metrics if "duration" in name and name != "duration_s"]


def test_outside_of_a_run_the_kernel_is_named_and_the_result_lies_beside(
    captured, copied, install_ncu, streaming, monkeypatch, tmp_path
):
    install_ncu(streaming)
    monkeypatch.setattr(api, "nvidia_gpu", lambda index: Gpu(name="NVIDIA H200", capability=(9, 0), uuid="test"))
    with pytest.raises(InputError, match="kernel: give its name"):
        api.profile_capture(copied, workload=captured[0])
    api.profile_capture(copied, factory="of_ncu.py:stage", kernel="vectorized_elementwise_kernel")
    result = read_model(tmp_path / "own-capture-ncu" / "ncu.json", NcuResult)
    assert result.command[-2:] == ["--factory", "of_ncu.py:stage"]
    api.profile_capture(copied, workload=captured[0], kernel="vectorized_elementwise_kernel", to=tmp_path / "there")
    assert (tmp_path / "there" / "kernel.ncu-rep").is_file()


def test_what_to_load_comes_from_the_user_and_must_be_what_was_captured(captured, copied, tmp_path):
    with pytest.raises(InputError, match="Give either the workload"):
        api.profile_capture(copied, kernel="k")
    file = captured[0]
    other = file._replace(workload=file.workload.model_copy(update={"target": "another.py:build"}))
    with pytest.raises(InputError, match=r"its target is another\.py:build"):
        api.profile_capture(copied, workload=other, kernel="k")
    with pytest.raises(InputError, match=r"its target is of_ncu\.py:build in "):
        api.profile_capture(copied, workload=file._replace(base_dir=tmp_path), kernel="k")


def test_the_command_ends_with_4_and_the_remedy_where_there_is_no_gpu(copied, monkeypatch):
    monkeypatch.setattr(api, "nvidia_gpu", lambda index: None)
    monkeypatch.setattr("perfladder.nsight.preflight.nvidia_gpu", lambda index: None)
    words = ["ncu", str(copied), "--factory", "of_ncu.py:stage", "--kernel", "gemm"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 4
    assert "not applicable: There is no NVIDIA GPU" in done.stdout
    document = printed("ncu", CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert document["preflight"]["obstacle"] == "no_nvidia_gpu"
    assert CliRunner().invoke(app, ["ncu", str(copied), "--kernel", "gemm"]).exit_code == 2


def test_doctor_tells_what_stands_in_the_way(preflight, install_ncu):
    install_ncu()
    assert check_ncu(preflight()).status == "ok"
    held = check_ncu(preflight().model_copy(update={"holders": ["nv-hostengine (pid 5)"]}))
    assert (held.status, "nv-hostengine (pid 5)" in held.detail) == ("warning", True)
    denied = check_ncu(preflight().stopped_by("no_permission", "Not you."))
    assert (denied.status, "NVreg_RestrictProfilingToAdminUsers" in denied.fix) == ("missing", True)


@pytest.mark.slow
def test_a_climb_to_it_on_a_cpu_is_done_without_it(write_target, tmp_path):
    file = write_target(tmp_path, TARGET, stages=["stage"])
    outcome = climb(file, runs_dir=tmp_path, until="ncu")
    assert (outcome.status, outcome.exit_code) == ("done", 0)
    entry = RunDirectory.open(tmp_path / "test" / outcome.run_dir.rpartition("/")[2]).record.rungs[-1]
    assert (entry.name, entry.status) == ("ncu", "not_applicable")


REAL = """
    import torch
    from torch import nn

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8192, 8192, dtype=torch.bfloat16), requires_grad=False)

        def forward(self, x, y):
            return x @ self.weight, y + 1.0

    class Pipe:
        def __init__(self, device):
            self.stage = Stage().to(device)

        def __call__(self):
            x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
            y = torch.randn(1 << 27, device="cuda")
            return self.stage(x, y)

    def build(device):
        return Pipe(device)
"""


@pytest.mark.gpu
def test_on_a_gpu_a_product_is_compute_and_an_addition_memory_limited(tmp_path):
    """Real ncu, as for a user: capture and kernels in a run, then both kernels of the stage."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(name=properties.name, capability=(properties.major, properties.minor))
    found = check_machine(gpu, holders=[])
    if found.obstacle is not None:
        pytest.skip(found.why_not)
    (tmp_path / "real.py").write_text(textwrap.dedent(REAL))
    workload = tmp_path / "real.yaml"
    workload.write_text("name: real\ntarget: real.py:build\ndevice: cuda\nmeasured_runs: 3\nstages: [stage]\n")
    outcome = climb(workload, runs_dir=tmp_path / "runs")
    assert outcome.exit_code == 0, outcome
    run = RunDirectory.open(tmp_path / "runs" / "real" / outcome.run_dir.rpartition("/")[2])
    seen = read_model(run.path / "4-kernels" / "kernels.json", KernelsResult)
    product = next(row.kernel for row in seen.kernels if row.family == "gemm")
    addition = next(row.kernel for row in seen.kernels if "elementwise" in row.kernel)
    for kernel, verdict in ((product, "compute"), (addition, "memory")):
        done = CliRunner().invoke(
            app, ["ncu", str(run.path / "3-capture"), "--workload", str(workload), "--kernel", kernel, "--json"]
        )
        assert done.exit_code == 0, done.output
        result = NcuResult.model_validate_json(done.stdout)
        assert result.status == "done", result.reason
        assert result.verdict == verdict, result.model_dump_json(include={"launches", "warnings"}, indent=1)
        assert result.launches[0].nvtx_ranges == ["replay_stage"]
        assert result.launches[0].is_asked_kernel is not False
        assert {row.unit for row in result.values if row.metric.endswith(".pct")} == {"%"}
    assert build_report(run.path).ncu.verdict == "memory"
