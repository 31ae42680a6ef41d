"""Puts CUPTI's overhead rows on the host thread that they delayed: the file names a process and thread of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from perfladder.trace.model import BoolArray, Category, IntArray, Trace
from perfladder.trace.nesting import HOST_CATEGORIES, Forest, nest_spans

_MAX_ROWS: Final = 20_000  # a window has a handful; each one costs microseconds here


def place_overheads(trace: Trace) -> Trace:
    """Return the trace with each overhead row moved to the one thread whose spans it nests in.

    Of several threads that is the one with an operator or runtime call around it. One that is still unclear, or that
    only overlaps spans, stays where it was and counts nowhere.
    """
    rows = trace.events_of(Category.OVERHEAD)
    host = trace.events_of(*HOST_CATEGORIES)
    rows = rows[~np.isin(trace.pid[rows], trace.pid[host])][:_MAX_ROWS]
    if not len(rows) or not len(host):
        return trace
    forest = nest_spans(trace, host)
    bounds = np.flatnonzero(np.diff(forest.thread, prepend=-1, append=-1))
    threads = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    is_mark = np.array([label is not None for label in trace.labels], bool)[forest.name_id]
    is_mark |= trace.category[forest.event] == Category.USER_ANNOTATION
    owner = [_owner(trace, forest, threads, is_mark, row) for row in rows.tolist()]
    around = np.array(owner, np.int64)
    return _moved(trace, rows[around >= 0], forest.event[around[around >= 0]])


def _owner(trace: Trace, forest: Forest, threads: list[tuple[int, int]], is_mark: BoolArray, row: int) -> int:
    """Return the position of the span that an overhead row lies in, or -1 if that is unclear."""
    start_ns, end_ns = int(trace.start_ns[row]), int(trace.end_ns[row])
    found = [position for low, high in threads if (position := _around(forest, low, high, start_ns, end_ns)) >= 0]
    work = [position for position in found if not is_mark[position]]
    clear = work if len(work) == 1 else found
    return clear[0] if len(clear) == 1 else -1


def _around(forest: Forest, low: int, high: int, start_ns: int, end_ns: int) -> int:
    """Return the position of the innermost span of a thread around an interval; -1 if there is none, or one is cut."""
    first, last = np.searchsorted(forest.start_ns[low:high], (start_ns, end_ns), side="left") + low
    if last > first and int(forest.end_ns[first:last].max()) > end_ns:
        return -1
    position = int(first) - 1
    while position >= low and forest.end_ns[position] <= start_ns:
        position = int(forest.parent[position])
    return position if position >= low and int(forest.end_ns[position]) >= end_ns else -1


def _moved(trace: Trace, rows: IntArray, owner: IntArray) -> Trace:
    if not len(rows):
        return trace
    pid, tid = trace.pid.copy(), trace.tid.copy()
    pid[rows], tid[rows] = trace.pid[owner], trace.tid[owner]
    return replace(trace, pid=pid, tid=tid)
