"""Which span encloses which on the host side, by interval nesting in each thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from perfladder.trace.model import BoolArray, Category, IntArray
from perfladder.trace.sums import slices

if TYPE_CHECKING:
    from perfladder.trace.model import Trace

HOST_CATEGORIES: Final = (Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.DRIVER)
ROOT: Final = -1

# The profiler's own bookkeeping; torch's aggregation leaves these out too, so their time belongs to what encloses them.
BOOKKEEPING: Final = frozenset(
    {
        "[memory]",
        "[OutOfMemory]",
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)


@dataclass(frozen=True, eq=False)
class Forest:
    """Host spans ordered by (process, thread, start), each with its parent. All arrays have one entry a span.

    A *position* is an index into these arrays; `event[position]` is the index into the trace.

    Attributes:
        event: Index into the trace.
        parent: Position of the innermost enclosing span, or -1.
        depth: Number of enclosing spans.
        thread: Number of the (process, thread) pair, counted in this forest's order.
        start_ns: Start.
        end_ns: End.
        duration_ns: Duration.
        name_id: Index into the trace's names.
        num_overlaps: Spans that overlap an earlier one of their thread without nesting.
    """

    event: IntArray
    parent: IntArray
    depth: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    duration_ns: IntArray
    name_id: IntArray
    num_overlaps: int

    @property
    def num_spans(self) -> int:
        """Number of spans."""
        return len(self.event)

    @cached_property
    def self_ns(self) -> IntArray:
        """Duration of each span without its children; never negative."""
        own = self.duration_ns.copy()
        for part in slices(self.num_spans):
            has_parent = self.parent[part] >= 0
            np.subtract.at(own, self.parent[part][has_parent], self.duration_ns[part][has_parent])
        return np.maximum(own, 0, out=own)

    @cached_property
    def num_children(self) -> IntArray:
        """Number of direct children of each span."""
        count = np.zeros(self.num_spans, np.int32)
        for part in slices(self.num_spans):
            np.add.at(count, self.parent[part][self.parent[part] >= 0], 1)
        return count

    @cached_property
    def _levels(self) -> list[IntArray]:
        """Positions by depth, outermost first."""
        return _by_depth(self.depth)

    def innermost(self, wanted: BoolArray) -> IntArray:
        """Return, for each span, the position of the innermost wanted span that is it or encloses it, or -1."""
        found = self._positions_of(wanted)
        for level in self._levels[1:]:
            level = level[found[level] < 0]
            found[level] = found[self.parent[level]]
        return found

    def outermost(self, wanted: BoolArray, barrier: BoolArray | None = None) -> IntArray:
        """Return, for each span, the position of the outermost wanted span that is it or encloses it, or -1.

        Args:
            wanted: Which spans count.
            barrier: Spans that begin anew: what encloses them is not looked at.
        """
        found = self._positions_of(wanted)
        for level in self._levels[1:]:
            above = found[self.parent[level]]
            if barrier is not None:
                above = np.where(barrier[level], ROOT, above)
            found[level] = np.where(above >= 0, above, found[level])
        return found

    def _positions_of(self, wanted: BoolArray) -> IntArray:
        positions = np.arange(self.num_spans, dtype=np.int32)
        positions[~wanted] = ROOT
        return positions

    def sum_up(self, values: IntArray) -> IntArray:
        """Return, for each span, the sum of `values` over it and all spans inside it."""
        total = values.copy()
        for level in self._levels[:0:-1]:
            np.add.at(total, self.parent[level], total[level])
        return total


def nest_host_spans(trace: Trace) -> Forest:
    """Nest operators, annotations, runtime calls and overheads in each thread, without the profiler's bookkeeping.

    An overhead row takes part where it is known which thread it delayed; see `perfladder.trace.overhead`.
    """
    is_bookkeeping = np.array([name in BOOKKEEPING for name in trace.names], bool)
    events: IntArray = trace.events_of(*HOST_CATEGORIES, Category.OVERHEAD).astype(np.int32)
    is_overhead = trace.category[events] == Category.OVERHEAD
    if is_overhead.any():
        processes = np.unique(trace.pid[events[~is_overhead]])
        events = events[~is_overhead | np.isin(trace.pid[events], processes)]
    if is_bookkeeping.any():
        events = events[~is_bookkeeping[trace.name_id[events]]]
    return nest_spans(trace, events)


def nest_spans(trace: Trace, events: IntArray) -> Forest:
    """Nest the spans of these events in each (process, thread) by their intervals.

    A span belongs to the innermost earlier one that contains it wholly; one that only overlaps has no parent there.
    Where the trace's timestamps are rounded, a span may reach over its parent's end by that much.
    """
    event: IntArray | slice = events
    if len(events) == trace.num_events and _is_in_order(_thread_of(trace), trace.start_ns, trace.end_ns):
        event = slice(None)  # the columns themselves, without a copy: the usual case of a host-only window
    elif not _is_in_order(_thread_of(trace)[events], trace.start_ns[events], trace.end_ns[events]):
        event = events[np.lexsort((-trace.end_ns[events], trace.start_ns[events], _thread_of(trace)[events]))]
    start, end, thread = trace.start_ns[event], trace.end_ns[event], _thread_of(trace)[event]
    bounds = np.flatnonzero(thread[1:] != thread[:-1]) + 1
    parent = np.empty(len(events), np.int32)
    depth = np.empty(len(events), np.int32)
    num_overlaps = 0
    for low, high in zip([0, *bounds.tolist()], [*bounds.tolist(), len(events)], strict=True):
        part = slice(low, high)
        nested = None if trace.resolution_ns > 1 else _nest_by_counting(start[part], end[part])
        if nested is None:
            nested = _nest_by_scanning(start[part], end[part], trace.resolution_ns if trace.resolution_ns > 1 else 0)
        part_parent, depth[part], part_overlaps = nested
        parent[part] = np.where(part_parent >= 0, part_parent + low, ROOT)
        num_overlaps += part_overlaps
    thread_number = np.zeros(len(events), np.int32)
    thread_number[bounds] = 1
    return Forest(
        event=(events if isinstance(event, slice) else event).astype(np.int32),
        parent=parent,
        depth=depth,
        thread=np.cumsum(thread_number, dtype=np.int32),
        start_ns=start,
        end_ns=end,
        duration_ns=trace.duration_ns[event],
        name_id=trace.name_id[event],
        num_overlaps=num_overlaps,
    )


def _thread_of(trace: Trace) -> IntArray:
    """Return one number for each (process, thread) pair."""
    if trace.pid.strides == (0,) and trace.tid.strides == (0,):
        return np.broadcast_to(np.int64(0), trace.num_events)
    return trace.pid.astype(np.int64) * len(trace.tids) + trace.tid


def _is_in_order(thread: IntArray, start: IntArray, end: IntArray) -> bool:
    """Whether the spans are ordered by thread, start, and longest first."""
    is_same = thread[1:] == thread[:-1]
    is_later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))
    return bool(((thread[1:] > thread[:-1]) | (is_same & is_later)).all())


def _nest_by_counting(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, int] | None:
    """Nest one thread without a loop over spans; None if the spans do not nest cleanly.

    The depth of a span is the number of earlier spans that have not ended when it starts; its parent is the last
    earlier span that is one level higher.
    """
    count = len(start)
    if count == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    # Ends up to each start; spans without duration at the very same start come after the span, so they do not count.
    depth = np.arange(count, dtype=np.int32)
    sorted_end = np.sort(end)
    for part in slices(count):
        depth[part] -= np.searchsorted(sorted_end, start[part], side="right")
    del sorted_end
    is_empty = start == end
    if is_empty.any():
        num_empty_before = np.cumsum(is_empty) - is_empty
        depth += np.searchsorted(start[is_empty], start, side="right") - num_empty_before
    if depth.min() < 0:
        return None
    parent = np.full(count, ROOT, np.int32)
    for above, here in pairwise(_by_depth(depth)):
        place = np.searchsorted(above, here) - 1
        if place.size and place[0] < 0:
            return None
        parent[here] = above[place]
    return (parent, depth, 0) if _lie_in_parents(start, end, parent) else None


def _lie_in_parents(start: IntArray, end: IntArray, parent: IntArray) -> bool:
    for part in slices(len(parent)):
        inner = parent[part] >= 0
        parent_end = end[parent[part][inner]]
        if (end[part][inner] > parent_end).any() or (start[part][inner] >= parent_end).any():
            return False
    return True


def _by_depth(depth: IntArray) -> list[IntArray]:
    """Return the positions of each depth, in order."""
    if not len(depth):
        return []
    counts = np.bincount(depth)
    # numpy sorts 16-bit integers by radix, several times faster than wider ones.
    narrow = depth.astype(np.uint16) if len(counts) <= 1 << 16 else depth
    return np.split(np.argsort(narrow, kind="stable").astype(np.int32), np.cumsum(counts)[:-1])


def _nest_by_scanning(start: IntArray, end: IntArray, tolerance_ns: int) -> tuple[IntArray, IntArray, int]:
    """Nest one thread with a stack of open spans, for spans that overlap or whose ends are rounded."""
    parents: list[int] = []
    depths: list[int] = []
    stack: list[int] = []
    num_overlaps = 0
    starts, ends = start.tolist(), end.tolist()
    for index, (low, high) in enumerate(zip(starts, ends, strict=True)):
        while stack:
            top_end = ends[stack[-1]]
            is_inside = low < top_end and high <= top_end + tolerance_ns
            if is_inside and (high <= top_end or low + high <= 2 * top_end):
                break
            num_overlaps += high > top_end > low + tolerance_ns
            stack.pop()
        parents.append(stack[-1] if stack else ROOT)
        depths.append(len(stack))
        stack.append(index)
    return np.array(parents, np.int64), np.array(depths, np.int64), num_overlaps
