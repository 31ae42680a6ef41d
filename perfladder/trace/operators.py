"""The operator table: per name the count, self and total times on host and device, as torch's own aggregation counts.

torch leaves out a span whose parent has the same name and no other child (an operator that redispatches to itself); its
self time stays with that parent. The same rule holds here, without ever calling torch's own, slow aggregation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from pydantic import Field

from perfladder.trace.attribution import Attribution, attribute
from perfladder.trace.dynamo import RUNTIME_NAME, is_runtime
from perfladder.trace.model import DEVICE_WORK, BoolArray, Category, IntArray, Trace
from perfladder.trace.nesting import Forest
from perfladder.trace.rows import Row
from perfladder.trace.sums import count_by, sum_by

SortKey = Literal["cpu_time_total", "device_time_total"]
_STEP: Final = re.compile(r"^ProfilerStep#\d+$")
_US: Final = 1e-3
_NOWHERE: Final = np.int32(-1)


class OperatorRow(Row):
    """One operator, runtime call, annotation or kernel over the window, in microseconds.

    Device times are None on a trace without device work. On a host row they are the device work launched inside; on a
    device row they are the kernel's own time, or an annotation's span on the device's timeline with its gaps.
    """

    key: str
    device_type: str
    count: int
    self_cpu_time_total_us: float
    cpu_time_total_us: float
    self_device_time_total_us: float | None
    device_time_total_us: float | None
    is_annotation: bool = Field(default=False, exclude=True)


def operator_table(
    trace: Trace, *, only_runs: bool = False, attribution: Attribution | None = None
) -> list[OperatorRow]:
    """Aggregate the trace by name, host rows first; rows of one name are told apart by device type and annotation.

    Args:
        trace: The trace.
        only_runs: Count only what belongs to a profiled run, not a warm-up in the same window.
        attribution: The trace's attribution if it is there already; made if `only_runs` needs it.
    """
    if only_runs and attribution is None:
        attribution = attribute(trace)
    inside = attribution.run >= 0 if only_runs and attribution is not None else None
    return _host_rows(trace, inside) + _device_rows(trace, attribution if only_runs else None)


def top_operators(rows: Sequence[OperatorRow], by: SortKey = "cpu_time_total", limit: int = 20) -> list[OperatorRow]:
    """Return the rows with the largest total on the host, or on the device, where rows without any are left out.

    What the runtime of `torch.compile` takes for itself is one row, whose total is that self time.
    """
    rows = _with_runtime_as_one(rows)
    if by == "cpu_time_total":
        return sorted(rows, key=lambda row: -row.cpu_time_total_us)[:limit]
    timed = [row for row in rows if row.device_time_total_us]
    return sorted(timed, key=lambda row: -(row.device_time_total_us or 0.0))[:limit]


def _with_runtime_as_one(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    """Merge the rows of the runtime's spans: of their totals, which hold operators and each other, self times stay."""
    runtime, others = list[OperatorRow](), list[OperatorRow]()
    for row in rows:
        is_own = row.device_type == "CPU" and not row.is_annotation and is_runtime(row.key)
        (runtime if is_own else others).append(row)
    if not runtime:
        return others
    self_us = sum(row.self_cpu_time_total_us for row in runtime)
    device = [row.self_device_time_total_us for row in runtime if row.self_device_time_total_us is not None]
    device_us = sum(device) if device else None
    merged = OperatorRow(
        key=RUNTIME_NAME,
        device_type="CPU",
        count=sum(row.count for row in runtime),
        self_cpu_time_total_us=self_us,
        cpu_time_total_us=self_us,
        self_device_time_total_us=device_us,
        device_time_total_us=device_us,
    )
    return [*others, merged]


def key_averages(trace: Trace, *, limit: int = 20, only_runs: bool = False) -> dict[str, list[OperatorRow]]:
    """Return the two bounded views of the operator table; the device view only if the trace holds device work."""
    rows = operator_table(trace, only_runs=only_runs)
    views = {"cpu_time_total": top_operators(rows, "cpu_time_total", limit)}
    if trace.has_device_work:
        views["device_time_total"] = top_operators(rows, "device_time_total", limit)
    return views


def _host_rows(trace: Trace, inside: BoolArray | None) -> list[OperatorRow]:
    forest = trace.forest
    is_dropped = find_redispatched(forest)
    is_annotation = trace.category[forest.event] == Category.USER_ANNOTATION
    key = _table_names(trace)[forest.name_id] * 2 + is_annotation
    if is_dropped.any():
        key = key[forest.innermost(~is_dropped)]
    if inside is not None:
        key = np.where(inside, key, _NOWHERE)
    size = int(key.max(initial=-1)) + 1
    columns = [sum_by(key, forest.self_ns, size) * _US]
    has_device = trace.has_device_work
    own_device = device_time_by_span(trace) if has_device else None
    if own_device is not None:
        columns.append(sum_by(key, own_device, size) * _US)
    key[is_dropped] = _NOWHERE
    count = count_by(key, size)
    columns.insert(1, sum_by(key, forest.duration_ns, size) * _US)
    if own_device is not None:
        columns.append(sum_by(key, forest.sum_up(own_device), size) * _US)
    names = [_STEP.sub("ProfilerStep*", name) for name in trace.names]
    return [
        OperatorRow(
            key=names[code // 2],
            device_type="CPU",
            count=int(count[code]),
            self_cpu_time_total_us=float(columns[0][code]),
            cpu_time_total_us=float(columns[1][code]),
            self_device_time_total_us=float(columns[2][code]) if has_device else None,
            device_time_total_us=float(columns[3][code]) if has_device else None,
            is_annotation=bool(code % 2),
        )
        for code in np.flatnonzero(count).tolist()
    ]


def _device_rows(trace: Trace, attribution: Attribution | None) -> list[OperatorRow]:
    events = trace.events_of(*DEVICE_WORK, Category.GPU_ANNOTATION)
    if attribution is not None:
        events = events[_in_runs(trace, attribution, events)]
    is_annotation = trace.category[events] == Category.GPU_ANNOTATION
    key = _table_names(trace)[trace.name_id[events]] * 2 + is_annotation
    size = int(key.max(initial=-1)) + 1
    count = np.bincount(key, minlength=size)
    total = np.bincount(key, weights=trace.duration_ns[events], minlength=size) * _US
    return [
        OperatorRow(
            key=_STEP.sub("ProfilerStep*", trace.names[code // 2]),
            device_type=trace.device_types[-1],
            count=int(count[code]),
            self_cpu_time_total_us=0.0,
            cpu_time_total_us=0.0,
            self_device_time_total_us=float(total[code]),
            device_time_total_us=float(total[code]),
            is_annotation=bool(code % 2),
        )
        for code in np.flatnonzero(count).tolist()
    ]


def _in_runs(trace: Trace, attribution: Attribution, events: IntArray) -> BoolArray:
    """Which device rows belong to a run: work by its launch, an annotation by lying among the runs' work."""
    is_in_run = np.zeros(trace.num_events, bool)
    work = trace.device_join.event[attribution.device_run >= 0]
    is_in_run[work] = True
    if len(work):
        low, high = trace.start_ns[work].min(), trace.end_ns[work].max()
        is_annotation = trace.category == Category.GPU_ANNOTATION
        is_in_run |= is_annotation & (trace.start_ns >= low) & (trace.start_ns < high)
    return is_in_run[events]


def find_redispatched(forest: Forest) -> BoolArray:
    """Return which spans torch's aggregation leaves out: the parent has the same name and no other child."""
    parent = np.maximum(forest.parent, 0)
    if not forest.num_spans:
        return np.zeros(0, bool)
    return (forest.parent >= 0) & (forest.name_id == forest.name_id[parent]) & (forest.num_children[parent] == 1)


def device_time_by_span(trace: Trace) -> IntArray:
    """Return, for each host span, the device work in ns whose innermost operator or annotation it is."""
    forest, join = trace.forest, trace.device_join
    linked = join.host >= 0
    if not linked.any():
        return np.zeros(forest.num_spans, np.int64)
    category = trace.category[forest.event]
    owner = forest.innermost((category == Category.CPU_OP) | (category == Category.USER_ANNOTATION))
    owners = owner[join.host[linked]]
    durations = trace.duration_ns[join.event[linked]]
    has_owner = owners >= 0
    return np.bincount(owners[has_owner], weights=durations[has_owner], minlength=forest.num_spans).astype(np.int64)


def _table_names(trace: Trace) -> IntArray:
    """Return, for each name id, the id of the name it is counted under: profiler steps are one row."""
    ids = np.arange(len(trace.names), dtype=np.int32)
    steps = [index for index, name in enumerate(trace.names) if _STEP.match(name)]
    if steps:
        ids[steps] = steps[0]
    return ids
