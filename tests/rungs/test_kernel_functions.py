"""Rung 4: kernels with their operator, named call and module."""

import threading
from dataclasses import dataclass

import pytest
import torch
from backgrounds import make_background
from torch import nn
from torch.nn import functional as F

from perfladder.errors import RungError
from perfladder.findings.kernels import kernels_findings
from perfladder.functional import window
from perfladder.rungs import capture
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.kernels import KernelsRequest, KernelsResult, measure, run


class Stage(nn.Module):
    """Functional and other calls, in a submodule and outside one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x):
        return F.softmax(self.inner(x) @ x.T, dim=-1)

    def decode(self, x):
        return torch.neg(self.inner(x))


@dataclass
class Pipe:
    stage: nn.Module

    def __call__(self):
        return self.stage(torch.ones(3, 4))


@dataclass
class MethodPipe:
    stage: nn.Module

    def __call__(self):
        return self.stage.decode(torch.ones(3, 4))


@pytest.fixture
def kernels(wrap, tmp_path):
    """Capture a stage and attribute its kernels, in this process."""

    def run(pipe, stage="stage", **fields) -> KernelsResult:
        loaded, folder = wrap(pipe, **fields), tmp_path / "capture"
        capture.measure(loaded, CaptureRequest(stage=stage, folder=str(folder), reference_runs=2))
        request = KernelsRequest(folder=str(folder), trace_path=str(tmp_path / "kernels.trace.json"), repeats=2)
        return measure(loaded, request)

    return run


def test_each_row_has_its_function(kernels, tmp_path):
    result = kernels(Pipe(Stage()))
    found = {(row.region, row.function) for row in result.kernels}
    assert found == {
        ("untuned_module:stage.inner.0", "linear"),
        ("untuned_module:stage.inner.1", "gelu"),
        ("untuned_module:stage", "Tensor.T"),
        ("untuned_module:stage", "Tensor.matmul"),
        ("untuned_module:stage", "softmax"),
    }
    assert {share.name for share in result.by_function} == {function for _, function in found}
    assert sum(share.share for share in result.by_function) == pytest.approx(1)
    assert result.attributed_share == pytest.approx(1)
    assert result.attributed_share_by_function == pytest.approx(1)
    assert (result.kind, result.warnings) == ("operators", [])
    assert result.artifacts == {"trace": "kernels.trace.json", "functions_trace": "functions.trace.json"}
    assert all((tmp_path / name).is_file() for name in result.artifacts.values())
    assert KernelsResult.model_validate_json(result.model_dump_json()) == result


def test_calls_are_marked_only_in_their_own_pass(kernels, tmp_path):
    kernels(Pipe(Stage()))
    assert "perfladder.function:linear" not in (tmp_path / "kernels.trace.json").read_text()
    assert "perfladder.function:linear" in (tmp_path / "functions.trace.json").read_text()


def test_method_is_a_region_of_its_own(kernels):
    result = kernels(MethodPipe(Stage()), "stage.decode")
    found = {(row.region, row.function) for row in result.kernels}
    assert ("untuned_module:stage.decode", "torch.neg") in found
    assert ("untuned_module:stage.inner.0", "linear") in found


def test_operator_without_a_call_counts_for_operators_only(kernels):
    class Hidden(Stage):
        def forward(self, x):
            with torch._C.DisableTorchFunction():
                return torch.neg(x)

    result = kernels(Pipe(Hidden()))
    assert [share.name for share in result.by_function] == ["(none)"]
    assert (result.attributed_share, result.attributed_share_by_function) == (pytest.approx(1), 0)


def test_worker_threads_are_recorded(kernels):
    class Threaded(Stage):
        def forward(self, x):
            worker = threading.Thread(target=self.inner, args=(x,))
            worker.start()
            worker.join()
            return x + 1

    found = {(row.region, row.function) for row in kernels(Pipe(Threaded())).kernels}
    assert ("untuned_module:stage.inner.1", "gelu") in found


def test_compiled_stage_is_one_named_region(kernels):
    result = kernels(Pipe(torch.compile(Stage(), backend="eager")))
    assert {row.region for row in result.kernels} == {"untuned_module:stage"}
    assert "compiled region stage: addmm" in {share.name for share in result.by_function}
    assert result.attributed_share_by_function == pytest.approx(1)


def test_runtime_of_a_compiled_stage_is_one_row_and_nothing_to_optimize(kernels):
    result = kernels(Pipe(torch.compile(Stage(), backend="aot_eager")))
    assert sum(share.share for share in result.by_operator) == pytest.approx(1)
    assert sum(row.total_us for row in result.kernels) == pytest.approx(result.total_us)
    runtime = next(share for share in result.by_operator if share.name == "TorchDynamo runtime")
    assert runtime.total_us > 0
    rows = [row for row in result.kernels if row.operator == "TorchDynamo runtime"]
    assert sum(row.total_us for row in rows) == pytest.approx(runtime.total_us)
    assert {row.kernel for row in rows} == {"TorchDynamo runtime"}
    assert {row.possible_win_us for row in rows} == {0}
    names = {share.name for share in result.by_operator} - {"TorchDynamo runtime"}
    assert all(name.startswith("aten::") for name in names)
    last = result.operator_ranking[-1]
    assert (last.operator, last.possible_win_us) == ("TorchDynamo runtime", 0)
    assert "no operator" in last.reason
    heaviest = result.model_copy(update={"by_operator": [runtime, *result.by_operator]})
    (finding, *_) = kernels_findings(heaviest, make_background())
    assert "TorchDynamo" not in finding.claim
    graph = result.by_operator[0].model_copy(update={"name": "## Call CompiledFxGraph fkledi4nz4udr ##"})
    (finding, *_) = kernels_findings(result.model_copy(update={"by_operator": [graph]}), make_background())
    assert finding.claim.startswith(f"In {result.stage}, the Inductor graph fkledi4n holds ")
    assert finding.next_experiment.startswith("What the Inductor graph fkledi4n runs is fused already")


def test_a_stage_without_modules_inside_has_no_heaviest_block(kernels):
    result = kernels(Pipe(Stage()))
    (finding, *_) = kernels_findings(result, make_background())
    assert "heaviest block" in finding.claim
    (block, *_) = result.by_position.by_block
    alone = result.by_position.model_copy(update={"by_block": [block.model_copy(update={"name": result.stage})]})
    (finding, *_) = kernels_findings(result.model_copy(update={"by_position": alone}), make_background())
    assert "heaviest block" not in finding.claim


def test_failed_marking_leaves_operators_and_a_warning(kernels, monkeypatch):
    def fail(*args, **kwargs):
        raise RungError("broken")

    monkeypatch.setattr(window, "record_marked", fail)
    result = kernels(Pipe(Stage()))
    assert [warning.code for warning in result.warnings] == ["FUNCTIONS_NOT_MARKED"]
    assert (result.by_function, result.attributed_share_by_function) == ([], None)
    assert result.attributed_share == pytest.approx(1)
    assert result.artifacts == {"trace": "kernels.trace.json"}


def test_nothing_to_replay_is_not_applicable():
    class Context:
        def result(self, kind):
            return None

    assert run(Context()).status == "not_applicable"


@pytest.mark.gpu
def test_device_kernels_have_their_function(kernels):
    stage = Stage().cuda()

    @dataclass
    class DevicePipe:
        stage: nn.Module

        def __call__(self):
            return self.stage(torch.ones(3, 4, device="cuda"))

    result = kernels(DevicePipe(stage), device="cuda")
    assert result.kind == "kernels"
    assert {row.function for row in result.kernels} >= {"linear", "gelu", "softmax"}
    assert result.attributed_share_by_function > 0.98
