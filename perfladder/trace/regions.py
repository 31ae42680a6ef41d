"""Per run: how much host and device time is in which region, how much outside any, and what that rest is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.trace.attribution import Attribution, attribute
from perfladder.trace.model import Category, IntArray, Trace
from perfladder.trace.residual import HostParts, HostSplit, IdleSplit, split_idle
from perfladder.trace.rows import Row
from perfladder.trace.warnings import TraceWarning, WarningCode

_SOURCE: Final = "trace.regions"
_US: Final = 1e-3
_MIN_RUNS_TO_JUDGE: Final = 3
_SLOW_FIRST_RUN: Final = 3.0


class RegionRow(Row):
    """One region of the flat, non-overlapping set of one run; several calls are one row.

    Device times are None on a trace without device work.

    Attributes:
        region_id: Label, e.g. `untuned_module:unet`.
        kind: Kind of the label.
        name: Name of the label.
        calls: Number of calls in the run.
        cpu_time_us: Time on the run's own thread, nested regions included.
        cpu_time_fraction: The same as a fraction of the run.
        self_cpu_time_us: The same without nested regions.
        other_threads_cpu_time_us: Time of calls on other threads. It overlaps the run's thread and is in no fraction.
        device_time_us: Sum of the device work launched inside, from any thread.
        device_time_fraction: The same as a fraction of the run's device time.
        device_span_us: From the first start to the last end of that work, summed over the calls; gaps included.
    """

    region_id: str
    kind: str
    name: str
    calls: int
    cpu_time_us: float
    cpu_time_fraction: float
    self_cpu_time_us: float
    other_threads_cpu_time_us: float
    device_time_us: float | None
    device_time_fraction: float | None
    device_span_us: float | None


class Residual(Row):
    """Time of one run outside every region.

    Attributes:
        cpu_time_us: Time on the run's thread.
        cpu_time_fraction: The same as a fraction of the run.
        device_time_us: Device work launched outside every region, unlinked work included.
        device_time_fraction: The same as a fraction of the run's device time.
        unlinked_device_time_us: Of that, work whose launch is not in the window.
        host: What the host time is made of.
    """

    cpu_time_us: float
    cpu_time_fraction: float
    device_time_us: float | None
    device_time_fraction: float | None
    unlinked_device_time_us: float | None
    host: HostSplit


class RunAttribution(Row):
    """One run: its times, its flat regions and its residual; fractions plus residual are 1.

    Attributes:
        run_index: The index in the run's label, or its place if that is no number.
        start_us: Start, from the trace's own zero.
        wall_time_us: Duration of the run's span.
        cpu_time_us: Host time on the run's thread: the same span, by the profiler.
        device_time_us: Sum of the device work of the run; None without device work in the trace.
        other_threads_cpu_time_us: Operators of other threads during the run, outermost ones only.
        regions: The flat set, in order of first call.
        residual: The rest.
        host: What the whole run's host time is made of.
        device: Busy and idle time of the device.
    """

    run_index: int
    start_us: float
    wall_time_us: float
    cpu_time_us: float
    device_time_us: float | None
    other_threads_cpu_time_us: float
    regions: tuple[RegionRow, ...]
    residual: Residual
    host: HostSplit
    device: IdleSplit | None


class RegionNode(Row):
    """One node of the region tree: all calls with the same path of enclosing regions.

    Attributes:
        region_id: Label.
        calls: Number of calls.
        cpu_time_us: Host time, nested regions included, on whichever thread it ran.
        self_cpu_time_us: Host time without nested regions.
        device_time_us: Device work launched inside, nested regions included.
        self_device_time_us: Device work launched inside, without nested regions.
        children: Regions called directly inside, in order of first call.
    """

    region_id: str
    calls: int
    cpu_time_us: float
    self_cpu_time_us: float
    device_time_us: float | None
    self_device_time_us: float | None
    children: tuple[RegionNode, ...] = ()


class RegionReport(Row):
    """The runs of a window, the region tree over all of them, and what could not be attributed.

    Attributes:
        runs: One entry a run, in time order.
        region_tree: Nested regions over all runs.
        unattributed_device_time_us: Device work that belongs to no run; None without device work in the trace.
        unattributed_device_time_fraction: The same as a fraction of all device work.
        warnings: What is suspicious, beyond the trace's own warnings.
    """

    runs: tuple[RunAttribution, ...]
    region_tree: tuple[RegionNode, ...]
    unattributed_device_time_us: float | None
    unattributed_device_time_fraction: float | None
    warnings: tuple[TraceWarning, ...]


@dataclass(frozen=True, eq=False)
class _Calls:
    """The region spans of a trace, one entry each, in forest order.

    `above` is the place of the enclosing region in these arrays, or -1; times are nanoseconds.
    """

    position: IntArray
    above: IntArray
    duration: IntArray
    own_duration: IntArray
    own_device: IntArray
    device: IntArray
    first_device: IntArray
    last_device: IntArray


def report_regions(trace: Trace, attribution: Attribution | None = None) -> RegionReport:
    """Attribute the runs of a trace to regions.

    Args:
        trace: A trace with our labels around runs and regions.
        attribution: From `attribute`, to choose the kinds of regions; made with its defaults if None.
    """
    attribution = attribution or attribute(trace)
    calls = _collect_calls(trace, attribution)
    parts = HostParts(trace, attribution)
    runs = _report_runs(trace, attribution, calls, parts)
    unattributed = _unattributed_ns(trace, attribution)
    all_device = int(trace.duration_ns[trace.device_join.event[~attribution.is_device_warmup]].sum())
    has_device = trace.has_device_work
    return RegionReport(
        runs=tuple(runs),
        region_tree=build_region_tree(trace, attribution),
        unattributed_device_time_us=unattributed * _US if has_device else None,
        unattributed_device_time_fraction=unattributed / max(all_device, 1) if has_device else None,
        warnings=tuple(_warnings(trace, attribution, runs, unattributed)),
    )


def middle_run(runs: Sequence[RunAttribution]) -> RunAttribution:
    """The run of median duration, for what is shown of one run; there must be one."""
    return sorted(runs, key=lambda run: run.wall_time_us)[len(runs) // 2]


def _collect_calls(trace: Trace, attribution: Attribution) -> _Calls:
    forest, join = trace.forest, trace.device_join
    position = np.flatnonzero(attribution.is_region)
    place = np.full(forest.num_spans, -1, np.int64)
    place[position] = np.arange(len(position))
    parent = forest.parent[position]
    above_position = np.where(parent >= 0, attribution.region[np.maximum(parent, 0)], -1) if len(position) else parent
    above = np.where(above_position >= 0, place[np.maximum(above_position, 0)], -1) if len(position) else parent
    duration = forest.duration_ns[position]
    inside = above >= 0
    nested = np.bincount(above[inside], weights=duration[inside], minlength=len(position)).astype(np.int64)
    owner = attribution.device_region
    owned = owner >= 0
    device_place = place[owner[owned]]
    event = join.event[owned]
    own_device = np.bincount(device_place, weights=trace.duration_ns[event], minlength=len(position)).astype(np.int64)
    device = own_device.copy()
    first = np.full(len(position), np.iinfo(np.int64).max)
    last = np.full(len(position), np.iinfo(np.int64).min)
    np.minimum.at(first, device_place, trace.start_ns[event])
    np.maximum.at(last, device_place, trace.end_ns[event])
    # Parents stand before their children, so one pass backwards carries everything up.
    for index in np.flatnonzero(above >= 0)[::-1].tolist() if device.any() else ():
        if (outer := above[index]) >= 0 and device[index]:
            device[outer] += device[index]
            first[outer] = min(first[outer], first[index])
            last[outer] = max(last[outer], last[index])
    return _Calls(position, above, duration, duration - nested, own_device, device, first, last)


def _report_runs(trace: Trace, attribution: Attribution, calls: _Calls, parts: HostParts) -> list[RunAttribution]:
    forest, join = trace.forest, trace.device_join
    spans, num_runs = attribution.run_spans, attribution.num_runs
    nested = attribution.is_on_run_thread
    outside = nested & (attribution.top < 0)
    host = parts.split(nested, attribution.run, num_runs)
    rest = parts.split(outside, attribution.run, num_runs)
    in_run = attribution.device_run >= 0
    device_ns = _sum_by(attribution.device_run[in_run], trace.duration_ns[join.event[in_run]], num_runs)
    free = in_run & (attribution.device_top < 0)
    free_ns = _sum_by(attribution.device_run[free], trace.duration_ns[join.event[free]], num_runs)
    unlinked = in_run & (join.host < 0)
    unlinked_ns = _sum_by(attribution.device_run[unlinked], trace.duration_ns[join.event[unlinked]], num_runs)
    others = (attribution.run >= 0) & ~nested & (forest.parent < 0)
    other_ns = _sum_by(attribution.run[others], forest.duration_ns[others], num_runs)
    rows = _flat_rows(trace, attribution, calls, device_ns)
    has_device = trace.has_device_work
    runs = []
    for run, span in enumerate(spans.tolist()):
        wall_ns = int(forest.duration_ns[span])
        covered_us = sum(row.cpu_time_us for row in rows[run])
        residual_us = max(wall_ns * _US - covered_us, 0.0)
        residual = Residual(
            cpu_time_us=residual_us,
            cpu_time_fraction=residual_us / max(wall_ns * _US, 1e-9),
            device_time_us=free_ns[run] * _US if has_device else None,
            device_time_fraction=_fraction(free_ns[run], device_ns[run], 1.0) if has_device else None,
            unlinked_device_time_us=unlinked_ns[run] * _US if has_device else None,
            host=rest[run],
        )
        label = attribution.labels[forest.name_id[span]]
        assert label is not None
        runs.append(
            RunAttribution(
                run_index=int(label.name) if label.name.isascii() and label.name.isdigit() else run,
                start_us=int(forest.start_ns[span]) * _US,
                wall_time_us=wall_ns * _US,
                cpu_time_us=wall_ns * _US,
                device_time_us=device_ns[run] * _US if has_device else None,
                other_threads_cpu_time_us=other_ns[run] * _US,
                regions=tuple(rows[run]),
                residual=residual,
                host=host[run],
                device=split_idle(trace, attribution, parts, run) if has_device else None,
            )
        )
    return runs


def _flat_rows(trace: Trace, attribution: Attribution, calls: _Calls, device_ns: list[float]) -> list[list[RegionRow]]:
    """Return the flat regions of each run, in order of first call."""
    forest = trace.forest
    is_flat = (attribution.top[calls.position] == calls.position) & (attribution.run[calls.position] >= 0)
    places = np.flatnonzero(is_flat)
    places = places[np.argsort(forest.start_ns[calls.position[places]], kind="stable")]
    positions = calls.position[places]
    run = attribution.run[positions]
    code = run.astype(np.int64) * len(trace.names) + forest.name_id[positions]
    codes, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    on_thread = attribution.is_on_run_thread[positions]
    duration = _flat_duration(trace, attribution, calls)[places]
    size = len(codes)
    count = np.bincount(inverse, minlength=size)
    device_code, device_run_time = _flat_device(trace, attribution)
    device_by_code = dict(zip(device_code.tolist(), device_run_time.tolist(), strict=True))
    has_work = calls.device[places] > 0
    span_ns = np.where(has_work, calls.last_device[places] - calls.first_device[places], 0)
    columns = {
        "cpu": np.bincount(inverse, weights=duration * on_thread, minlength=size),
        "own": np.bincount(inverse, weights=calls.own_duration[places] * on_thread, minlength=size),
        "other": np.bincount(inverse, weights=duration * ~on_thread, minlength=size),
        "span": np.bincount(inverse, weights=span_ns, minlength=size),
    }
    rows: list[list[RegionRow]] = [[] for _ in range(attribution.num_runs)]
    has_device = trace.has_device_work
    for index in np.argsort(first, kind="stable").tolist():
        number = int(codes[index]) // len(trace.names)
        label = attribution.labels[int(codes[index]) % len(trace.names)]
        assert label is not None
        wall_ns = int(forest.duration_ns[attribution.run_spans[number]])
        device = float(device_by_code.get(int(codes[index]), 0.0))
        rows[number].append(
            RegionRow(
                region_id=label.region_id,
                kind=label.kind,
                name=label.name,
                calls=int(count[index]),
                cpu_time_us=float(columns["cpu"][index]) * _US,
                cpu_time_fraction=_fraction(float(columns["cpu"][index]), wall_ns),
                self_cpu_time_us=float(columns["own"][index]) * _US,
                other_threads_cpu_time_us=float(columns["other"][index]) * _US,
                device_time_us=device * _US if has_device else None,
                device_time_fraction=_fraction(device, device_ns[number]) if has_device else None,
                device_span_us=float(columns["span"][index]) * _US if has_device else None,
            )
        )
    return rows


def _flat_duration(trace: Trace, attribution: Attribution, calls: _Calls) -> IntArray:
    """Return each region call's time in the flat set: its duration, or for an exclusive region what it alone covers."""
    is_exclusive = attribution.is_exclusive[calls.position]
    if not is_exclusive.any():
        return calls.duration
    forest, top = trace.forest, attribution.top
    mine = np.flatnonzero((top >= 0) & (forest.thread[np.maximum(top, 0)] == forest.thread))
    covered = np.bincount(top[mine], weights=forest.self_ns[mine], minlength=forest.num_spans)
    return np.where(is_exclusive, covered[calls.position].astype(np.int64), calls.duration)


def _flat_device(trace: Trace, attribution: Attribution) -> tuple[IntArray, IntArray]:
    """Return (run, name) codes and the device time of the flat region of that name in that run.

    The run is that of the work's launch, also where a backward pass in a later run belongs to an earlier call's region.
    """
    join = trace.device_join
    mine = np.flatnonzero((attribution.device_top >= 0) & (attribution.device_run >= 0))
    run = attribution.device_run[mine].astype(np.int64)
    code = run * len(trace.names) + trace.forest.name_id[attribution.device_top[mine]]
    codes, inverse = np.unique(code, return_inverse=True)
    return codes, np.bincount(inverse, weights=trace.duration_ns[join.event[mine]], minlength=len(codes))


def build_region_tree(
    trace: Trace, attribution: Attribution | None = None, run: int | None = None
) -> tuple[RegionNode, ...]:
    """Return the nested regions over all runs, or of one run (by its place), with inclusive and self times.

    A trace without runs gives the tree over the whole window.
    """
    attribution = attribution or attribute(trace)
    calls = _collect_calls(trace, attribution)
    call_run = attribution.run[calls.position]
    wanted = np.ones(len(call_run), bool)
    if attribution.num_runs:
        wanted = call_run >= 0 if run is None else call_run == run
    nodes: dict[tuple[int, int], int] = {}
    sums: list[list[int]] = []
    node_of: dict[int, int] = {}
    above, name_id = calls.above.tolist(), trace.forest.name_id[calls.position].tolist()
    values = np.stack([calls.duration, calls.own_duration, calls.device, calls.own_device], axis=1).tolist()
    for place in np.flatnonzero(wanted).tolist():
        key = (node_of.get(above[place], -1), name_id[place])
        node = nodes.setdefault(key, len(sums))
        if node == len(sums):
            sums.append([0, 0, 0, 0, 0])
        node_of[place] = node
        sums[node] = [sums[node][0] + 1, *(old + new for old, new in zip(sums[node][1:], values[place], strict=True))]
    return _nest_nodes(attribution, nodes, sums, trace.has_device_work)


def _nest_nodes(
    attribution: Attribution, nodes: dict[tuple[int, int], int], sums: list[list[int]], has_device: bool
) -> tuple[RegionNode, ...]:
    children: dict[int, list[RegionNode]] = {}
    for (above, name_id), node in reversed(nodes.items()):  # children stand after their parents
        label = attribution.labels[name_id]
        assert label is not None
        count, duration, own, device, own_device = sums[node]
        children.setdefault(above, []).append(
            RegionNode(
                region_id=label.region_id,
                calls=count,
                cpu_time_us=duration * _US,
                self_cpu_time_us=own * _US,
                device_time_us=device * _US if has_device else None,
                self_device_time_us=own_device * _US if has_device else None,
                children=tuple(reversed(children.get(node, []))),
            )
        )
    return tuple(reversed(children.get(-1, [])))


def _sum_by(group: IntArray, values: IntArray, size: int) -> list[float]:
    return np.bincount(group, weights=values, minlength=size).tolist() if len(group) else [0.0] * size


def _fraction(part: float, whole: float, of_nothing: float = 0.0) -> float:
    """Return part / whole. Of nothing, the residual is all and a region none, so that fractions still add up to 1."""
    return part / whole if whole > 0 else of_nothing


def _unattributed_ns(trace: Trace, attribution: Attribution) -> int:
    lost = (attribution.device_run < 0) & ~attribution.is_device_warmup
    return int(trace.duration_ns[trace.device_join.event[lost]].sum())


def _slow_first_run(runs: list[RunAttribution]) -> str | None:
    """Return what to say if the first of several runs is far slower than all others."""
    others_us = max((run.wall_time_us for run in runs[1:]), default=0.0)
    if len(runs) < _MIN_RUNS_TO_JUDGE or runs[0].wall_time_us < _SLOW_FIRST_RUN * others_us:
        return None
    return f"Run {runs[0].run_index} took {runs[0].wall_time_us:.0f} us, the slowest other one {others_us:.0f} us."


def _warnings(
    trace: Trace, attribution: Attribution, runs: list[RunAttribution], unattributed: int
) -> list[TraceWarning]:
    forest, join = trace.forest, trace.device_join
    is_outside = attribution.is_region & (attribution.run < 0) & ~attribution.is_warmup
    num_outside = int(is_outside.sum()) if runs else 0
    clamped = [run.run_index for run in runs if sum(row.cpu_time_us for row in run.regions) > run.cpu_time_us + 0.5]
    threaded = [run.run_index for run in runs if run.other_threads_cpu_time_us > 0]
    calls_runtime = np.isin(trace.category[forest.event], (Category.RUNTIME, Category.DRIVER)).any()
    found = {
        WarningCode.NO_RUNS: not runs and "The trace holds no profiled run.",
        WarningCode.NO_DEVICE_EVENTS: calls_runtime
        and not trace.has_device_work
        and "The host called a device runtime, but the trace holds no kernel, copy or fill.",
        WarningCode.NEGATIVE_RESIDUAL: clamped and f"Regions exceed their run in runs {clamped[:10]}.",
        WarningCode.FIRST_RUN_SLOW: _slow_first_run(runs),
        WarningCode.OVERLAPPING_SPANS: forest.num_overlaps and f"{forest.num_overlaps} host spans overlap.",
        WarningCode.EVENTS_OUTSIDE_RUNS: num_outside and f"{num_outside} region calls lie outside every run.",
        WarningCode.OTHER_THREADS: threaded and f"Other threads worked during runs {threaded[:10]}.",
        WarningCode.UNLINKED_DEVICE_EVENTS: join.num_unlinked
        and f"{join.num_unlinked} of {len(join.event)} device events have no launch in the window.",
        WarningCode.DUPLICATED_CORRELATION: join.num_duplicated
        and f"{join.num_duplicated} device events have a correlation id of several launches.",
        WarningCode.AMBIGUOUS_CORRELATION: join.num_ambiguous
        and f"{join.num_ambiguous} device events could belong to several processes.",
        WarningCode.AMBIGUOUS_SEQUENCE_NUMBERS: attribution.num_ambiguous_sequences
        and f"{attribution.num_ambiguous_sequences} backward operators have no certain forward operator.",
        WarningCode.UNATTRIBUTED_DEVICE_TIME: runs
        and unattributed
        and f"{unattributed * _US:.1f} us of device work belong to no run.",
    }
    return [
        TraceWarning(code=code, message=message, source=_SOURCE)
        for code, message in found.items()
        if isinstance(message, str)
    ]
