"""One run as lanes over time: when the host was in which region, and when the device worked for which."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfladder.trace.attribution import Attribution
from perfladder.trace.intervals import unite
from perfladder.trace.model import IntArray, Trace
from perfladder.trace.rows import Row

_US: Final = 1e-3
_STEPS: Final = 2000
"""Of a run's duration: what lies nearer together than one of so many steps is drawn as one."""


class LaneSpan(Row):
    """A stretch of time of one region; `region_id` is None outside every region. Starts count from the run's start."""

    region_id: str | None
    start_us: float
    duration_us: float


class HostGap(Row):
    """A stretch of the run's own thread in no flat region: after the end of one and before the start of another.

    `after` and `before` are region ids; None is the start or the end of the run.
    """

    after: str | None
    before: str | None
    duration_us: float


class RunLanes(Row):
    """The flat regions of one run over time.

    Attributes:
        run_index: Which run.
        wall_us: Its duration.
        resolution_us: Stretches of the same region with less than this between them are one.
        host: Calls of flat regions on the run's own thread.
        other_threads: The same on other threads.
        device: Device work by the flat region that launched it; it may go on after the host has returned.
    """

    run_index: int
    wall_us: float
    resolution_us: float
    host: tuple[LaneSpan, ...]
    other_threads: tuple[LaneSpan, ...]
    device: tuple[LaneSpan, ...]

    def longest_gap(self) -> HostGap | None:
        """The longest stretch of the host outside every flat region; None if there is no region, or no such stretch."""
        if not self.host:
            return None
        gaps = []
        last, end_us = None, 0.0
        for span in self.host:  # in order of their starts
            gaps.append(HostGap(after=last, before=span.region_id, duration_us=span.start_us - end_us))
            if span.start_us + span.duration_us > end_us:
                last, end_us = span.region_id, span.start_us + span.duration_us
        gaps.append(HostGap(after=last, before=None, duration_us=self.wall_us - end_us))
        longest = max(gaps, key=lambda gap: gap.duration_us)
        return longest if longest.duration_us > 0 else None


def lay_out_run(trace: Trace, attribution: Attribution, run: int) -> RunLanes:
    """Lay out one run of a window; `run` counts from 0 in time order."""
    forest, join = trace.forest, trace.device_join
    span = int(attribution.run_spans[run])
    begin_ns, wall_ns = int(forest.start_ns[span]), int(forest.duration_ns[span])
    step_ns = wall_ns // _STEPS
    is_flat = attribution.is_region & (attribution.top == np.arange(forest.num_spans)) & (attribution.run == run)

    def lanes(owner: IntArray, start_ns: IntArray, end_ns: IntArray) -> tuple[LaneSpan, ...]:
        name = np.where(owner >= 0, forest.name_id[np.maximum(owner, 0)], -1)
        spans = [
            LaneSpan(region_id=_region_id(attribution, number), start_us=start * _US, duration_us=duration * _US)
            for number in np.unique(name).tolist()
            for start, duration in _stretches(start_ns[name == number], end_ns[name == number], begin_ns, step_ns)
        ]
        return tuple(sorted(spans, key=lambda found: (found.start_us, found.region_id or "")))

    def of_host(is_wanted: np.ndarray) -> tuple[LaneSpan, ...]:
        position = np.flatnonzero(is_wanted)
        return lanes(position, forest.start_ns[position], forest.end_ns[position])

    work = np.flatnonzero(attribution.device_run == run)
    event = join.event[work]
    return RunLanes(
        run_index=run,
        wall_us=wall_ns * _US,
        resolution_us=step_ns * _US,
        host=of_host(is_flat & attribution.is_on_run_thread),
        other_threads=of_host(is_flat & ~attribution.is_on_run_thread),
        device=lanes(attribution.device_top[work], trace.start_ns[event], trace.end_ns[event]),
    )


def _region_id(attribution: Attribution, number: int) -> str | None:
    label = attribution.labels[number] if number >= 0 else None
    return label.region_id if label is not None else None


def _stretches(start_ns: IntArray, end_ns: IntArray, begin_ns: int, step_ns: int) -> list[tuple[int, int]]:
    """Start and duration of the united intervals, of which those with less than a step between them are one."""
    union = unite(start_ns, end_ns)
    if not len(union.start_ns):
        return []
    is_gap = union.start_ns[1:] - union.end_ns[:-1] >= max(step_ns, 1)
    starts = union.start_ns[np.concatenate(([True], is_gap))]
    ends = union.end_ns[np.concatenate((is_gap, [True]))]
    return list(zip((starts - begin_ns).tolist(), (ends - starts).tolist(), strict=True))
