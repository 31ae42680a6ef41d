"""What waits of the host cost in a run that is not profiled: the profiled run, replayed with a faster host.

Profiling slows the host, so that in a profiled run the device has often caught up where a plain run would wait for it.
The model keeps the order of launches and the device's durations, scales the host's own time by one factor, and chooses
the factor so that the modelled run takes as long as a plain one. Then it leaves the waits out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from perfladder.trace.attribution import Attribution
from perfladder.trace.intervals import unite
from perfladder.trace.model import IntArray, Trace
from perfladder.trace.regions import RunAttribution, middle_run
from perfladder.trace.residual import HostParts, Part
from perfladder.trace.rows import Row

_US: Final = 1e-3
_US_PER_MS: Final = 1e3
_STEPS: Final = 60
_MAX_SCALE: Final = 4.0
_SERIAL: Final = 1.05
"""Sum of device durations over their union: above it work overlaps, and one queue is no model of it."""

FloatArray = npt.NDArray[np.floating]


class WaitSite(Row):
    """One place where the host waits for the device, in the modelled plain run.

    Attributes:
        operator: Innermost operator around the wait.
        outer_operator: Outermost operator around it: what the program called.
        call: The runtime call.
        region_id: Innermost region around it; None outside every region.
        count: Number of waits.
        wait_us: Time waited.
    """

    operator: str
    outer_operator: str
    call: str
    region_id: str | None
    count: int
    wait_us: float


class WaitModel(Row):
    """A run with and without the waits inside it.

    Attributes:
        host_scale: Host time of the plain run over that of the profiled one, as the model found it.
        plain_us: Duration of a plain run, which the model was fitted to.
        without_waits_us: Duration that the model gives without the waits; the run's last one, for its result, stays.
        sites: Where the waits are, the longest first.
    """

    host_scale: float
    plain_us: float
    without_waits_us: float
    sites: tuple[WaitSite, ...]

    @property
    def win_us(self) -> float:
        """What the run would be shorter, as far as the model goes."""
        return max(self.plain_us - self.without_waits_us, 0.0)


@dataclass(frozen=True, eq=False)
class _Run:
    """One run on the host's own clock, which stands still while the host waits.

    Attributes:
        launch_ns: When each piece of device work was launched, in order.
        duration_ns: How long it took, with the gap that the device leaves before work that waits for it already.
        wait_ns: When each wait began, in order.
        end_ns: The end of the run.
    """

    launch_ns: FloatArray
    duration_ns: FloatArray
    wait_ns: FloatArray
    end_ns: float

    def segments(self, scale: float, bounds_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Host and device time of each part of the run that ends with one of the bounds."""
        edges = np.concatenate(([0.0], bounds_ns))
        host = np.diff(edges) * scale
        part = np.searchsorted(bounds_ns, self.launch_ns, side="left")
        device = np.zeros(len(bounds_ns))
        known = part < len(bounds_ns)
        if known.any():
            since = (self.launch_ns - edges[np.minimum(part, len(bounds_ns) - 1)]) * scale
            total = np.cumsum(self.duration_ns)
            before = np.concatenate(([0.0], total[:-1]))
            # What starts the busiest stretch decides: its launch, and all work from it to the end of the part.
            last = np.array([total[part == index].max(initial=0.0) for index in range(len(bounds_ns))])
            np.maximum.at(device, part[known], (since + last[np.minimum(part, len(last) - 1)] - before)[known])
        return host, device

    def duration(self, scale: float, bounds_ns: FloatArray) -> float:
        """How long the run takes."""
        host, device = self.segments(scale, bounds_ns)
        return float(np.maximum(host, device).sum())


def model_waits(
    trace: Trace, attribution: Attribution, parts: HostParts, run: int, plain_us: float
) -> WaitModel | None:
    """Model what the waits of one run cost.

    Args:
        trace: The trace.
        attribution: Of it.
        parts: Of it.
        run: Place of the run.
        plain_us: Duration of a run without the profiler.

    Returns:
        None where there is no wait but the last, or device work overlaps, so that one queue is no model.
    """
    forest, join = trace.forest, trace.device_join
    span = int(attribution.run_spans[run])
    mine = (attribution.run == run) & attribution.is_on_run_thread
    is_wait = (parts.part == Part.SYNCHRONIZATION) & mine
    waits = np.flatnonzero(is_wait)
    order = np.argsort(forest.start_ns[waits], kind="stable")
    waits = waits[order]
    work = np.flatnonzero((attribution.device_run == run) & (join.launch >= 0))
    event = join.event[work]
    busy = unite(trace.start_ns[event], trace.end_ns[event])
    if len(waits) < 2 or not len(work) or int(trace.duration_ns[event].sum()) > _SERIAL * busy.total_ns:
        return None
    stands_still = np.flatnonzero(mine & np.isin(parts.part, (Part.SYNCHRONIZATION, Part.COPY_D2H, Part.PROFILER)))
    still = unite(forest.start_ns[stands_still], forest.end_ns[stands_still])

    def own(times_ns: IntArray) -> FloatArray:
        elapsed: FloatArray = (times_ns - forest.start_ns[span] - still.covered_before(times_ns)).astype(float)
        return elapsed

    launch = own(forest.start_ns[join.launch[work]])
    first = np.lexsort((trace.start_ns[event], launch))
    end = float(own(forest.end_ns[span : span + 1])[0])
    modelled = _Run(launch[first], _with_gaps(trace, event, join.launch[work])[first], own(forest.start_ns[waits]), end)
    return _fitted(modelled, parts, waits, plain_us)


def _with_gaps(trace: Trace, event: IntArray, launch: IntArray) -> FloatArray:
    """Durations with the gap before each: its own where it was queued, elsewhere the median of those."""
    order = np.argsort(trace.start_ns[event], kind="stable")
    start, end = trace.start_ns[event][order], np.maximum.accumulate(trace.end_ns[event][order])
    before = np.concatenate(([start[0]], end[:-1]))
    gap = np.maximum(start - before, 0)
    is_queued = trace.forest.end_ns[launch[order]] < before
    usual = float(np.median(gap[is_queued])) if is_queued.any() else 0.0
    found = np.empty(len(event))
    found[order] = trace.duration_ns[event][order] + np.where(is_queued, gap, usual)
    return found


def model_run_waits(
    trace: Trace, attribution: Attribution, runs: Sequence[RunAttribution], plain_ms: float | None
) -> WaitModel | None:
    """The model of the run of median duration; None without a plain duration too."""
    if not plain_ms or not trace.has_device_work:
        return None
    place = runs.index(middle_run(runs))
    return model_waits(trace, attribution, HostParts(trace, attribution), place, plain_ms * _US_PER_MS)


def _fitted(run: _Run, parts: HostParts, waits: IntArray, plain_us: float) -> WaitModel:
    bounds = np.append(run.wait_ns, run.end_ns)
    low, high = 0.0, _MAX_SCALE
    for _ in range(_STEPS):
        scale = (low + high) / 2
        low, high = (scale, high) if run.duration(scale, bounds) < plain_us / _US else (low, scale)
    scale = (low + high) / 2
    host, device = run.segments(scale, bounds)
    waited = np.maximum(device - host, 0)[: len(waits)]
    totals: dict[tuple[str, str, str, str | None], list[float]] = {}
    for position, time_ns in zip(waits[:-1].tolist(), waited[:-1].tolist(), strict=True):
        entry = totals.setdefault(parts.place_of(position), [0, 0.0])
        entry[0] += 1
        entry[1] += time_ns * _US
    names = ("operator", "outer_operator", "call", "region_id")
    sites = [
        WaitSite(**dict(zip(names, place, strict=True)), count=int(count), wait_us=wait_us)
        for place, (count, wait_us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    # The last wait is for the result; what the host does after it comes after it still.
    without = run.duration(scale, bounds[-2:])
    return WaitModel(host_scale=scale, plain_us=plain_us, without_waits_us=without * _US, sites=tuple(sites))
