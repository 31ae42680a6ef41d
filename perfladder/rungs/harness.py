"""Rung 3, isolated harness: does the stage, alone in a fresh process on captured inputs, behave as in the pipeline?"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from perfladder.capturing import in_turns
from perfladder.capturing.evict import SHORT_CALL_MS, evictor_for
from perfladder.capturing.in_turns import InTurns, InTurnsRequest
from perfladder.capturing.rounds import Caches, TimingVerdict, judge_rounds, time_rounds
from perfladder.capturing.store import CapturedCall, Manifest
from perfladder.capturing.yardstick import Yardstick
from perfladder.environment import take_snapshot
from perfladder.errors import CaptureError, PerfladderError, RungError
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.cost import CostEstimate
from perfladder.stats import Interval, Samples
from perfladder.target import LoadedTarget
from perfladder.timing.memory import peak_device_memory, reset_peak_memory
from perfladder.timing.results import StagesResult

if TYPE_CHECKING:
    from perfladder.capturing.compare import Difference
    from perfladder.capturing.replay import Replay

_CLOCK_TOLERANCE = 0.03
_WIDE_SPREAD = 0.2


class HarnessRequest(Model):
    """Which capture to replay, and how often."""

    folder: str
    repeats: int = Field(default=20, gt=0, description="Rounds in which each captured call is timed.")
    path: str | None = Field(default=None, description="Where the stage is on the target; None: where it was captured.")
    synthetic: bool = Field(default=False, description="Random numbers in place of the captured ones.")


class Parity(Model):
    """How far what came of a replayed call is from what came of the captured one: output, inputs and state changed."""

    verdict: Literal["exact", "within_tolerance", "different"]
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    differing: dict[str, str] = {}


class CallReplay(Model):
    """One captured call, replayed."""

    index: int
    run: int = 0
    parity: Parity | None = Field(description="None where there is nothing real to compare with.")
    second_replay_differs: bool
    in_pipeline_ms: Samples
    host_lead_ms: float = Field(
        default=0.0, description="How far ahead of the device the host was as it made the call, there and here."
    )
    replayed_ms: Samples
    evicted_ms: Samples | None = Field(default=None, description="With the caches emptied before each repeat.")


class HarnessResult(RungResult):
    """Whether the replay stands for the stage in the pipeline."""

    rung: str = "harness"
    stage: str | None = None
    data: Literal["captured", "redacted", "synthetic"] = "captured"
    signature: dict[str, str] = {}
    calls: list[CallReplay] = []
    parity: Literal["exact", "within_tolerance", "different"] | None = None
    caches: Caches = Field(
        default="warm", description="Which of the two timings comes nearer to the pipeline; the ratio is of that one."
    )
    timing_ratio: float | None = Field(
        default=None,
        description="Replayed over in-pipeline time: of medians; where these are not alike, of turns (`in_turns`).",
    )
    timing_ratio_interval: Interval | None = None
    warm_timing_ratio: float | None = None
    evicted_timing_ratio: float | None = None
    alone_timing_ratio: float | None = Field(
        default=None, description="That of the replays alone, where there were turns."
    )
    host_ratio: float | None = Field(
        default=None,
        description="How long a fixed piece of host work takes beside the replays, over the same beside the plain runs "
        "of the pipeline: not 1 where the host itself is faster or slower.",
    )
    in_turns: InTurns | None = Field(
        default=None,
        description="Replays and runs of the pipeline in turns, in one process, where replays alone took another time.",
    )
    is_timing_faithful: bool | None = Field(default=None, description="None where the samples cannot tell.")
    is_faithful: bool | None = Field(default=None, description="Same output and same duration; None if undecided.")
    unfaithful_because: list[str] = []
    peak_device_allocated_bytes: int | None = Field(default=None, description="Weights of the stage included.")
    peak_host_rss_bytes: int | None = Field(default=None, description="Of the whole replay process.")

    @property
    def has_other_output(self) -> bool:
        """Whether a replay gives another output than the pipeline, or than another replay."""
        return self.parity == "different" or any(call.second_replay_differs for call in self.calls)

    @property
    def max_abs_error(self) -> float | None:
        """The largest of all calls; None where nothing could be compared."""
        return max((call.parity.max_abs_error for call in self.calls if call.parity is not None), default=None)

    @property
    def max_rel_error(self) -> float | None:
        """The largest of all calls, of the largest value of its output; None where nothing could be compared."""
        return max((call.parity.max_rel_error for call in self.calls if call.parity is not None), default=None)


def estimate(context: RungContext) -> CostEstimate:
    """Loading the target again, and replaying each captured call."""
    captured, stages = context.result(CaptureResult), context.result(StagesResult)
    if captured is None or stages is None:
        return CostEstimate(basis="no capture to replay")
    call_ms = call_ms_of(stages, captured.stage)
    rounds = HarnessRequest(folder="").repeats * (2 if call_ms is not None and call_ms < SHORT_CALL_MS else 1)
    replays = len(captured.captured_calls) * (2 + rounds)
    load_s = sum(context.info.load_s.values())
    return CostEstimate(
        time_s=None if call_ms is None else load_s + replays * call_ms / 1000,
        memory_bytes=stages.peak_device_reserved_bytes or stages.peak_host_rss_bytes,
        basis=f"loading again ({load_s:.3g} s), then {replays} replays of a call; turns with the "
        f"pipeline where these do not take as long ({in_turns.BUDGET_S:.0f} s, or 10 turns); memory as in the pipeline",
    )


def call_ms_of(stages: StagesResult, stage: str | None) -> float | None:
    """Median duration of a call of a stage in plain runs."""
    found = next((row for row in stages.default.stages if row.name == stage), None)
    return None if found is None else (found.device_call_ms or found.call_ms).p50


def run(context: RungContext, request: HarnessRequest | None = None) -> HarnessResult:
    """Replay the capture in a process that has done nothing else."""
    captured = context.result(CaptureResult)
    if captured is None or captured.folder is None:
        reason = next((r.reason for r in context.results.values() if isinstance(r, CaptureResult)), None)
        return HarnessResult(status="not_applicable", reason=reason or "There is no capture to replay.")
    request = request or HarnessRequest(folder=str(context.folder.parent / captured.folder))
    timeout_s = context.workload.timeout_s
    result = context.replay.call(measure, request, timeout_s=timeout_s)

    def take_turns(turns: InTurnsRequest) -> InTurns:
        return context.broad.call(in_turns.measure, turns, timeout_s=timeout_s)

    return decide_in_turns(result, request.folder, take_turns)


def decide_in_turns(
    result: HarnessResult, folder: str, take_turns: Callable[[InTurnsRequest], InTurns]
) -> HarnessResult:
    """Where only the time keeps a replay from being faithful, judge it by replays and runs of the pipeline in turns.

    Args:
        result: Of the replays alone.
        folder: The capture.
        take_turns: Runs `in_turns.measure` in a process that holds the whole target.
    """
    is_too_short = any(warning.code == "REPLAY_CALLS_TOO_SHORT" for warning in result.warnings)
    if result.data != "captured" or result.has_other_output or result.is_timing_faithful or is_too_short:
        return result
    try:
        turns = take_turns(InTurnsRequest(folder=folder))
    except PerfladderError as error:
        warning = ResultWarning(code="REPLAY_NOT_IN_TURNS", message=f"Taking turns with the pipeline failed: {error}")
        return result.model_copy(update={"warnings": [*result.warnings, warning]})
    reasons = []
    if turns.is_faithful is False:
        change = f"{abs(1 - turns.ratio):.0%} {'faster' if turns.ratio < 1 else 'slower'}"
        reasons = [f"Replayed in turns with runs of the pipeline it is {change} than there."]
    return result.model_copy(
        update={
            "in_turns": turns,
            "caches": turns.caches,
            "timing_ratio": turns.ratio,
            "timing_ratio_interval": turns.interval,
            "warm_timing_ratio": turns.warm_ratio,
            "evicted_timing_ratio": turns.evicted_ratio,
            "alone_timing_ratio": result.timing_ratio,
            "is_timing_faithful": turns.is_faithful,
            "is_faithful": turns.is_faithful,
            "unfaithful_because": reasons,
        }
    )


def measure(loaded: LoadedTarget, request: HarnessRequest) -> HarnessResult:
    """Replay each captured call: compare what comes of it twice, then time all of them in turn.

    Raises:
        CaptureError: The capture cannot be used.
        WorkloadError: The stage raised when it was replayed.
    """
    # These bring torch, which the ladder's own process does without.
    from perfladder.capturing.replay import Replay

    replay = Replay(loaded, Path(request.folder), path=request.path, is_synthetic=request.synthetic)
    manifest = replay.manifest
    if not manifest.calls:
        raise RungError(f"{request.folder} holds no call.")
    if untimed := [call.index for call in manifest.calls if not call.in_pipeline_ms]:
        raise CaptureError(
            f"{request.folder} is damaged: calls[].in_pipeline_ms of call {untimed[0]} is empty. "
            "Capture the stage again."
        )
    evictor = evictor_for(manifest.calls, loaded.device)
    reset_peak_memory(loaded)
    with replay:
        compared = [_compare(replay, call) for call in manifest.calls]
        timed = time_rounds(manifest.calls, request.repeats, replay.time_ms, evictor, Yardstick())
    allocated, _ = peak_device_memory(loaded)
    if allocated is not None and evictor is not None:
        allocated -= evictor.device_bytes
    calls = [
        CallReplay(
            index=call.index,
            run=call.run,
            parity=call_parity,
            second_replay_differs=differs,
            in_pipeline_ms=Samples(launches=[call.in_pipeline_ms]),
            host_lead_ms=call.lead_ms,
            replayed_ms=Samples(launches=[timed.warm[index]]),
            evicted_ms=None if timed.evicted is None else Samples(launches=[timed.evicted[index]]),
        )
        for index, (call, (call_parity, differs)) in enumerate(zip(manifest.calls, compared, strict=True))
    ]
    timing = judge_rounds(timed, [call.in_pipeline_ms for call in manifest.calls], manifest.yardstick_ms)
    parity = _parity_of(calls)
    reasons = [*_output_reasons(calls), *_timing_reasons(timing, manifest)]
    is_real = not request.synthetic and not manifest.is_redacted
    return HarnessResult(
        stage=manifest.stage,
        data="captured" if is_real else "synthetic" if request.synthetic else "redacted",
        signature=_output_signature(manifest),
        calls=calls,
        parity=parity,
        caches=timing.caches,
        timing_ratio=timing.ratio,
        timing_ratio_interval=timing.interval,
        warm_timing_ratio=timing.warm_ratio,
        evicted_timing_ratio=timing.evicted_ratio,
        host_ratio=timing.host_ratio,
        is_timing_faithful=timing.is_faithful,
        is_faithful=False if reasons else timing.is_faithful if is_real else None,
        unfaithful_because=reasons,
        peak_device_allocated_bytes=allocated,
        peak_host_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        warnings=[*_timing_warnings(timing), *_warnings(manifest, loaded, is_real=is_real)],
    )


def _compare(replay: Replay, call: CapturedCall) -> tuple[Parity | None, bool]:
    """Replay a call twice: how what comes of it compares with the pipeline's, and whether the second one differs."""
    first = replay.differences(call, replay.replay(call))
    second = replay.differences(call, replay.replay(call))
    is_real = not replay.is_synthetic and not replay.manifest.is_redacted
    return parity_of(first) if is_real else None, second != first


def parity_of(differences: dict[str, Difference]) -> Parity:
    """Judge the differences of one call."""
    is_accepted = all(difference.is_within_tolerance for difference in differences.values())
    return Parity(
        verdict="exact" if not differences else "within_tolerance" if is_accepted else "different",
        max_abs_error=max((d.max_abs_error for d in differences.values()), default=0.0),
        max_rel_error=max((d.max_rel_error for d in differences.values()), default=0.0),
        differing={path: difference.reason for path, difference in differences.items()},
    )


def _parity_of(calls: Sequence[CallReplay]) -> Literal["exact", "within_tolerance", "different"] | None:
    """The worst of all calls."""
    verdicts = [call.parity.verdict for call in calls if call.parity is not None]
    order: tuple[Literal["different", "within_tolerance", "exact"], ...] = ("different", "within_tolerance", "exact")
    return next((verdict for verdict in order if verdict in verdicts), None)


def _output_reasons(calls: Sequence[CallReplay]) -> list[str]:
    reasons = []
    differing = {c.index: c.parity.differing for c in calls if c.parity and c.parity.verdict == "different"}
    if differing:
        where = "; ".join(
            f"call {index}: {path} {why}" for index, found in differing.items() for path, why in list(found.items())[:3]
        )
        reasons.append(f"The replayed output differs from the pipeline's ({where}).")
    if any(call.second_replay_differs for call in calls):
        reasons.append(
            "A second replay gives another output than the first: the stage keeps state that was not captured."
        )
    return reasons


def _timing_reasons(timing: TimingVerdict, manifest: Manifest) -> list[str]:
    """Why the duration is another one, as far as it can be told."""
    if timing.is_faithful is not False:
        return []
    change = (
        f"Alone it is {abs(1 - timing.ratio):.0%} {'faster' if timing.ratio < 1 else 'slower'} than in the pipeline"
    )
    snapshot = take_snapshot()
    clock = next((device.sm_clock_mhz for device in snapshot.devices), None)
    causes = []
    if timing.reference_spread > _WIDE_SPREAD:
        causes.append(f"its calls in the pipeline themselves vary by {timing.reference_spread:.0%}")
    if clock and manifest.sm_clock_mhz and abs(clock / manifest.sm_clock_mhz - 1) > _CLOCK_TOLERANCE:
        causes.append(f"the device's clock is {clock} MHz now and was {manifest.sm_clock_mhz} MHz")
    if manifest.load_average_1m is not None and abs(snapshot.load_average_1m - manifest.load_average_1m) > 1:
        causes.append(
            f"the machine's load is {snapshot.load_average_1m:.1f} now and was {manifest.load_average_1m:.1f}"
        )
    causes.append("the allocator's state, or what runs beside the stage there, may differ too")
    return [f"{change}: {'; '.join(causes)}."]


def _timing_warnings(timing: TimingVerdict) -> list[ResultWarning]:
    if timing.too_short is not None:
        return [ResultWarning(code="REPLAY_CALLS_TOO_SHORT", message=timing.too_short)]
    if timing.speed_change is None:
        return []
    message = f"{timing.speed_change} Held against the pipeline's earlier runs that decides nothing."
    return [ResultWarning(code="REPLAY_SPEED_CHANGED", message=message)]


def _output_signature(manifest: Manifest) -> dict[str, str]:
    from perfladder.capturing.nodes import leaves

    return {
        path: f"{leaf.tensor.dtype} {leaf.tensor.size}" if leaf.tensor else leaf.kind
        for path, leaf in leaves(manifest.calls[0].output, "output").items()
    }


def _warnings(manifest: Manifest, loaded: LoadedTarget, *, is_real: bool) -> list[ResultWarning]:
    import torch

    found = []
    if manifest.torch_version != torch.__version__:
        message = f"Captured with torch {manifest.torch_version}, replayed with {torch.__version__}."
        found.append(ResultWarning(code="TORCH_VERSION_DIFFERS", message=message))
    if manifest.device.partition(":")[0] != loaded.device.type:
        message = f"Captured on {manifest.device}, replayed on {loaded.device}: durations do not compare."
        found.append(ResultWarning(code="REPLAY_DEVICE_DIFFERS", message=message))
    if manifest.work_digest != loaded.workload.fingerprints.work.digest:
        message = "The capture was made with another workload or target than the one given now."
        found.append(ResultWarning(code="REPLAY_WORK_DIFFERS", message=message))
    if not is_real:
        message = "The data are not the pipeline's: its output cannot be compared, and data-dependent time may differ."
        found.append(ResultWarning(code="REPLAY_NOT_REAL_DATA", message=message))
    return found
