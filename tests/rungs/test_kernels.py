"""Rung 4 in this process: what a profiled replay, its counted work and the device's peaks say together."""

import time

import pytest
import torch
from backgrounds import make_background
from torch import nn

from perfladder._torch_private import is_profiler_active
from perfladder.findings.kernels import kernels_findings
from perfladder.peaks import Peaks
from perfladder.report import build_report, render_markdown
from perfladder.report.model import _kernels
from perfladder.rundir import RunDirectory
from perfladder.rungs import capture, kernels
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.kernels import KernelsRequest, KernelsResult
from perfladder.workload import parse_workload

TOY = Peaks(device="toy", source="measured", compute_tflops={"float32": 10.0}, bandwidth_gb_per_s=1e4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Pipe:
    def __init__(self, stage, device="cpu"):
        self.stage, self.device = stage, device

    def __call__(self):
        return self.stage(torch.ones(16, 64, device=self.device))


@pytest.fixture
def measure(wrap, tmp_path, monkeypatch):
    """Capture the stage of a pipe and attribute its kernels; peaks are given unless a test asks for real ones."""
    monkeypatch.setattr(kernels, "find_peaks", lambda device, folder: TOY)

    def run(pipe, device="cpu", **request) -> KernelsResult:
        folder = str(tmp_path / "capture")
        capture.measure(wrap(pipe, device=device), CaptureRequest(stage="stage", folder=folder, reference_runs=1))
        options = {"folder": folder, "trace_path": str(tmp_path / "kernels.trace.json"), **request}
        return kernels.measure(wrap(pipe, device=device), KernelsRequest(**options))

    return run


def test_operators_of_a_cpu_have_work_families_and_a_possible_win(measure):
    result = measure(Pipe(Net()), unprofiled_ms=10.0, stage_share=0.5)
    rows = {(row.region_id, row.operator): row for row in result.roofline}
    first, second = (rows[f"untuned_module:stage.{name}", "aten::addmm"] for name in ("first", "second"))
    assert (first.flops, second.flops) == (2 * 16 * 64 * 128, 2 * 16 * 128 * 32)
    assert (first.count, first.family, first.precision) == (1, "gemm", "float32")
    assert result.flops == first.flops + second.flops
    assert first.num_bytes == 4 * (128 + 16 * 64 + 64 * 128 + 16 * 128)
    assert 0 < result.flops_known_share < result.work_known_share < 1
    assert result.peaks == TOY
    assert sum(row.total_us for row in result.families) == pytest.approx(result.total_us)
    assert sum(row.total_us for row in result.ranking) == pytest.approx(result.total_us)
    assert sum(row.share for row in result.ranking) == pytest.approx(1)
    assert len({group.operator for group in result.operator_ranking}) == len(result.operator_ranking)
    assert sum(row.total_us for row in result.operator_ranking) == pytest.approx(result.total_us)
    wins = [group.possible_win_us for group in result.ranking]
    assert wins == sorted(wins, reverse=True)
    assert sum(wins) == pytest.approx(sum(row.possible_win_us for row in result.kernels))
    for group in result.ranking:
        assert group.possible_win_frac == pytest.approx(group.possible_win_us / 10_000)
        assert group.run_win_frac == pytest.approx(group.possible_win_frac / 2)
    assert result.bound.verdict == "no_device"
    assert (result.copies, result.synchronizations) == ([], [])
    assert "WORK_NOT_COUNTED" not in {warning.code for warning in result.warnings}
    assert KernelsResult.model_validate_json(result.model_dump_json()) == result


def test_work_that_cannot_be_watched_costs_the_roofline_only(measure):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Shy(nn.Module):
        def forward(self, x):
            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("not while somebody watches")
            return x + 1

    result = measure(Pipe(Shy()))
    # A busy machine may add that the first run was slow.
    (warning,) = (warning for warning in result.warnings if warning.code == "WORK_NOT_COUNTED")
    assert "not while somebody watches" in warning.message
    assert (result.roofline, result.flops, result.work_known_share) == ([], None, 0)
    assert result.ranking
    assert all(group.achieved_frac is None for group in result.ranking)


def test_report_sorts_kernels_by_possible_win_and_shows_both(measure, tmp_path):
    result = measure(Pipe(Net()), unprofiled_ms=10.0, stage_share=0.5)
    view = _kernels(result)
    wins = [row.possible_win_us for row in view.kernels]
    assert wins == sorted(wins, reverse=True)
    run = RunDirectory.create(
        tmp_path / "runs", parse_workload({"name": "n", "target": "m:f"}), source="n", base_dir=tmp_path
    )
    run.write_result(run.rung_folder(4, "kernels"), "kernels", result, "done", None)
    text = render_markdown(build_report(run.path))
    for words in ("Where to begin, by possible win", "possible win us", "### Roofline", "| gemm |", "Peaks of toy"):
        assert words in text
    assert "at " in text
    assert "of the measured compute peak" in text


def test_finding_names_the_largest_possible_win(measure):
    result = measure(Pipe(Net()), unprofiled_ms=0.2, stage_share=0.5)
    found = kernels_findings(result, make_background())
    assert [finding.kind for finding in found[:2]] == ["dominant_kernels", "largest_possible_win"]
    first = next(group for group in result.operator_ranking if group.achieved_frac is not None)
    assert first.operator in found[1].claim
    assert "of the run" in found[1].claim
    assert {evidence.metric for evidence in found[1].evidence} >= {"possible_win_frac", "share"}


def test_no_such_finding_where_the_host_sets_the_pace_or_little_is_left(measure):
    result = measure(Pipe(Net()), unprofiled_ms=0.2)
    parse_workload({"name": "n", "target": "m:f"})
    host = result.model_copy(update={"bound": result.bound.model_copy(update={"verdict": "host"})})
    small = result.operator_ranking[0].model_copy(update={"possible_win_frac": 0.001})
    for other in (
        host,
        result.model_copy(update={"operator_ranking": [small]}),
        result.model_copy(update={"operator_ranking": []}),
    ):
        kinds = {finding.kind for finding in kernels_findings(other, make_background())}
        assert "dominant_kernels" in kinds
        assert "largest_possible_win" not in kinds


class Stalling(nn.Module):
    """Operators of its own, of which some sleep in chosen replays of the profiled ones: the first is a warm-up."""

    def __init__(self, **stalls):
        super().__init__()
        self.linear, self.num_profiled, self.stalls = nn.Linear(64, 16384), 0, stalls

    def forward(self, x):
        self.num_profiled += is_profiler_active()
        for name, turn in self.stalls.items():
            x = getattr(torch.ops.perfladder_toy, name)(x, self.num_profiled == 1 + turn)
        return self.linear(x)


@pytest.fixture(scope="module")
def stalling_operators():
    def step(x: torch.Tensor, is_stalled: bool) -> torch.Tensor:
        if is_stalled:
            time.sleep(0.1)
        return x.clone()

    library = torch.library.Library("perfladder_toy", "FRAGMENT")
    for name in ("one", "two", "three"):
        library.define(f"{name}(Tensor x, bool is_stalled) -> Tensor")
        library.impl(name, step, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("stalling_operators")
def test_a_stall_in_one_of_three_replays_carries_no_finding(measure):
    for _ in range(5):  # a busy machine may stall another operator too
        result = measure(Pipe(Stalling(one=2)), unprofiled_ms=10.0)
        first = result.by_operator[0]
        if first.name == "aten::linear" and len(kernels_findings(result, make_background())) > 1:
            break
    stalled = next(share for share in result.by_operator if share.name == "perfladder_toy::one")
    assert first.name == "aten::linear"
    assert stalled.repeat_us[1] > first.total_us
    assert max(stalled.repeat_us) == stalled.repeat_us[1] > stalled.total_us
    assert result.total_us < result.repeat_us[1]
    for rows in (result.by_operator, result.by_module, result.families, result.ranking, result.operator_ranking):
        assert sum(row.total_us for row in rows) == pytest.approx(result.total_us)
        assert sum(row.share for row in rows) == pytest.approx(1)
        assert [sum(us) for us in zip(*(row.repeat_us for row in rows), strict=True)] == pytest.approx(result.repeat_us)
    dominant, win, *_ = kernels_findings(result, make_background())
    assert (dominant.kind, win.kind) == ("dominant_kernels", "largest_possible_win")
    rest_us = result.total_us - first.total_us
    times = (first.total_us, *first.repeat_us)
    low, high = (us / (us + rest_us) for us in (min(times), max(times)))
    assert f"aten::linear: {low:.0%} to {high:.0%} by its times in 3 profiled replays" in dominant.uncertainty
    assert "of a call by its times in 3 profiled replays" in win.uncertainty
    assert "REPLAYS_DISAGREE" not in {warning.code for warning in result.warnings}


@pytest.mark.usefixtures("stalling_operators")
def test_no_operator_is_named_where_each_replay_has_another_first(measure):
    result = measure(Pipe(Stalling(one=1, two=2, three=3)))
    (warning,) = (warning for warning in result.warnings if warning.code == "REPLAYS_DISAGREE")
    assert "(perfladder_toy::one, perfladder_toy::two, perfladder_toy::three)" in warning.message
    assert "dominant_kernels" not in {finding.kind for finding in kernels_findings(result, make_background())}


@pytest.mark.gpu
def test_kernels_of_a_gpu_have_families_launches_and_a_place_under_the_roof(measure, tmp_path, monkeypatch):
    from perfladder.peaks import find_peaks

    monkeypatch.setattr(kernels, "find_peaks", find_peaks)

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 64)

        def forward(self, x):
            y = self.linear(self.conv(x.expand(64, 64, 64).unsqueeze(0)).flatten(2).transpose(1, 2))
            float(y.sum())
            return nn.functional.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])

    class Input(Pipe):
        def __call__(self):
            return self.stage(torch.ones(64, 1, 64, device=self.device))

    stage = Large().cuda().eval()
    result = measure(Input(stage, "cuda"), "cuda", unprofiled_ms=1.0, cache_folder=str(tmp_path / "cache"))
    families = {row.family: row for row in result.families}
    assert {"gemm", "convolution", "attention", "reduction"} <= set(families)
    assert all(row.mean_launch_latency_us > 0 for row in result.families)
    rows = {row.operator: row for row in result.roofline}
    assert rows["aten::convolution"].flops == 2 * 64 * 64 * 64 * 64 * 9
    assert 0 < rows["aten::convolution"].compute_frac < 1.2
    assert result.flops_known_share > 0.5
    assert result.bound.verdict in ("host", "device", "mixed")
    assert [site.outer_operator for site in result.synchronizations] == ["aten::item"]
    assert [(site.kind, site.num_bytes) for site in result.copies] == [("DtoH", 4)]
    assert result.peaks.source == "measured"
    assert list((tmp_path / "cache").iterdir())
