"""The calls of one stage in a run of the pipeline that nothing else disturbs."""

from __future__ import annotations

from typing import NamedTuple

from perfladder.instrument import Site, instrument
from perfladder.target import LoadedTarget
from perfladder.timing.runs import bare_run
from perfladder.timing.timer import NS_PER_MS, Call, RunTiming, StageTimer, resolve_device_times

_LEAST_LEAD_MS = 0.02  # below that the two clocks cannot tell


class PlainCall(NamedTuple):
    """One call of the stage.

    Attributes:
        duration_ms: By device events where there is a device.
        host_lead_ms: How far the host was ahead of the device when it made the call, and no more than the call kept the
            host; None where there is no device, or its events could not be recorded.
    """

    duration_ms: float
    host_lead_ms: float | None


def time_plain_run(loaded: LoadedTarget, site: Site, timer: StageTimer) -> list[PlainCall] | str:
    """Run the pipeline once and time the stage's calls, in order; or tell why they cannot be seen."""
    with instrument([site], timer) as state:
        if site.path in state.unobservable:
            return state.unobservable[site.path]
        timing, _ = bare_run(loaded, None, timer.clock, is_observed=True)
    timing.calls = sorted((call for call in timer.take() if not call.is_item), key=lambda call: call.start_ns)
    resolve_device_times(timing)
    return [plain_call(timing, call) for call in timing.calls]


def plain_call(timing: RunTiming, call: Call) -> PlainCall:
    """What the events of a finished run tell of one call."""
    host_ms = call.duration_ns / NS_PER_MS
    if not call.events:
        return PlainCall(host_ms, None)
    lead_ms = call.device_start_ms - (call.start_ns - timing.start_ns) / NS_PER_MS
    return PlainCall(call.device_ms, min(lead_ms, host_ms) if lead_ms > _LEAST_LEAD_MS else 0.0)
