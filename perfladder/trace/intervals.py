"""Unions and intersections of time intervals, in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfladder.trace.model import IntArray


@dataclass(frozen=True, eq=False)
class Union:
    """A set of points in time as sorted, disjoint intervals."""

    start_ns: IntArray
    end_ns: IntArray

    @property
    def total_ns(self) -> int:
        """Time covered."""
        return int((self.end_ns - self.start_ns).sum())

    def covered_before(self, times_ns: IntArray) -> IntArray:
        """Return, for each time, how much of the set lies before it."""
        if not len(self.start_ns):
            return np.zeros(len(times_ns), np.int64)
        before = np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))
        place = np.searchsorted(self.start_ns, times_ns, side="right")
        last = np.maximum(place - 1, 0)
        beyond = np.maximum(self.end_ns[last] - times_ns, 0)
        return np.where(place > 0, before[place] - beyond, 0)

    def covered_within(self, start_ns: IntArray, end_ns: IntArray) -> IntArray:
        """Return how much of the set lies within each interval; one that ends before it starts holds nothing."""
        return np.maximum(self.covered_before(end_ns) - self.covered_before(start_ns), 0)


def unite(start_ns: IntArray, end_ns: IntArray) -> Union:
    """Return the union of intervals in any order; touching ones become one, empty ones vanish."""
    kept = end_ns > start_ns
    start_ns, end_ns = start_ns[kept], end_ns[kept]
    if not len(start_ns):
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    is_first = np.concatenate(([True], start_ns[1:] > reach[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    return Union(start_ns[is_first], reach[is_last])


def overlap_ns(first: Union, second: Union) -> int:
    """Return the time that lies in both sets."""
    return int(first.covered_within(second.start_ns, second.end_ns).sum())
