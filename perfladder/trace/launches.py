"""How each kernel came to run: its launching call, the gap before it on its stream, and what was queued before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from perfladder.trace.families import FAMILIES, families_of
from perfladder.trace.kernels import KernelTable
from perfladder.trace.model import BoolArray, IntArray
from perfladder.trace.rows import Row
from perfladder.trace.sums import FloatArray, count_by, number_combinations, sum_by
from perfladder.trace.timeline import device_of, stream_of

_US: Final = 1e-3
_NONE: Final = -1


@dataclass(frozen=True, eq=False)
class Launches:
    """One entry for each entry of a kernel table; `-1` is unknown, as everything is on a host-only trace."""

    table: KernelTable

    @cached_property
    def call_ns(self) -> FloatArray:
        """Time in the launching runtime call; a call that launches many (a graph's) is shared out evenly."""
        launch = self.table.launch
        if self.table.is_host:
            return np.broadcast_to(np.float64(_NONE), len(launch))
        found = np.full(len(launch), float(_NONE))
        known = launch >= 0
        positions, place, owned = np.unique(launch[known], return_inverse=True, return_counts=True)
        found[known] = (self.table.trace.forest.duration_ns[positions] / owned)[place]
        return found

    @cached_property
    def lane(self) -> IntArray:
        """A number for each (device, stream)."""
        trace, event = self.table.trace, self.table.event
        if self.table.is_host:
            return np.zeros(len(event), np.int64)
        return number_combinations((device_of(trace, event), stream_of(trace, event)), len(event))[0]

    @cached_property
    def gap_ns(self) -> IntArray:
        """From the end of what ran before it on its stream, in the same run; unknown for the first one."""
        trace, count = self.table.trace, self.table.num_kernels
        if self.table.is_host or not count:
            return np.broadcast_to(np.int64(_NONE), count)
        found = np.full(count, _NONE, np.int64)
        start, end = trace.start_ns[self.table.event], trace.end_ns[self.table.event]
        group = number_combinations((self.lane, self.table.run), count)[0].astype(np.int64)
        order = np.lexsort((start, group))
        # Groups are lifted above one another, so that one running maximum serves them all.
        lift = group[order] * (int(end.max() - start.min()) + 1)
        reach = np.maximum.accumulate(end[order] + lift)[:-1] - lift[1:]
        gap = np.maximum(start[order][1:] - reach, 0)
        is_same = group[order][1:] == group[order][:-1]
        found[order[1:]] = np.where(is_same, gap, _NONE)
        return found

    @cached_property
    def queue_depth(self) -> IntArray:
        """How much launched work was unfinished, on all streams of all devices, when this was launched."""
        table = self.table
        known = table.launch_ns >= 0
        found = np.full(table.num_kernels, _NONE, np.int64)
        launched = np.sort(table.launch_ns[known])
        finished = np.sort(table.trace.end_ns[table.event[known]])
        at = table.launch_ns[known]
        depth = np.searchsorted(launched, at, side="left") - np.searchsorted(finished, at, side="right")
        found[known] = np.maximum(depth, 0)
        return found


class FamilyRow(Row):
    """Kernels of one family; on a host-only trace its operators, by self time, of which no launch is known.

    Attributes:
        family: What the kernels do.
        region_id: The region of the flat set that they belong to; None where all are taken together.
        count: Number of kernels.
        total_us: Sum of their durations on the device.
        share: Fraction of all kernel time of the table.
        launch_call_us: Time the host spent in the calls that launched them; one that launches many is shared out.
        mean_gap_us: Mean time their stream was empty before each of them.
        mean_launch_latency_us: Mean time from the start of the launching call to the start of the kernel.
        repeat_us: Sum of durations in each repeat; empty where repeats are not told apart.
    """

    family: str
    region_id: str | None = None
    count: int
    total_us: float
    share: float
    launch_call_us: float | None
    mean_gap_us: float | None
    mean_launch_latency_us: float | None
    repeat_us: list[float] = []


def summarize_families(table: KernelTable, region: IntArray | None = None) -> list[FamilyRow]:
    """Sum the table by family, the largest total first.

    Args:
        table: The kernels.
        region: For each entry the position of a region's span or -1: then one row for each region and family.
    """
    count = table.num_kernels
    if not count:
        return []
    launches, family = Launches(table), families_of(table)
    forest = table.trace.forest
    name = np.full(count, _NONE, np.int64)
    if region is not None:
        name[region >= 0] = forest.name_id[region[region >= 0]]
    code, size = number_combinations((family, name), count)
    total, number = sum_by(code, table.duration_ns, size), count_by(code, size)
    calls = _sums(code, launches.call_ns, size)
    gaps, latencies = (_means(code, values, size) for values in (launches.gap_ns, table.latency_ns))
    example = np.zeros(size, np.int64)
    example[code] = np.arange(count)
    labels = [table.labels[name[index]] if name[index] >= 0 else None for index in example.tolist()]
    whole, repeat_us = max(float(total.sum()), 1e-9), table.repeat_us(code, size)
    return [
        FamilyRow(
            family=FAMILIES[family[example[index]]],
            region_id=label.region_id if label is not None else None,
            count=int(number[index]),
            total_us=float(total[index]) * _US,
            share=float(total[index]) / whole,
            launch_call_us=calls[index],
            mean_gap_us=gaps[index],
            mean_launch_latency_us=latencies[index],
            repeat_us=repeat_us[index],
        )
        for index in np.argsort(-total, kind="stable").tolist()
        for label in (labels[index],)
    ]


def _known_sums(code: IntArray, values: IntArray | FloatArray, size: int) -> tuple[FloatArray, IntArray]:
    known: BoolArray = values >= 0
    return sum_by(code[known], values[known], size), count_by(code[known], size)


def _sums(code: IntArray, values: IntArray | FloatArray, size: int) -> list[float | None]:
    return _us_or_none(*_known_sums(code, values, size))


def _means(code: IntArray, values: IntArray | FloatArray, size: int) -> list[float | None]:
    total, number = _known_sums(code, values, size)
    return _us_or_none(total / np.maximum(number, 1), number)


def _us_or_none(values: FloatArray, number: IntArray) -> list[float | None]:
    pairs: Iterable[tuple[float, int]] = zip(values.tolist(), number.tolist(), strict=True)
    return [value * _US if count else None for value, count in pairs]
