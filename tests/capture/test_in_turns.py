"""Replays and runs of the pipeline in turns: what they decide, and what takes none."""

import re

import pytest
import torch
from backgrounds import make_background
from staged import Linear, Pipe
from torch import nn

from perfladder.capturing import in_turns
from perfladder.capturing.in_turns import InTurns, InTurnsRequest
from perfladder.errors import RungError, WorkloadError
from perfladder.findings.harness import harness_findings
from perfladder.models import ResultWarning
from perfladder.rungs import capture, harness
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.harness import HarnessRequest, HarnessResult
from perfladder.stats import Interval, Samples


class Counting(Linear):
    """Keeps a number that only the pipeline changes, and that its output depends on."""

    def __init__(self):
        super().__init__()
        self.offset = 0.0

    def forward(self, x):
        return super().forward(x) + self.offset


class Resetting(Pipe):
    """Its stage's state is another one in each call, and at the end."""

    def use(self, x, index):
        self.stage.offset = float(index)
        out = self.stage(x)
        self.stage.offset = 100.0
        return out


UNDECIDED = HarnessResult(stage="stage", parity="exact", timing_ratio=0.7, caches="warm")


def test_replays_and_runs_take_turns_in_one_process(wrap, tmp_path):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Pipe(Linear())), CaptureRequest(stage="stage", folder=folder))
    loaded = wrap(Pipe(Linear()))
    result = harness.decide_in_turns(UNDECIDED, folder, lambda request: in_turns.measure(loaded, request))
    turns = result.in_turns
    assert turns is not None
    assert len(turns.pipeline_ms.values) == len(turns.replayed_ms.values) == len(turns.evicted_ms.values) == 100
    assert (result.timing_ratio, result.timing_ratio_interval) == (turns.ratio, turns.interval)
    assert result.timing_ratio in (turns.warm_ratio, turns.evicted_ratio)
    assert (result.caches, result.alone_timing_ratio) == (turns.caches, 0.7)
    assert result.is_faithful is result.is_timing_faithful is turns.is_faithful
    assert bool(result.unfaithful_because) == (turns.is_faithful is False)
    assert HarnessResult.model_validate_json(result.model_dump_json()) == result
    assert harness.measure(loaded, HarnessRequest(folder=folder, repeats=1)).parity == "exact"


class Foreign:
    """An object that no capture can store."""


class TwoConfigured(Linear):
    """Two parts of it hold the same object, as the layers of a text encoder hold its configuration."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.ReLU()
        self.layer.config = self.config

    def forward(self, x):
        return self.layer(super().forward(x))


@pytest.mark.parametrize("config", [{"scale": [1.0]}, Foreign()], ids=["stored", "not-stored"])
def test_an_object_that_parts_of_the_stage_share_is_no_change_of_its_state(wrap, tmp_path, config):
    folder, pipe = str(tmp_path / "capture"), Pipe(TwoConfigured(config))
    capture.measure(wrap(pipe), CaptureRequest(stage="stage", folder=folder))
    assert harness.measure(wrap(pipe), HarnessRequest(folder=folder, repeats=1)).parity == "exact"
    assert pipe.stage.layer.config is pipe.stage.config is config
    in_turns.measure(wrap(pipe), InTurnsRequest(folder=folder))


def test_a_state_that_only_another_process_has_otherwise_is_no_change(wrap, tmp_path):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Pipe(TwoConfigured(["b", "a"]))), CaptureRequest(stage="stage", folder=folder))
    in_turns.measure(wrap(Pipe(TwoConfigured(["a", "b"]))), InTurnsRequest(folder=folder))


class Configured(Linear):
    """Does as a setting says that it shares with the pipeline."""

    def __init__(self):
        super().__init__()
        self.settings = {"offset": 0.0}

    def forward(self, x):
        return super().forward(x) + self.settings["offset"]


class Sharing(Pipe):
    """Holds its stage's settings, and changes them before each call."""

    def __init__(self):
        super().__init__(Configured())
        self.settings = self.stage.settings

    def use(self, x, index):
        self.settings["offset"] = float(index)
        return self.stage(x)


@pytest.mark.parametrize(
    ("pipe", "name"), [(lambda: Resetting(Counting()), "offset"), (Sharing, "settings")], ids=["set", "shared"]
)
def test_a_stage_whose_state_the_pipeline_changes_takes_no_turns_and_stays_the_pipelines(wrap, tmp_path, pipe, name):
    folder, target = str(tmp_path / "capture"), pipe()
    capture.measure(wrap(pipe()), CaptureRequest(stage="stage", folder=folder))
    expected, held = pipe()(), getattr(target.stage, name)
    result = harness.decide_in_turns(UNDECIDED, folder, lambda request: in_turns.measure(wrap(target), request))
    (warning,) = result.warnings
    assert warning.code == "REPLAY_NOT_IN_TURNS"
    assert f"has a state that changes from call to call or run to run ({name}" in warning.message
    if name == "settings":
        assert target.stage.settings is target.settings is held
    assert torch.equal(target(), expected)


def test_a_slow_pipeline_takes_as_many_turns_as_a_comparison_needs(wrap, tmp_path, monkeypatch):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Pipe(Linear())), CaptureRequest(stage="stage", folder=folder))
    monkeypatch.setattr(in_turns, "BUDGET_S", 0.0)
    result = harness.decide_in_turns(UNDECIDED, folder, lambda request: in_turns.measure(wrap(Pipe(Linear())), request))
    assert len(result.in_turns.pipeline_ms.values) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"is_timing_faithful": True, "is_faithful": True},
        {"parity": "different", "is_faithful": False, "unfaithful_because": ["It differs."]},
        {"data": "synthetic"},
        {"data": "redacted"},
        {"warnings": [ResultWarning(code="REPLAY_CALLS_TOO_SHORT", message="12 us")]},
    ],
    ids=["faithful", "other-output", "synthetic", "redacted", "too-short"],
)
def test_turns_are_for_the_time_alone(changes):
    result = UNDECIDED.model_copy(update=changes)

    def never(request):
        raise AssertionError("nothing is to be measured")

    assert harness.decide_in_turns(result, "folder", never) is result


@pytest.mark.parametrize(
    ("ratio", "is_faithful", "reasons", "claim"),
    [
        (
            1.01,
            True,
            [],
            r"1\.01 times its duration, in turns .* \(0\.70 times in a process of its own, by",
        ),
        (1.04, None, [], r"in 1\.04 times its duration in the pipeline"),
        (0.9, False, ["Replayed in turns with runs of the pipeline it is 10% faster than there."], "10% faster"),
    ],
)
def test_turns_overrule_replays_that_alone_took_another_time(ratio, is_faithful, reasons, claim):
    slower = {"is_timing_faithful": False, "is_faithful": False, "unfaithful_because": ["It is slower."]}
    samples, interval = Samples(launches=[[1.0]]), Interval(low=ratio, high=ratio)
    turns = InTurns(
        caches="warm",
        ratio=ratio,
        interval=interval,
        warm_ratio=ratio,
        evicted_ratio=None,
        is_faithful=is_faithful,
        pipeline_ms=samples,
        replayed_ms=samples,
    )
    result = harness.decide_in_turns(UNDECIDED.model_copy(update=slower), "folder", lambda request: turns)
    assert (result.is_timing_faithful, result.is_faithful) == (is_faithful, is_faithful)
    assert (result.unfaithful_because, result.timing_ratio, result.alone_timing_ratio) == (reasons, ratio, 0.7)
    (finding,) = harness_findings(result, make_background())
    assert re.search(claim, finding.claim)


def test_a_pipeline_that_fails_in_turns_costs_no_more_than_them():
    def fails(request):
        raise WorkloadError("the server is gone")

    result = harness.decide_in_turns(UNDECIDED, "folder", fails)
    assert (result.is_timing_faithful, result.timing_ratio, result.in_turns) == (None, 0.7, None)
    (warning,) = result.warnings
    assert (warning.code, "the server is gone" in warning.message) == ("REPLAY_NOT_IN_TURNS", True)


def test_a_stage_whose_state_changes_from_run_to_run_takes_no_turns(wrap, tmp_path):
    class Drifting(Pipe):
        def __call__(self):
            self.stage.offset += 1.0
            return super().__call__()

    folder = str(tmp_path / "capture")
    capture.measure(wrap(Drifting(Counting())), CaptureRequest(stage="stage", folder=folder))
    with pytest.raises(RungError, match=r"changes from call to call or run to run \(offset\)"):
        in_turns.measure(wrap(Drifting(Counting())), InTurnsRequest(folder=folder))


@pytest.mark.parametrize("calls", [2, 6])
def test_a_pipeline_that_calls_the_stage_less_or_more_often_takes_no_turns(wrap, tmp_path, calls):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Pipe(Linear())), CaptureRequest(stage="stage", folder=folder))
    with pytest.raises(RungError, match=rf"'stage' {calls} times in a run, and 4 times when it was captured"):
        in_turns.measure(wrap(Pipe(Linear(), calls=calls)), InTurnsRequest(folder=folder))


class Wide(Pipe):
    """Gives its stage the rows that it is told."""

    def __init__(self, rows, steps=2, scale=1.0):
        super().__init__(Scaling())
        self.rows, self.steps, self.scale = rows, steps, scale

    def __call__(self):
        for _ in range(self.calls):
            x = self.stage(torch.ones(self.rows, 3), steps=self.steps, scale=self.scale)
        return x


class Scaling(Linear):
    def forward(self, x, steps, scale):
        for _ in range(steps):
            x = super().forward(x) * scale
        return x


@pytest.mark.parametrize(
    ("other", "what"),
    [
        pytest.param(
            Wide(5), r"args\.0 of call 0 is float32 \[5, 3\] on cpu, and was float32 \[2, 3\] on cpu", id="shape"
        ),
        pytest.param(Wide(2, steps=7), r"kwargs\.steps of call 0 is 7, and was 2", id="count"),
    ],
)
def test_a_pipeline_that_gives_its_stage_other_inputs_takes_no_turns(wrap, tmp_path, other, what):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Wide(2)), CaptureRequest(stage="stage", folder=folder))
    with pytest.raises(RungError, match=what):
        in_turns.measure(wrap(other), InTurnsRequest(folder=folder))


def test_a_pipeline_of_the_same_form_takes_turns_whatever_its_workload_is_called(wrap, tmp_path):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Wide(2)), CaptureRequest(stage="stage", folder=folder))
    told = []
    loaded = wrap(Wide(2, scale=2.0), seed=7)
    loaded.tell = told.append
    turns = in_turns.measure(loaded, InTurnsRequest(folder=folder))
    assert len(told) == len(turns.pipeline_ms.values)
    assert told[-1].num_done == told[-1].num_total - 1


class Lazy(Linear):
    """Makes what it needs when it is called first."""

    def forward(self, x):
        if not hasattr(self, "made"):
            self.made = [1.0]
        return super().forward(x)


class Forgetting(Pipe):
    def __call__(self):
        x = super().__call__()
        del self.stage.made
        return x


def test_a_state_that_appears_after_the_first_call_takes_no_turns(wrap, tmp_path):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Forgetting(Lazy())), CaptureRequest(stage="stage", folder=folder))
    with pytest.raises(RungError, match=r"changes from call to call or run to run \(made\)"):
        in_turns.measure(wrap(Forgetting(Lazy())), InTurnsRequest(folder=folder))


class Given(Linear):
    """Is given what it holds."""

    def __init__(self):
        super().__init__()
        self.settings = {"scale": [1.0]}

    def forward(self, x, settings):
        return super().forward(x) * settings["scale"][0]


class Giving(Pipe):
    def use(self, x, index):
        return self.stage(x, settings=self.stage.settings)


def test_a_state_that_is_an_input_too_is_no_change(wrap, tmp_path):
    folder = str(tmp_path / "capture")
    capture.measure(wrap(Giving(Given())), CaptureRequest(stage="stage", folder=folder))
    in_turns.measure(wrap(Giving(Given())), InTurnsRequest(folder=folder))


def test_what_a_container_that_cannot_be_stored_shares_is_replayed(wrap, tmp_path):
    folder, shared = str(tmp_path / "capture"), {"n": [1.0]}
    target = Pipe(TwoConfigured([shared, Foreign()]))
    target.stage.stats, target.stage.again = shared, [shared, shared["n"]]
    capture.measure(wrap(target), CaptureRequest(stage="stage", folder=folder))
    assert harness.measure(wrap(target), HarnessRequest(folder=folder, repeats=1)).parity == "exact"
    in_turns.measure(wrap(target), InTurnsRequest(folder=folder))
