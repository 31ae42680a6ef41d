"""For each host span and each piece of device work: the run, the region and the topmost region that it belongs to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.trace.labels import FUNCTION_KIND, GC_KIND, LAUNCH_KIND, RUN_KIND, STEP_KIND, WARMUP_KIND, Label
from perfladder.trace.model import ABSENT, BoolArray, Category, IntArray, Trace
from perfladder.trace.nesting import ROOT, Forest

_RUN_KINDS: Final = (RUN_KIND, STEP_KIND)
_SPECIAL_KINDS: Final = frozenset({*_RUN_KINDS, GC_KIND, FUNCTION_KIND, LAUNCH_KIND, WARMUP_KIND})
MANAGED_KINDS: Final = frozenset({"aot_module", "jit_module"})
"""Kinds of regions that a surrounding region does not swallow in the flat set: the surrounding one is entered."""
NONE: Final = -1


@dataclass(frozen=True, eq=False)
class Attribution:
    """Where each host span (by position in `trace.forest`) and each piece of device work belongs.

    Arrays over device work have one entry for each one of `trace.device_join`.

    Attributes:
        labels: For each name of the trace, the label that regions and runs are told by: ours, or, in a trace that holds
            none of ours, what its `record_function` spans stand for.
        run_spans: Positions of the runs' spans, by start.
        run: For each span, the number of its run (index into `run_spans`), or -1. Spans of other threads belong to the
            run during which they start.
        is_region: Which spans are regions.
        is_opaque: Which regions stand in the flat set as a whole; the others are entered.
        is_exclusive: Which regions stand in the flat set with what no opaque region covers.
        region: For each span, the position of its innermost region, or -1. A backward operator on another thread
            belongs to the region of its forward operator.
        top: For each span, the position of its region in the flat, non-overlapping set, or -1.
        is_on_run_thread: Which spans lie, nested, under a run's span.
        device_run: For each piece of device work, its run or -1: by its launch, and by its own start if unlinked.
        device_region: For each piece of device work, the position of its innermost region, or -1.
        device_top: For each piece of device work, the position of its region in the flat set, or -1.
        is_warmup: Which spans belong to a warm-up inside the window.
        is_device_warmup: Which device work does.
        num_ambiguous_sequences: Backward operators whose forward operator is not certain.
    """

    labels: tuple[Label | None, ...]
    run_spans: IntArray
    run: IntArray
    is_region: BoolArray
    is_opaque: BoolArray
    is_exclusive: BoolArray
    region: IntArray
    top: IntArray
    is_on_run_thread: BoolArray
    device_run: IntArray
    device_region: IntArray
    device_top: IntArray
    is_warmup: BoolArray
    is_device_warmup: BoolArray
    num_ambiguous_sequences: int

    @property
    def num_runs(self) -> int:
        """Number of runs in the window."""
        return len(self.run_spans)


def attribute(
    trace: Trace,
    *,
    region_kinds: Collection[str] | None = None,
    managed_kinds: Collection[str] = MANAGED_KINDS,
    entered: Collection[str] = (),
    exclusive: Collection[str] = (),
) -> Attribution:
    """Attribute every span and every piece of device work to its run and regions.

    In a trace that holds no label of ours, annotations are the regions, and profiler steps the runs.

    Args:
        trace: The trace.
        region_kinds: Kinds of our labels that are regions; None takes all but runs, functions and garbage collections.
        managed_kinds: A region that holds one of these kinds anywhere in the trace is entered, not flat itself.
        entered: Ids of further regions to enter.
        exclusive: Ids of regions to enter that keep what no other flat region covers, such as the root's own methods.
    """
    forest = trace.forest
    is_ours = any(trace.labels)
    labels = trace.labels if is_ours else trace.annotation_labels
    kinds = [label.kind if label else "" for label in labels]
    carriers = (Category.CPU_OP, Category.USER_ANNOTATION) if is_ours else (Category.USER_ANNOTATION,)
    is_host_label = np.isin(trace.category[forest.event], carriers)
    wanted = np.array([_is_region_kind(kind, region_kinds) for kind in kinds], bool)
    is_region = wanted[forest.name_id] & is_host_label
    is_run = np.array([kind in _RUN_KINDS for kind in kinds], bool)[forest.name_id] & is_host_label
    region = forest.innermost(is_region)
    is_exclusive = is_region & _has_id(trace, labels, exclusive)
    is_entered = (
        _entered(trace, labels, is_region, region, managed_kinds) | _has_id(trace, labels, entered) | is_exclusive
    )
    is_opaque = is_region & ~is_entered
    top = forest.outermost(is_opaque)
    if is_exclusive.any():
        top = np.where(top >= 0, top, forest.innermost(is_exclusive))
    region, top, num_ambiguous = _follow_forward(trace, region, top)
    run_spans, run, nested = _runs(trace, is_run)
    is_warmup_span = np.array([kind == WARMUP_KIND for kind in kinds], bool)[forest.name_id] & is_host_label
    warmup_spans, warmup, _ = _runs(trace, is_warmup_span)
    join = trace.device_join
    host = join.host
    linked = host >= 0
    device_run = _unlinked_by_time(trace, run_spans, trace.start_ns[join.event])
    device_run[linked] = run[host[linked]]
    device_warmup = _unlinked_by_time(trace, warmup_spans, trace.start_ns[join.event])
    device_warmup[linked] = warmup[host[linked]]
    return Attribution(
        labels=labels,
        run_spans=run_spans,
        run=run,
        is_region=is_region,
        is_opaque=is_opaque,
        is_exclusive=is_exclusive,
        region=region,
        top=top,
        is_on_run_thread=nested,
        device_run=device_run,
        device_region=_spread(region, host),
        device_top=_spread(top, host),
        is_warmup=warmup >= 0,
        is_device_warmup=device_warmup >= 0,
        num_ambiguous_sequences=num_ambiguous,
    )


def _is_region_kind(kind: str, region_kinds: Collection[str] | None) -> bool:
    if not kind:
        return False
    return kind not in _SPECIAL_KINDS if region_kinds is None else kind in region_kinds


def _spread(values: IntArray, positions: IntArray) -> IntArray:
    if not len(values):
        return positions.copy()
    return np.where(positions >= 0, values[np.maximum(positions, 0)], values.dtype.type(NONE))


def _has_id(trace: Trace, labels: tuple[Label | None, ...], region_ids: Collection[str]) -> BoolArray:
    """Return which host spans carry a label of one of these ids."""
    wanted = [label is not None and label.region_id in region_ids for label in labels]
    return np.array(wanted, bool)[trace.forest.name_id]


def _entered(
    trace: Trace,
    labels: tuple[Label | None, ...],
    is_region: BoolArray,
    region: IntArray,
    managed_kinds: Collection[str],
) -> BoolArray:
    """Return the regions of which some call holds a managed region: all calls of that label are entered."""
    forest = trace.forest
    is_managed_name = np.array([label is not None and label.kind in managed_kinds for label in labels], bool)
    managed = np.flatnonzero(is_managed_name[forest.name_id] & is_region)
    is_entered_name = np.zeros(len(trace.names), bool)
    current = parent_region(forest, region, managed)
    while (current >= 0).any():
        current = current[current >= 0]
        is_entered_name[forest.name_id[current]] = True
        current = np.unique(parent_region(forest, region, current))
    is_entered_name &= ~is_managed_name
    return is_entered_name[forest.name_id] & is_region


def parent_region(forest: Forest, region: IntArray, positions: IntArray) -> IntArray:
    """Return the position of the region that encloses each of these spans, or -1."""
    parent = forest.parent[positions]
    return _spread(region, parent)


def _follow_forward(trace: Trace, region: IntArray, top: IntArray) -> tuple[IntArray, IntArray, int]:
    """Give backward operators outside every region the region of their forward operator, by sequence number."""
    forest = trace.forest
    if not (trace.forward_thread > 0).any():
        return region, top, 0
    sequence = trace.sequence[forest.event]
    is_backward = trace.forward_thread[forest.event] > 0
    lost = np.flatnonzero(is_backward & (sequence >= 0) & (region < 0))
    if not len(lost):
        return region, top, 0
    forward = np.flatnonzero(~is_backward & (sequence >= 0) & (region >= 0))
    pid = trace.pid[forest.event]
    latest: dict[tuple[int, int], int] = {}
    threads: dict[tuple[int, int], int] = {}
    for position in forward[np.argsort(forest.start_ns[forward], kind="stable")].tolist():
        key = (int(pid[position]), int(sequence[position]))
        thread = int(forest.thread[position])
        threads[key] = thread if threads.get(key, thread) == thread else ABSENT
        latest[key] = position
    source = np.full(forest.num_spans, ROOT, np.int64)
    num_ambiguous = 0
    for position in lost.tolist():
        key = (int(pid[position]), int(sequence[position]))
        if threads.get(key, 0) == ABSENT:
            num_ambiguous += 1
        else:
            source[position] = latest.get(key, ROOT)
    nearest = forest.innermost(source >= 0)
    origin = _spread(source, nearest)
    new_region = np.where(region >= 0, region, _spread(region, origin))
    new_top = np.where((top >= 0) | (region >= 0), top, _spread(top, origin))
    return new_region, new_top, num_ambiguous


def _runs(trace: Trace, is_run: BoolArray) -> tuple[IntArray, IntArray, BoolArray]:
    """Return the runs' spans by start, each span's run, and which spans are nested under one."""
    forest = trace.forest
    spans = np.flatnonzero(is_run)
    spans = spans[np.argsort(forest.start_ns[spans], kind="stable")]
    number = np.full(forest.num_spans, NONE, np.int32)
    number[spans] = np.arange(len(spans))
    run = _spread(number, forest.innermost(is_run)) if forest.num_spans else number
    nested = run >= 0
    run[~nested] = _by_time(trace, spans, forest.start_ns[~nested], trace.pid[forest.event[~nested]])
    return spans, run, nested


def _by_time(trace: Trace, run_spans: IntArray, times_ns: IntArray, pid: IntArray) -> IntArray:
    """Return the run of the same process during which each time lies, or -1."""
    forest = trace.forest
    run_pid = trace.pid[forest.event[run_spans]]
    found = np.full(len(times_ns), NONE, np.int64)
    for process in np.unique(run_pid).tolist():
        numbers = np.flatnonzero(run_pid == process)
        spans, here = run_spans[numbers], np.flatnonzero(pid == process)
        place = np.searchsorted(forest.start_ns[spans], times_ns[here], side="right") - 1
        is_inside = (place >= 0) & (times_ns[here] < forest.end_ns[spans[np.maximum(place, 0)]])
        found[here[is_inside]] = numbers[place[is_inside]]
    return found


def _unlinked_by_time(trace: Trace, run_spans: IntArray, times_ns: IntArray) -> IntArray:
    """Return the run during which each time lies; -1 in a file of several processes, where that says nothing."""
    processes = np.unique(trace.pid[trace.forest.event])
    if len(processes) != 1:
        return np.full(len(times_ns), NONE, np.int64)
    return _by_time(trace, run_spans, times_ns, np.full(len(times_ns), processes[0]))
