"""The device's side of a trace: busy and idle time by interval union, streams, copies, communication."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfladder.text import plural
from perfladder.trace.attribution import Attribution
from perfladder.trace.intervals import Union, overlap_ns, unite
from perfladder.trace.model import ABSENT, BoolArray, Category, IntArray, Trace
from perfladder.trace.rows import Row
from perfladder.trace.runtime_calls import classify_copy, is_communication
from perfladder.trace.warnings import TraceWarning, WarningCode

_US: Final = 1e-3
_SOURCE: Final = "trace.timeline"
_OVERLAP_FRAC: Final = 0.005
"""Kernels that start while the one before drains overlap by so little, and no number changes by it."""


class StreamRow(Row):
    """One stream: `busy_us` is the union of its events, `sum_us` the sum of their durations; None is unknown."""

    device: int | None
    stream: int | None
    num_events: int
    busy_us: float
    sum_us: float


class DeviceRow(Row):
    """One device over the window from its first to its last event; `busy_us` is the union over its streams."""

    device: int | None
    num_events: int
    window_us: float
    busy_us: float
    idle_us: float
    busy_frac: float


class CopyRow(Row):
    """All copies of one kind (`HtoD`, `DtoH`, `DtoD`, `PtoP`, `HtoH`, `unknown`).

    `num_bytes` and `bandwidth_gb_per_s` (achieved, 10**9 bytes) are None if a copy of the kind does not say its size.
    """

    kind: str
    count: int
    total_us: float
    num_bytes: int | None
    bandwidth_gb_per_s: float | None


class CommunicationRow(Row):
    """All kernels (or host spans, for gloo) of one collective."""

    name: str
    device_type: str
    count: int
    total_us: float


class Overlap(Row):
    """Communication against compute on the devices, as unions; `overlap_frac` is the hidden part of communication."""

    communication_us: float
    compute_us: float
    overlap_us: float
    exposed_communication_us: float
    overlap_frac: float | None


class Timeline(Row):
    """What the devices did in the window. A trace without device work has no devices, streams or copies."""

    devices: tuple[DeviceRow, ...]
    streams: tuple[StreamRow, ...]
    copies: tuple[CopyRow, ...]
    communication: tuple[CommunicationRow, ...]
    overlap: Overlap | None
    warnings: tuple[TraceWarning, ...]


def report_timeline(trace: Trace, attribution: Attribution | None = None) -> Timeline:
    """Summarize the device rows of a trace; synchronization rows and annotations are no work and do not count.

    Args:
        trace: The trace.
        attribution: Tells what belongs to a warm-up inside the window and is left out; None counts everything.
    """
    counted = np.ones(trace.num_events, bool)
    if attribution is not None:
        counted[trace.device_join.event[attribution.is_device_warmup]] = False
        counted[trace.forest.event[attribution.is_warmup]] = False
    event = trace.device_join.event
    event = event[counted[event]]
    device = device_of(trace, event)
    stream = stream_of(trace, event)
    streams = _stream_rows(trace, event, device, stream)
    overlaps = [row for row in streams if row.sum_us - row.busy_us > 1.0 + _OVERLAP_FRAC * row.busy_us]
    message = (
        f"Device events of {plural(len(overlaps), 'stream')} overlap, for "
        f"{sum(row.sum_us - row.busy_us for row in overlaps):.1f} us of {sum(row.busy_us for row in overlaps):.1f}."
    )
    warning = TraceWarning(code=WarningCode.DEVICE_EVENTS_OVERLAP, message=message, source=_SOURCE)
    return Timeline(
        devices=tuple(_device_rows(trace, event, device)),
        streams=tuple(streams),
        copies=tuple(_copy_rows(trace, event)),
        communication=tuple(_communication_rows(trace, counted)),
        overlap=_overlap(trace, event, device),
        warnings=(warning,) if overlaps else (),
    )


def device_of(trace: Trace, event: IntArray) -> IntArray:
    """Return each event's device: its argument, else the process column, which holds the device on device rows."""
    by_pid = np.array([value if isinstance(value, int) else ABSENT for value in trace.pids], np.int64)
    return np.where(trace.device[event] >= 0, trace.device[event], by_pid[trace.pid[event]])


def stream_of(trace: Trace, event: IntArray) -> IntArray:
    """Return each event's stream: its argument, else the thread column, which holds the stream on device rows."""
    by_tid = np.array([value if isinstance(value, int) else ABSENT for value in trace.tids], np.int64)
    return np.where(trace.stream[event] >= 0, trace.stream[event], by_tid[trace.tid[event]])


def _union(trace: Trace, event: IntArray) -> Union:
    return unite(trace.start_ns[event], trace.end_ns[event])


def _stream_rows(trace: Trace, event: IntArray, device: IntArray, stream: IntArray) -> list[StreamRow]:
    rows = []
    for number, name in sorted(set(zip(device.tolist(), stream.tolist(), strict=True))):
        mine = event[(device == number) & (stream == name)]
        rows.append(
            StreamRow(
                device=_known(number),
                stream=_known(name),
                num_events=len(mine),
                busy_us=_union(trace, mine).total_ns * _US,
                sum_us=int(trace.duration_ns[mine].sum()) * _US,
            )
        )
    return rows


def _device_rows(trace: Trace, event: IntArray, device: IntArray) -> list[DeviceRow]:
    rows = []
    for number in np.unique(device).tolist():
        mine = event[device == number]
        busy_ns = _union(trace, mine).total_ns
        window_ns = int(trace.end_ns[mine].max() - trace.start_ns[mine].min())
        rows.append(
            DeviceRow(
                device=_known(number),
                num_events=len(mine),
                window_us=window_ns * _US,
                busy_us=busy_ns * _US,
                idle_us=(window_ns - busy_ns) * _US,
                busy_frac=busy_ns / window_ns if window_ns else 1.0,
            )
        )
    return rows


def _copy_rows(trace: Trace, event: IntArray) -> list[CopyRow]:
    copies = event[trace.category[event] == Category.GPU_MEMCPY]
    kinds = np.array([classify_copy(name) for name in trace.names], dtype=object)[trace.name_id[copies]]
    rows = []
    for kind in dict.fromkeys(kinds.tolist()):
        mine = copies[kinds == kind]
        total_ns = int(trace.duration_ns[mine].sum())
        sizes = trace.num_bytes[mine]
        num_bytes = int(sizes.sum()) if (sizes >= 0).all() else None
        rows.append(
            CopyRow(
                kind=kind,
                count=len(mine),
                total_us=total_ns * _US,
                num_bytes=num_bytes,
                bandwidth_gb_per_s=num_bytes / total_ns if num_bytes is not None and total_ns else None,
            )
        )
    return sorted(rows, key=lambda row: -row.total_us)


def _communication_rows(trace: Trace, counted: BoolArray) -> list[CommunicationRow]:
    is_communication_name = np.array([is_communication(name) for name in trace.names], bool)
    rows = []
    for device_type, categories in (
        (trace.device_types[-1], (Category.KERNEL,)),
        ("CPU", (Category.CPU_OP, Category.USER_ANNOTATION)),
    ):
        events = trace.events_of(*categories)
        events = events[is_communication_name[trace.name_id[events]] & counted[events]]
        for name_id in np.unique(trace.name_id[events]).tolist():
            mine = events[trace.name_id[events] == name_id]
            rows.append(
                CommunicationRow(
                    name=trace.names[name_id],
                    device_type=device_type,
                    count=len(mine),
                    total_us=int(trace.duration_ns[mine].sum()) * _US,
                )
            )
    return sorted(rows, key=lambda row: -row.total_us)


def _overlap(trace: Trace, event: IntArray, device: IntArray) -> Overlap | None:
    """Overlap within each device, then summed; None without communication kernels."""
    is_communication_name = np.array([is_communication(name) for name in trace.names], bool)
    is_kernel = trace.category[event] == Category.KERNEL
    is_communicating = is_kernel & is_communication_name[trace.name_id[event]]
    if not is_communicating.any():
        return None
    communication_ns = compute_ns = both_ns = 0
    for number in np.unique(device).tolist():
        communication = _union(trace, event[is_communicating & (device == number)])
        compute = _union(trace, event[is_kernel & ~is_communicating & (device == number)])
        communication_ns += communication.total_ns
        compute_ns += compute.total_ns
        both_ns += overlap_ns(communication, compute)
    return Overlap(
        communication_us=communication_ns * _US,
        compute_us=compute_ns * _US,
        overlap_us=both_ns * _US,
        exposed_communication_us=(communication_ns - both_ns) * _US,
        overlap_frac=both_ns / communication_ns if communication_ns else None,
    )


def _known(number: int) -> int | None:
    return None if number < 0 else number
