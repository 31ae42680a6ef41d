"""What host time is made of outside (or inside) regions, and why the device was idle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np

from perfladder.trace.attribution import Attribution
from perfladder.trace.dynamo import find_wrappers, is_runtime
from perfladder.trace.intervals import unite
from perfladder.trace.labels import GC_KIND
from perfladder.trace.model import BoolArray, Category, IntArray, Trace
from perfladder.trace.rows import Row
from perfladder.trace.runtime_calls import CallKind, classify_call, classify_copy
from perfladder.trace.sums import slices

_US: Final = 1e-3
_WORK_NS: Final = 5_000
"""Self time of an operator on a CPU below which dispatch is most of it: an empty one takes 1 to 3 us, profiled."""
_RUNTIME_OVERHEAD: Final = re.compile(r"lazy|command buffer|uvm|compiler", re.IGNORECASE)
NO_OPERATOR: Final = "(no operator)"


class Part(IntEnum):
    """One part of host time; each span's self time falls into exactly one."""

    PYTHON = 0
    OPERATOR_DISPATCH = 1
    OPERATOR_COMPUTE = 2
    KERNEL_LAUNCH = 3
    SYNCHRONIZATION = 4
    COPY_H2D = 5
    COPY_D2H = 6
    COPY_OTHER = 7
    RUNTIME_OTHER = 8
    GARBAGE_COLLECTION = 9
    PROFILER = 10


class SyncSite(Row):
    """One place that made the host wait for the device.

    Attributes:
        operator: Innermost operator around the wait, e.g. `aten::_local_scalar_dense`.
        outer_operator: Outermost operator around it, e.g. `aten::item`: what the program called.
        call: The runtime call, e.g. `cudaStreamSynchronize`.
        region_id: Innermost region around it; None outside every region.
        count: Number of waits.
        total_us: Time waited on the host.
    """

    operator: str
    outer_operator: str
    call: str
    region_id: str | None
    count: int
    total_us: float


class HostSplit(Row):
    """Host time of the run's own thread by what it was spent on, in us. The parts are self times and do not overlap.

    Attributes:
        python_us: Outside every operator and runtime call: Python, and what the profiler does not see.
        operator_dispatch_us: Operators' self time where a device does the work; on a host-only trace that of operators
            with less than 5 us each, and of the runtime of `torch.compile`.
        operator_compute_us: Self time of operators with 5 us or more each, on a host-only trace: they do the work.
        kernel_launch_us: Calls that launch kernels, graphs and fills.
        synchronization_us: Calls that wait for the device.
        copy_h2d_us: Calls that copy to the device (host time, not the copy's own).
        copy_d2h_us: Calls that copy to the host, their waiting included.
        copy_other_us: Other copies, and those whose device side is not in the trace.
        runtime_other_us: Other runtime calls: allocation, events, attributes.
        garbage_collection_us: Python's garbage collector, where it was marked.
        profiler_us: The profiler's own work as the device's tracing library reports it, such as requesting buffers; an
            unprofiled run does not pay it.
        num_operators: Operators that the program called; what these call inside is not counted.
        synchronizations: Where the waits were, the longest first.
    """

    python_us: float
    operator_dispatch_us: float
    operator_compute_us: float
    kernel_launch_us: float
    synchronization_us: float
    copy_h2d_us: float
    copy_d2h_us: float
    copy_other_us: float
    runtime_other_us: float
    garbage_collection_us: float
    profiler_us: float = 0.0
    num_operators: int = 0
    synchronizations: tuple[SyncSite, ...] = ()

    @property
    def total_us(self) -> float:
        """Sum of the parts."""
        return sum(getattr(self, f"{part.name.lower()}_us") for part in Part)


class IdleSplit(Row):
    """Device time of a run, all streams together, in us.

    Attributes:
        window_us: From the run's start to its end, or to the end of its last device work if that is later.
        busy_us: Time during which any kernel, copy or fill ran.
        idle_us: The rest of the window.
        waiting_for_launch_us: Idle while the host had not begun the next launch and was not waiting itself.
        in_synchronization_us: Idle while the host waited for the device instead of launching.
        other_us: Idle although the next work was launched: launch latency, dependencies; or the launch is unknown.
        edge_us: Of the idle time, that before the first and after the last work.
    """

    window_us: float
    busy_us: float
    idle_us: float
    waiting_for_launch_us: float
    in_synchronization_us: float
    other_us: float
    edge_us: float = 0.0


@dataclass(frozen=True, eq=False)
class HostParts:
    """Each host span's part, computed once for a trace; `split` sums them over any set of spans."""

    trace: Trace
    attribution: Attribution

    @cached_property
    def part(self) -> IntArray:
        """Return the `Part` of each host span's self time."""
        trace, forest = self.trace, self.trace.forest
        category = trace.category[forest.event]
        is_label = np.array([label is not None for label in trace.labels], bool)[forest.name_id]
        is_gc_name = np.array([label is not None and label.kind == GC_KIND for label in trace.labels], bool)
        part = np.full(forest.num_spans, Part.PYTHON, np.int8)
        is_operator = (category == Category.CPU_OP) & ~is_label
        dispatches = np.array([is_runtime(name) for name in trace.names], bool)[forest.name_id]
        computes = is_operator & ~dispatches & (forest.self_ns >= _WORK_NS) & (not trace.has_device_work)
        part[is_operator] = Part.OPERATOR_DISPATCH
        part[computes] = Part.OPERATOR_COMPUTE
        is_call = (category == Category.RUNTIME) | (category == Category.DRIVER)
        part[is_call] = self._parts_of_calls(np.flatnonzero(is_call))
        is_overhead = category == Category.OVERHEAD
        if is_overhead.any():
            names = [_part_of_overhead(name) for name in trace.names]
            part[is_overhead] = np.array(names, np.int8)[forest.name_id[is_overhead]]
        if is_gc_name.any():
            part[forest.innermost(is_gc_name[forest.name_id]) >= 0] = Part.GARBAGE_COLLECTION
        return part

    @cached_property
    def waits(self) -> IntArray:
        """Positions of the calls in which the host waits for the device."""
        return np.flatnonzero(self.part == Part.SYNCHRONIZATION)

    def _parts_of_calls(self, positions: IntArray) -> IntArray:
        trace, forest, join = self.trace, self.trace.forest, self.trace.device_join
        by_kind = {
            CallKind.OTHER: Part.RUNTIME_OTHER,
            CallKind.LAUNCH: Part.KERNEL_LAUNCH,
            CallKind.SYNCHRONIZE: Part.SYNCHRONIZATION,
            CallKind.COPY: Part.COPY_OTHER,
        }
        by_name = np.array([by_kind[classify_call(name)] for name in trace.names], np.int64)
        part = np.zeros(forest.num_spans, np.int64)
        part[positions] = by_name[forest.name_id[positions]]
        copies = {"HtoD": Part.COPY_H2D, "DtoH": Part.COPY_D2H}
        copy_part = np.array([copies.get(classify_copy(name), Part.COPY_OTHER) for name in trace.names], np.int64)
        is_copy = (trace.category[join.event] == Category.GPU_MEMCPY) & (join.launch >= 0)
        launches = join.launch[is_copy]
        is_copy_call = part[launches] == Part.COPY_OTHER
        part[launches[is_copy_call]] = copy_part[trace.name_id[join.event[is_copy][is_copy_call]]]
        return part[positions]

    def split(self, chosen: BoolArray, group: IntArray, num_groups: int) -> list[HostSplit]:
        """Sum the self times of the chosen spans by part, for each group.

        Args:
            chosen: Which host spans count.
            group: Each span's group, such as its run.
            num_groups: Number of groups.
        """
        sums = np.zeros((num_groups, len(Part)))
        for part in slices(len(chosen)):
            code = group[part][chosen[part]].astype(np.int64) * len(Part) + self.part[part][chosen[part]]
            own_ns = self.trace.forest.self_ns[part][chosen[part]]
            sums += np.bincount(code, weights=own_ns, minlength=sums.size).reshape(sums.shape)
        called = np.bincount(group[chosen & self._is_called], minlength=num_groups)
        waits = self.waits[chosen[self.waits]]
        sites = self._sites(waits, group[waits])
        return [
            HostSplit(
                **{f"{kind.name.lower()}_us": float(sums[index, kind]) * _US for kind in Part},
                num_operators=int(called[index]),
                synchronizations=tuple(sites.get(index, ())),
            )
            for index in range(num_groups)
        ]

    @cached_property
    def _operators(self) -> tuple[IntArray, IntArray]:
        forest = self.trace.forest
        is_label = np.array([label is not None for label in self.trace.labels], bool)[forest.name_id]
        is_operator = (self.trace.category[forest.event] == Category.CPU_OP) & ~is_label
        is_operator &= ~find_wrappers(self.trace)[forest.name_id]
        return forest.innermost(is_operator), forest.outermost(is_operator, barrier=self.attribution.is_region)

    @cached_property
    def _is_called(self) -> BoolArray:
        """Whether each span is an operator that no other operator called."""
        outer = self._operators[1]
        return outer == np.arange(len(outer))

    def place_of(self, position: int) -> tuple[str, str, str, str | None]:
        """Innermost and outermost operator around a call, its own name, and the region that it lies in."""
        trace, forest = self.trace, self.trace.forest
        inner, outer = self._operators
        region = int(self.attribution.region[position])
        label = self.attribution.labels[forest.name_id[region]] if region >= 0 else None
        return (
            _name(trace, int(inner[position])),
            _name(trace, int(outer[position])),
            trace.names[forest.name_id[position]],
            label.region_id if label else None,
        )

    def _sites(self, waits: IntArray, groups: IntArray) -> dict[int, list[SyncSite]]:
        totals: dict[tuple[int, tuple[str, str, str, str | None]], list[int]] = {}
        for position, group in zip(waits.tolist(), groups.tolist(), strict=True):
            entry = totals.setdefault((group, self.place_of(position)), [0, 0])
            entry[0] += 1
            entry[1] += int(self.trace.forest.self_ns[position])
        sites: dict[int, list[SyncSite]] = {}
        for (group, place), (count, total_ns) in sorted(totals.items(), key=lambda item: -item[1][1]):
            site = SyncSite(
                operator=place[0],
                outer_operator=place[1],
                call=place[2],
                region_id=place[3],
                count=count,
                total_us=total_ns * _US,
            )
            sites.setdefault(group, []).append(site)
        return sites


def _part_of_overhead(name: str) -> Part:
    """Return the part of a CUPTI overhead row by its name: loading kernels and full queues are the runtime's own."""
    return Part.RUNTIME_OTHER if _RUNTIME_OVERHEAD.search(name) else Part.PROFILER


def _is_seen(trace: Trace, attribution: Attribution, run: int) -> BoolArray:
    """Which device work keeps a run's devices busy: all of its process, that of other runs and of none included."""
    run_pid = trace.pid[trace.forest.event[attribution.run_spans]]
    if (run_pid == run_pid[0]).all():
        return np.ones(len(attribution.device_run), bool)
    is_same = np.append(run_pid == run_pid[run], False)  # the last entry stands for no run
    return is_same[attribution.device_run]


def _name(trace: Trace, position: int) -> str:
    return trace.names[trace.forest.name_id[position]] if position >= 0 else NO_OPERATOR


def split_idle(trace: Trace, attribution: Attribution, parts: HostParts, run: int) -> IdleSplit:
    """Split a run's device time into busy and idle, and the idle time by its reason.

    Before each piece of device work, the device is idle for want of a launch until the host enters the launching call;
    what of that the run's thread spends in a synchronizing call is its own part. The rest is latency or dependency.
    """
    forest, join = trace.forest, trace.device_join
    span = attribution.run_spans[run]
    own_end_ns = trace.end_ns[join.event[attribution.device_run == run]]
    low, high = int(forest.start_ns[span]), int(own_end_ns.max(initial=forest.end_ns[span]))
    waits = parts.waits[(attribution.run[parts.waits] == run) & attribution.is_on_run_thread[parts.waits]]
    return _split_idle(trace, low, high, _is_seen(trace, attribution, run), waits)


def split_window_idle(trace: Trace, parts: HostParts) -> IdleSplit | None:
    """Split the device time of the whole trace without its warm-ups; None without device work."""
    forest, attribution = trace.forest, parts.attribution
    seen, host = ~attribution.is_device_warmup, ~attribution.is_warmup
    event = trace.device_join.event[seen]
    if not len(event):
        return None
    low = min(int(trace.start_ns[event].min()), int(forest.start_ns[host].min(initial=np.iinfo(np.int64).max)))
    end = max(int(trace.end_ns[event].max()), int(forest.end_ns[host].max(initial=0)))
    return _split_idle(trace, low, end, seen, parts.waits)


def _split_idle(trace: Trace, low: int, high: int, seen: BoolArray, waits: IntArray) -> IdleSplit:
    """Split the time from `low` to `high` by the seen device work and the host's waits (by position) that lie in it."""
    forest, join = trace.forest, trace.device_join
    mine = np.flatnonzero(seen & (trace.start_ns[join.event] < high) & (trace.end_ns[join.event] > low))
    start_ns, end_ns = trace.start_ns[join.event[mine]], trace.end_ns[join.event[mine]]
    start_ns = np.clip(start_ns, low, high)
    busy = unite(start_ns, np.clip(end_ns, low, high))
    gap_start = np.concatenate(([low], busy.end_ns))
    gap_end = np.concatenate((busy.start_ns, [high]))
    # Until when the device had nothing to do: the launch of what ends the gap; an unknown launch explains nothing.
    order = np.argsort(start_ns, kind="stable")
    first = order[np.searchsorted(start_ns[order], busy.start_ns)]
    launch = join.launch[mine][first]
    launch_ns = np.where(launch >= 0, forest.start_ns[np.maximum(launch, 0)], gap_start[:-1])
    until = np.concatenate((np.clip(launch_ns, gap_start[:-1], gap_end[:-1]), [high]))
    waiting = unite(forest.start_ns[waits], forest.end_ns[waits])
    in_sync = waiting.covered_within(gap_start, until)
    idle = int((gap_end - gap_start).sum())
    unlaunched = int((until - gap_start).sum())
    return IdleSplit(
        window_us=(high - low) * _US,
        busy_us=busy.total_ns * _US,
        idle_us=idle * _US,
        waiting_for_launch_us=(unlaunched - int(in_sync.sum())) * _US,
        in_synchronization_us=int(in_sync.sum()) * _US,
        other_us=(idle - unlaunched) * _US,
        edge_us=int(gap_end[0] - gap_start[0] + (gap_end[-1] - gap_start[-1] if len(gap_end) > 1 else 0)) * _US,
    )
