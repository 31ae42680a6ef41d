"""A plan on a captured stage, in a fresh process: is what comes of each call right, and is it faster?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from perfladder.errors import InputError
from perfladder.kernels.records import CallPlanReplay, StagePlanReplay
from perfladder.models import Model
from perfladder.stats import MIN_PAIRS, Samples, compare_samples
from perfladder.target import LoadedTarget

if TYPE_CHECKING:
    from perfladder.capturing.replay import Replay
    from perfladder.capturing.store import CapturedCall
    from perfladder.kernels.runtime import Activation

_WARMUPS = 3


class StagePlanRequest(Model):
    """Which capture to replay, with which plan, and how often."""

    folder: str
    path: str | None = Field(default=None, description="Where the stage is on the target; None: where it was captured.")
    plan: dict[str, JsonValue]
    tolerances: dict[str, float] = Field(default={}, description="By dtype; empty: as in tuning.")
    pairs: int = Field(default=20, ge=MIN_PAIRS, description="Timed replays of each side of each captured call.")


def measure(loaded: LoadedTarget, request: StagePlanRequest) -> StagePlanReplay:
    """Replay each captured call with the plan and without: compare with the pipeline, then time in turns.

    Raises:
        CaptureError: The capture cannot be used.
        InputError: The stage is no module, or a provider is not known in this process.
        WorkloadError: The stage raised when it was replayed.
    """
    from perfladder.capturing.replay import Replay
    from perfladder.kernels.plan import KernelOptimizationPlan

    plan = KernelOptimizationPlan.from_dict(request.plan)
    replay = Replay(loaded, Path(request.folder), path=request.path)
    if not replay.site.is_module:
        raise InputError(f"capture: {replay.manifest.stage} is no module, whose calls a plan could be applied to.")
    with replay, plan.apply(replay.site.owner) as activation:
        calls = [_replay(replay, call, activation, request) for call in replay.manifest.calls]
    return StagePlanReplay(stage=replay.manifest.stage, calls=calls)


def _replay(replay: Replay, call: CapturedCall, activation: Activation, request: StagePlanRequest) -> CallPlanReplay:
    from perfladder.tuning.correctness import TOLERANCES, is_accepted
    from perfladder.tuning.measure import Timing
    from perfladder.tuning.records import Measurement

    activation.is_paused = False
    differences, expected = replay.differences(call, replay.replay(call)), replay.expected(call)
    differing = {
        path: found.reason
        for path, found in differences.items()
        if not is_accepted(expected, path, found, request.tolerances or TOLERANCES)
    }
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARMUPS + request.pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            activation.is_paused = side == 0
            time_ms = replay.time_ms(call)
            if number >= _WARMUPS:
                times[side].append(time_ms)
    sides = [Samples(launches=[side]) for side in times]
    timing = Timing(1, *times, compare_samples(*sides, interleaved=True))
    return CallPlanReplay(
        index=call.index,
        run=call.run,
        differing=differing,
        max_rel_error=max((found.max_rel_error for found in differences.values()), default=0.0),
        measurement=Measurement.of(timing),
    )
