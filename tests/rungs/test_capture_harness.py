import itertools
import json
import time

import pytest
import torch
from backgrounds import make_background
from staged import Linear, Pipe
from torch import nn

from perfladder.capturing.plain_calls import PlainCall, plain_call
from perfladder.capturing.store import read_manifest
from perfladder.errors import CaptureError, InputError, RungError, WorkloadError
from perfladder.findings.harness import harness_findings
from perfladder.instrument import Site
from perfladder.rungs import capture, harness
from perfladder.rungs.capture import CaptureRequest, CaptureResult
from perfladder.rungs.harness import HarnessRequest, HarnessResult
from perfladder.rungs.stages import Call, StagesResult
from perfladder.timing import timer


@pytest.fixture
def capture_stage(wrap, tmp_path):
    def run(pipe, stage="stage", **request) -> CaptureResult:
        request = {"stage": stage, "folder": str(tmp_path / "capture"), "reference_runs": 2, **request}
        return capture.measure(wrap(pipe), CaptureRequest(**request))

    return run


@pytest.fixture
def replay(wrap, tmp_path):
    def run(pipe, **request) -> HarnessResult:
        return harness.measure(wrap(pipe), HarnessRequest(folder=str(tmp_path / "capture"), repeats=2, **request))

    return run


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.rand(3)


def test_pure_module_replays_exactly(capture_stage, replay):
    captured = capture_stage(Pipe(Linear()))
    assert captured.status == "done"
    assert (captured.calls_per_run, captured.captured_calls) == (4, [0, 2, 3])
    assert captured.mutated_inputs == []
    assert captured.input_signature == {"args.0": "float32 [2, 3] on cpu"}
    result = replay(Pipe(Linear()))
    assert (result.parity, [call.index for call in result.calls]) == ("exact", [0, 2, 3])
    assert not any(call.second_replay_differs for call in result.calls)
    assert not any("output" in reason for reason in result.unfaithful_because)
    assert result.signature == {"output": "float32 [2, 3]"}
    assert [len(call.replayed_ms.values) for call in result.calls] == [2, 2, 2]
    assert HarnessResult.model_validate_json(result.model_dump_json()) == result


def with_times(folder, in_pipeline_ms):
    """The capture as if its calls had taken so long in the pipeline."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for call in manifest["calls"]:
        call["in_pipeline_ms"] = in_pipeline_ms
    file.write_text(json.dumps(manifest))


def test_change_of_the_machines_speed_leaves_the_time_undecided_and_is_said(capture_stage, wrap, tmp_path, monkeypatch):
    capture_stage(Pipe(Linear()))
    with_times(tmp_path / "capture", [1.0] * 5)
    # Three calls: warm-up rounds, then 12 rounds of each kind, of which the last are half as fast.
    clock = iter([1.0] * 9 + [1.0] * 40 + [2.0] * 1000)
    monkeypatch.setattr("perfladder.capturing.replay.time_ms", lambda call, device, lead_ms: next(clock))
    result = harness.measure(wrap(Pipe(Linear())), HarnessRequest(folder=str(tmp_path / "capture"), repeats=12))
    assert (result.parity, result.is_timing_faithful, result.is_faithful) == ("exact", None, None)
    assert result.unfaithful_because == []
    (warning,) = (warning for warning in result.warnings if warning.code == "REPLAY_SPEED_CHANGED")
    (finding,) = harness_findings(result, make_background())
    assert finding.kind == "replay_timing_undecided"
    assert warning.message in finding.claim
    assert HarnessResult.model_validate_json(result.model_dump_json()) == result


def test_of_calls_of_microseconds_no_time_is_judged(capture_stage, wrap, tmp_path):
    capture_stage(Pipe(Linear()))
    with_times(tmp_path / "capture", [0.02] * 5)
    result = harness.measure(wrap(Pipe(Linear())), HarnessRequest(folder=str(tmp_path / "capture"), repeats=2))
    (warning,) = (one for one in result.warnings if one.code == "REPLAY_CALLS_TOO_SHORT")
    assert (result.parity, result.is_faithful) == ("exact", None)
    (finding,) = harness_findings(result, make_background())
    assert (finding.kind, warning.message in finding.claim) == ("replay_timing_undecided", True)


def test_a_capture_without_the_pipelines_times_is_damaged(capture_stage, replay, tmp_path):
    capture_stage(Pipe(Linear()))
    file = tmp_path / "capture" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["calls"][1]["in_pipeline_ms"] = []
    file.write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match=r"damaged: calls\[\].in_pipeline_ms of call 2 is empty"):
        replay(Pipe(Linear()))


def test_other_weights_in_the_replay_are_found(capture_stage, replay):
    capture_stage(Pipe(Linear()))
    other = Linear()
    nn.init.zeros_(other.inner.weight)
    result = replay(Pipe(other))
    assert result.parity == "different"
    assert result.is_faithful is False
    assert "call 0: output largest error" in result.unfaithful_because[0]
    assert HarnessResult.model_validate_json(result.model_dump_json()) == result


def test_small_error_is_within_tolerance(capture_stage, replay):
    capture_stage(Pipe(Linear(), calls=1))
    other = Linear()
    other.inner.bias.data.mul_(1 + 1e-6)
    result = replay(Pipe(other, calls=1))
    assert result.parity == "within_tolerance"
    assert 0 < result.calls[0].parity.max_rel_error < 1e-5


def test_nan_on_one_side_only_is_different_and_can_be_read_back(capture_stage, replay):
    capture_stage(Pipe(Linear()))
    other = Linear()
    other.inner.bias.data[0] = float("nan")
    result = replay(Pipe(other))
    assert result.parity == "different"
    assert HarnessResult.model_validate_json(result.model_dump_json()) == result


def test_dropout_in_training_mode_replays_exactly(capture_stage, replay):
    def build():
        return Pipe(nn.Dropout(0.5).train())

    assert capture_stage(build()).status == "done"
    pipe = build()
    pipe.stage.eval()
    assert replay(pipe).parity == "exact"
    assert pipe.stage.training is False, "the flag is put back"


def test_random_numbers_of_python_and_numpy_are_restored(capture_stage, replay):
    class Noise(nn.Module):
        def forward(self, x):
            import random

            import numpy as np

            return x + random.random() + np.random.rand() + np.random.randn()

    capture_stage(Pipe(Noise()))
    assert replay(Pipe(Noise())).parity == "exact"


def test_generator_that_is_passed_in_starts_where_it_was(capture_stage, replay):
    class Noise(nn.Module):
        def forward(self, x, generator):
            return x + torch.randn(x.shape, generator=generator)

    class WithGenerator(Pipe):
        def __call__(self):
            self.generator = torch.Generator().manual_seed(5)
            return super().__call__()

        def use(self, x, index):
            return self.stage(x, generator=self.generator)

    captured = capture_stage(WithGenerator(Noise()))
    assert captured.mutated_inputs == ["kwargs.generator"], "the stage moved it on"
    assert replay(WithGenerator(Noise())).parity == "exact"


def test_input_that_the_stage_changes_is_named_and_restored(capture_stage, replay):
    class InPlace(nn.Module):
        def forward(self, x, cache=None):
            cache.append(x.sum())
            return x.mul_(2) + len(cache)

    class WithCache(Pipe):
        def __call__(self):
            self.cache = []
            return super().__call__()

        def use(self, x, index):
            return self.stage(x, cache=self.cache)

    captured = capture_stage(WithCache(InPlace()))
    assert {"args.0", "kwargs.cache.0"} <= set(captured.mutated_inputs)
    result = replay(WithCache(InPlace()))
    assert result.parity == "exact"
    assert not any(call.second_replay_differs for call in result.calls)


class Scheduler:
    """A plain object whose every step depends on the steps before it."""

    def __init__(self):
        self.step_index, self.history, self.sigmas = 0, [], torch.linspace(1, 0, 5)

    def step(self, x):
        self.history.append(x)
        self.step_index += 1
        return x + self.sigmas[self.step_index] * len(self.history)


def test_counters_of_a_plain_object_are_restored(capture_stage, replay):
    class WithScheduler(Pipe):
        def __call__(self):
            self.stage.__init__()
            return super().__call__()

        def use(self, x, index):
            return self.stage.step(x)

    captured = capture_stage(WithScheduler(Scheduler()), stage="stage.step")
    assert captured.status == "done"
    result = replay(WithScheduler(Scheduler()))
    assert result.parity == "exact"
    assert not any(call.second_replay_differs for call in result.calls)


def test_hidden_state_is_said(capture_stage, replay):
    count = itertools.count()

    class Hidden(nn.Module):
        def forward(self, x):
            return x + next(count)

    capture_stage(Pipe(Hidden()))
    result = replay(Pipe(Hidden()))
    assert result.is_faithful is False
    assert any("keeps state that was not captured" in reason for reason in result.unfaithful_because)


def test_stage_that_streams_is_not_applicable(capture_stage):
    class Streamer(nn.Module):
        def forward(self, x):
            yield x

    class Consumer(Pipe):
        def use(self, x, index):
            return next(iter(self.stage(x)))

    captured = capture_stage(Consumer(Streamer()))
    assert captured.status == "not_applicable"
    assert "streams its output" in str(captured.reason)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "kwargs.cache.inner: a builtins.object cannot be stored"),
        (Call, "cannot be stored"),
    ],
)
def test_opaque_input_is_not_applicable_and_named_by_its_path(capture_stage, tmp_path, value, reason):
    class Opaque(nn.Module):
        def forward(self, x, cache):
            return x

    class WithCache(Pipe):
        def use(self, x, index):
            return self.stage(x, cache={"inner": value})

    captured = capture_stage(WithCache(Opaque()))
    assert captured.status == "not_applicable"
    assert reason in str(captured.reason)
    assert not (tmp_path / "capture").exists()


def test_input_of_a_class_that_cannot_be_rebuilt_is_not_applicable(capture_stage):
    from dataclasses import dataclass

    @dataclass
    class Batch:
        x: torch.Tensor

    class Unpack(nn.Module):
        def forward(self, batch):
            return batch.x

    class WithBatch(Pipe):
        def use(self, x, index):
            return self.stage(Batch(x))

    captured = capture_stage(WithBatch(Unpack()))
    assert captured.status == "not_applicable"
    assert "args.0: a " in str(captured.reason)
    assert "no class that a capture may rebuild" in str(captured.reason)


def test_stage_that_cannot_be_observed_is_not_applicable(capture_stage):
    class Slotted:
        __slots__ = ()

        def step(self, x):
            return x

    class WithSlotted(Pipe):
        def use(self, x, index):
            return self.stage.step(x)

    captured = capture_stage(WithSlotted(Slotted()), stage="stage.step")
    assert captured.status == "not_applicable"
    assert "slots" in str(captured.reason)


def test_output_that_cannot_be_stored_does_not_stop_the_capture(capture_stage, replay):
    class Odd(nn.Module):
        def forward(self, x):
            return {"x": x, "odd": object()}

    class Unpack(Pipe):
        def use(self, x, index):
            return self.stage(x)["x"]

    captured = capture_stage(Unpack(Odd()))
    assert captured.status == "done"
    assert "output.odd" in captured.not_stored
    assert replay(Unpack(Odd())).parity == "exact"


def test_stage_that_is_never_called_fails_the_rung(capture_stage):
    pipe = Pipe(Linear())
    pipe.unused = Linear()
    with pytest.raises(RungError, match="'unused' was not called"):
        capture_stage(pipe, stage="unused")


def test_stage_that_does_not_exist_is_wrong_input(capture_stage):
    with pytest.raises(InputError, match="Did you mean 'stage'"):
        capture_stage(Pipe(Linear()), stage="stag")


def test_budget_drops_later_calls_and_says_so(capture_stage):
    # A call has some 6 KiB, nearly all of them the states of the generators.
    captured = capture_stage(Pipe(Drawing()), max_bytes=16_000)
    assert captured.captured_calls == [0]
    assert captured.max_bytes == 16_000
    assert captured.num_bytes > 0
    assert [w.code for w in captured.warnings] == ["CAPTURE_BUDGET_REACHED"]


def test_call_that_alone_is_over_the_budget_is_not_applicable(capture_stage, tmp_path):
    captured = capture_stage(Pipe(Linear()), max_bytes=100)
    assert captured.status == "not_applicable"
    assert "one call alone needs more than the limit of 100 bytes" in captured.reason
    assert not (tmp_path / "capture").exists()


def test_grad_mode_and_autocast_of_the_call_are_restored(capture_stage, replay):
    seen = []

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
            return self.inner(x.float())

    class Modes(Pipe):
        def use(self, x, index):
            with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                return self.stage(x)

    torch.manual_seed(0)
    pipe = Modes(Look())
    capture_stage(pipe)
    seen.clear()
    assert replay(pipe).parity == "exact"
    assert set(seen) == {(True, False, True)}


def test_inference_mode_of_the_call_is_restored(capture_stage, replay):
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(torch.is_inference_mode_enabled())
            return x + 1

    class Inference(Pipe):
        @torch.inference_mode()
        def __call__(self):
            return super().__call__()

    pipe = Inference(Look())
    capture_stage(pipe)
    seen.clear()
    assert replay(pipe).parity == "exact"
    assert set(seen) == {True}


def test_another_class_at_the_path_is_refused(capture_stage, replay):
    capture_stage(Pipe(Linear()))
    with pytest.raises(CaptureError, match=r"was captured from a .*Linear, but 'stage' is a .*Dropout here"):
        replay(Pipe(nn.Dropout()))


def test_stage_that_raises_when_replayed_is_the_workloads_failure(capture_stage, replay):
    capture_stage(Pipe(Linear()))
    broken = Linear()
    broken.inner = nn.Linear(5, 5)
    with pytest.raises(WorkloadError, match="Replaying stage raised"):
        replay(Pipe(broken))


def test_in_pipeline_times_of_every_captured_call_are_kept(capture_stage, tmp_path):
    capture_stage(Pipe(Linear()), reference_runs=3)
    manifest = read_manifest(tmp_path / "capture")
    assert [len(call.in_pipeline_ms) for call in manifest.calls] == [3, 3, 3]
    assert [call.host_lead_ms for call in manifest.calls] == [[], [], []], "a CPU is its own host"
    assert len(manifest.yardstick_ms) == 3
    assert manifest.stage == "stage"


@pytest.mark.parametrize(("run_ms", "count"), [(0.0, 20), (150.0, 20), (250.0, 12), (600.0, 5), (60_000.0, 5)])
def test_the_reference_has_as_many_runs_as_fit(run_ms, count):
    assert capture._reference_runs_in(run_ms) == count


@pytest.mark.parametrize(
    ("durations_ms", "num_left"),
    [
        pytest.param([8.0, 6.0, 5.0, *[4.0, 4.1] * 5], 10, id="slow-at-the-begin"),
        pytest.param([4.0, 4.1] * 5, 10, id="steady"),
        pytest.param([8.0, 6.0, 4.0, 4.0, 4.0], 5, id="too-few-to-tell"),
        pytest.param([0.0] * 12, 12, id="no-time-at-all"),
    ],
)
def test_runs_of_the_reference_that_are_still_slower_do_not_count(durations_ms, num_left):
    runs = [[PlainCall(ms / 2, None), PlainCall(ms / 2, None)] for ms in durations_ms]
    steady = capture._Reference(runs, list(range(len(runs)))).steady()
    assert steady.runs == runs[-num_left:]
    assert steady.yardstick_ms == list(range(len(runs)))[-num_left:]


def test_where_nobody_says_how_often_the_reference_is_as_long_as_time_allows(wrap, tmp_path):
    capture.measure(wrap(Pipe(Linear())), CaptureRequest(stage="stage", folder=str(tmp_path / "capture")))
    manifest = read_manifest(tmp_path / "capture")
    counts = {len(call.in_pipeline_ms) for call in manifest.calls} | {len(manifest.yardstick_ms)}
    assert len(counts) == 1
    assert 10 <= counts.pop() <= 20


@pytest.mark.parametrize(
    ("device_start_ms", "host_ms", "lead_ms"),
    [
        pytest.param(7.0, 4.0, 2.0, id="ahead"),
        pytest.param(7.0, 1.5, 1.5, id="further-ahead-than-the-call-keeps-the-host"),
        pytest.param(5.01, 4.0, 0.0, id="less-than-the-clocks-can-tell"),
        pytest.param(4.9, 4.0, 0.0, id="behind"),
    ],
)
def test_how_far_the_host_is_ahead_is_told_by_the_devices_clock(device_start_ms, host_ms, lead_ms):
    """The host makes the call 5 ms after the run's start."""
    start_ns = 5_000_000
    call = timer.Call(Site("stage", object()), start_ns, False, None, end_ns=start_ns + int(host_ms * 1e6))
    call.events = (object(), object())
    call.device_start_ms, call.device_end_ms = device_start_ms, device_start_ms + 3
    found = plain_call(timer.RunTiming(0, 20_000_000, [call]), call)
    assert (found.duration_ms, found.host_lead_ms) == (pytest.approx(3), pytest.approx(lead_ms))


class LongLaunch(nn.Module):
    """Keeps its host, and then has a little work for the device."""

    host_s = 0.03

    def forward(self, x):
        time.sleep(self.host_s)
        return x + 1


class Ahead:
    """Lets the host run ahead of the device before its stage is called, or not."""

    def __init__(self, is_ahead):
        self.stage, self.is_ahead = LongLaunch(), is_ahead
        self.x = torch.ones(4, device="cuda")

    def __call__(self):
        if self.is_ahead:
            torch.cuda._sleep(400_000_000)
        return self.stage(self.x)


@pytest.mark.gpu
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_replays_host_is_as_far_ahead_as_the_pipelines(wrap, tmp_path, is_ahead):
    folder, loaded = str(tmp_path / "capture"), wrap(Ahead(is_ahead), device="cuda")
    capture.measure(loaded, CaptureRequest(stage="stage", folder=folder))
    result = harness.measure(loaded, HarnessRequest(folder=folder))
    (call,) = result.calls
    hidden_ms = LongLaunch.host_s * 1e3
    for samples in (call.in_pipeline_ms, call.replayed_ms):
        assert (samples.summary.p50 < hidden_ms / 2) == is_ahead
    assert (call.host_lead_ms >= hidden_ms) == is_ahead
    assert (call.host_lead_ms == 0) != is_ahead


# The rungs in the ladder


def context(results, make_workload, tmp_path, broad=None, replayer=None):
    from perfladder.rungs.base import RungContext
    from perfladder.workload import WorkloadFile

    return RungContext(
        file=WorkloadFile(make_workload(), tmp_path),
        info=None,  # type: ignore[arg-type]
        broad=broad,  # type: ignore[arg-type]
        replay=replayer,  # type: ignore[arg-type]
        results=results,
        folder=tmp_path,
    )


def test_without_a_dominating_stage_there_is_nothing_to_capture(make_workload, tmp_path):
    for results in ({}, {"stages": StagesResult(dominating=None)}, {"stages": StagesResult(status="failed")}):
        assert capture.run(context(results, make_workload, tmp_path)).status == "not_applicable"


def test_without_a_capture_the_reason_is_handed_on(make_workload, tmp_path):
    captured = CaptureResult(status="not_applicable", reason="It streams.")
    result = harness.run(context({"capture": captured}, make_workload, tmp_path))
    assert (result.status, result.reason) == ("not_applicable", "It streams.")
    assert harness.run(context({}, make_workload, tmp_path)).status == "not_applicable"


def test_capture_runs_beside_the_target_and_replay_in_the_other_session(make_workload, tmp_path, wrap):
    from perfladder.session import LocalSession

    broad, replayer = LocalSession(wrap(Pipe(Linear()))), LocalSession(wrap(Pipe(Linear())))
    results: dict = {"stages": StagesResult(dominating="stage")}
    results["capture"] = capture.run(context(results, make_workload, tmp_path, broad, replayer))
    assert results["capture"].status == "done"
    result = harness.run(
        context(results, make_workload, tmp_path, broad, replayer), HarnessRequest(folder=str(tmp_path), repeats=2)
    )
    assert result.parity == "exact"


# Real schedulers


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler", "EulerAncestralDiscreteScheduler"]
)
def test_diffusers_scheduler_step_replays_exactly(capture_stage, replay, name):
    diffusers = pytest.importorskip("diffusers")

    class Sampler:
        def __init__(self):
            self.scheduler = getattr(diffusers, name)()

        def __call__(self):
            self.scheduler.set_timesteps(4)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(1, 2, 4, 4, generator=generator)
            for t in self.scheduler.timesteps:
                x = self.scheduler.step(torch.tanh(x), t, self.scheduler.scale_model_input(x, t)).prev_sample
            return x

    captured = capture_stage(Sampler(), stage="scheduler.step")
    assert (captured.status, captured.calls_per_run) == ("done", 4)
    result = replay(Sampler())
    assert result.parity == "exact"
    assert not any(call.second_replay_differs for call in result.calls)


def test_output_class_of_a_library_is_rebuilt_as_an_input(capture_stage, replay):
    outputs = pytest.importorskip("diffusers.utils").BaseOutput
    from dataclasses import make_dataclass

    made = make_dataclass("Latents", [("sample", torch.Tensor)], bases=(outputs,))

    class Unpack(nn.Module):
        def forward(self, latents):
            return latents.sample * 2

    class WithOutput(Pipe):
        def use(self, x, index):
            return self.stage(made(sample=x))

    assert capture_stage(WithOutput(Unpack())).status == "done"
    assert replay(WithOutput(Unpack())).parity == "exact"
