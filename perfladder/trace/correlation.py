"""Joins device work with the host call that launched it, by correlation id within one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from perfladder.trace.model import DEVICE_WORK, Category, IntArray
from perfladder.trace.nesting import ROOT, Forest

if TYPE_CHECKING:
    from perfladder.trace.model import Trace

_UNKNOWN: Final = -1


@dataclass(frozen=True, eq=False)
class DeviceJoin:
    """One entry for each kernel, copy and fill of a trace.

    Attributes:
        event: Index into the trace.
        launch: Position in the host forest of the runtime or driver call that launched it, or -1.
        host: Position in the host forest from which to look for its operator and region: the launch, or the operator
            that its external id names where the launch is missing or stands outside every operator; -1 if unlinked.
        num_duplicated: Device events whose correlation id several launches of their process carry.
        num_ambiguous: Device events that could belong to several processes.
    """

    event: IntArray
    launch: IntArray
    host: IntArray
    num_duplicated: int
    num_ambiguous: int

    @property
    def num_unlinked(self) -> int:
        """Device events that no host span of the window launched."""
        return int((self.host < 0).sum())


def join_device_work(trace: Trace) -> DeviceJoin:
    """Join each kernel, copy and fill with its launch; one launch may own many (a graph launch does)."""
    forest = trace.forest
    events = trace.events_of(*DEVICE_WORK)
    if not len(events):
        empty = np.empty(0, np.int64)
        return DeviceJoin(event=events, launch=empty, host=empty, num_duplicated=0, num_ambiguous=0)
    category = trace.category[forest.event]
    correlation = trace.correlation[forest.event]
    launches = np.flatnonzero(((category == Category.RUNTIME) | (category == Category.DRIVER)) & (correlation > 0))
    process = _process_of_devices(trace, events, launches)
    launch, num_duplicated = _match_launches(trace, events, process, launches)
    is_bare = launch < 0
    is_bare[~is_bare] = forest.parent[launch[~is_bare]] < 0
    host = launch.copy()
    operators = _operators_by_external_id(trace, events[is_bare], process[is_bare])
    host[is_bare] = np.where(operators >= 0, operators, launch[is_bare])
    is_ambiguous = (process == _UNKNOWN) & (host < 0) & np.isin(trace.correlation[events], correlation[launches])
    return DeviceJoin(
        event=events,
        launch=launch,
        host=host,
        num_duplicated=num_duplicated,
        num_ambiguous=int(is_ambiguous.sum()),
    )


def _process_of_devices(trace: Trace, events: IntArray, launches: IntArray) -> IntArray:
    """Return the host process (index into `trace.pids`) of each device event, or -1 where several are possible.

    A device row carries the device's index where a host row carries its process, so in a file of several processes the
    process is learned from the correlation ids that only one of them uses.
    """
    host_pids = trace.pid[trace.forest.event]
    processes = np.unique(host_pids)
    if len(processes) == 1:
        return np.full(len(events), processes[0], np.int64)
    device_pids = trace.pid[events]
    candidates = _processes_by_correlation(trace, launches, host_pids)
    process = np.full(len(events), _UNKNOWN, np.int64)
    single = np.array([candidates.get(value, _UNKNOWN) for value in trace.correlation[events].tolist()], np.int64)
    for device_pid in np.unique(device_pids).tolist():
        is_here = device_pids == device_pid
        if device_pid in processes:
            process[is_here] = device_pid
            continue
        votes = np.unique(single[is_here & (single >= 0)])
        process[is_here] = votes[0] if len(votes) == 1 else single[is_here]
    return process


def _processes_by_correlation(trace: Trace, launches: IntArray, host_pids: IntArray) -> dict[int, int]:
    """Return the process of each correlation id that only one process uses."""
    found: dict[int, int] = {}
    values = trace.correlation[trace.forest.event[launches]].tolist()
    for value, pid in zip(values, host_pids[launches].tolist(), strict=True):
        found[value] = pid if found.get(value, pid) == pid else _UNKNOWN
    return found


def _match_launches(trace: Trace, events: IntArray, process: IntArray, launches: IntArray) -> tuple[IntArray, int]:
    """Return the launch of each device event: of several with its id, the latest that starts before it."""
    forest = trace.forest
    matched = np.full(len(events), ROOT, np.int64)
    if not len(launches):
        return matched, 0
    # One key for each (correlation id, process); ids are ranked first, so that the product cannot overflow.
    source, num_pids = forest.event[launches], len(trace.pids)
    values = np.unique(trace.correlation[source])
    launch_key = np.searchsorted(values, trace.correlation[source]) * num_pids + trace.pid[source]
    order = np.lexsort((forest.start_ns[launches], launch_key))
    launches, launch_key = launches[order], launch_key[order]
    rank = np.minimum(np.searchsorted(values, trace.correlation[events]), len(values) - 1)
    is_known = (values[rank] == trace.correlation[events]) & (process >= 0)
    key = np.where(is_known, rank * num_pids + process, ROOT)
    low = np.searchsorted(launch_key, key, side="left")
    high = np.searchsorted(launch_key, key, side="right")
    single = high - low == 1
    matched[single] = launches[low[single]]
    several = np.flatnonzero(high - low > 1)
    for index in several.tolist():
        choices = launches[low[index] : high[index]]
        later = int(np.searchsorted(forest.start_ns[choices], trace.start_ns[events[index]], side="right"))
        matched[index] = choices[max(later - 1, 0)]
    return matched, len(several)


def _operators_by_external_id(trace: Trace, events: IntArray, process: IntArray) -> IntArray:
    """Return the position of the operator that each device event's external id names, or -1."""
    if not (trace.external_id[events] > 0).any():
        return np.full(len(events), ROOT, np.int64)
    forest: Forest = trace.forest
    is_operator = np.isin(trace.category[forest.event], (Category.CPU_OP, Category.USER_ANNOTATION))
    is_operator &= trace.external_id[forest.event] > 0
    positions = np.flatnonzero(is_operator)
    source = forest.event[positions]
    table = dict(
        zip(
            zip(trace.pid[source].tolist(), trace.external_id[source].tolist(), strict=True),
            positions.tolist(),
            strict=True,
        )
    )
    pairs = zip(process.tolist(), trace.external_id[events].tolist(), strict=True)
    return np.array([table.get(pair, ROOT) if pair[1] > 0 else ROOT for pair in pairs], np.int64)
