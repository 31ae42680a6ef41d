"""What a call takes in a typical one of its repeats: a stall in one of them, such as another process, counts in no sum.

A row is all that runs under one kernel, operator, call and region. It counts with the median of its totals. All other
sums are made of rows, so that families, modules, ranking and roofline add up to the same total.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from perfladder.trace.kernels import KernelTable, number_rows
from perfladder.trace.model import BoolArray, IntArray
from perfladder.trace.sums import FloatArray, count_by, number_combinations, sum_by

MIN_REPEATS: Final = 3
"""Of fewer, no one can say which of them is the typical one: then sums are over all."""


class Repeated(Protocol):
    """A row that knows what it took in each repeat."""

    @property
    def repeat_us(self) -> Sequence[float]:
        """In order of the repeats; empty if unknown."""


def take_typical(table: KernelTable, repeats: int) -> KernelTable:
    """Return the table with typical durations in all repeats, so that each row has its median total in each.

    What was measured stays in `measured_ns`.

    Args:
        table: Entries of the repeats only; `run` numbers them.
        repeats: How many there are; with fewer than 3 the table is returned as it is.
    """
    if repeats < MIN_REPEATS or not table.num_kernels:
        return table
    row, size = number_rows(table)
    place = row.astype(np.int64) * repeats + table.run
    totals = sum_by(place, table.duration_ns, size * repeats).reshape(size, repeats)
    typical = _copy_middle(table, place, totals)
    # Where repeats have other entries, none can stand for another: each repeat's are scaled.
    wanted = np.median(totals, axis=1, keepdims=True) * repeats / np.maximum((totals > 0).sum(1, keepdims=True), 1)
    scaled = table.duration_ns * (wanted / np.maximum(totals, 1)).ravel()[place]
    duration_ns = np.rint(np.where(np.isnan(typical), scaled, typical)).astype(np.int64)
    return replace(table, duration_ns=duration_ns, measured_ns=table.duration_ns, num_repeats=repeats)


def _copy_middle(table: KernelTable, place: IntArray, totals: FloatArray) -> FloatArray:
    """Return, for the n-th entry of a row, the duration of the n-th in the repeat of median total; NaN if they differ.

    Of an even number of repeats, it is the mean of the two in the middle.

    Args:
        table: The entries.
        place: Of each entry, row times repeats plus repeat.
        totals: Of each row and repeat in ns.
    """
    size, repeats = totals.shape
    count = count_by(place, size * repeats)
    is_alike = (count.reshape(size, repeats) == count[::repeats, None]).all(axis=1)
    first = np.cumsum(count) - count
    order, nth = _turns(table, place)
    row = place[order] // repeats
    by_total = np.argsort(totals, axis=1, kind="stable")
    found = np.full(len(order), np.nan)
    known = is_alike[row]
    sources = [
        order[first[row[known] * repeats + by_total[row[known], middle]] + nth[known]]
        for middle in ((repeats - 1) // 2, repeats // 2)
    ]
    found[order[known]] = np.mean([table.duration_ns[source] for source in sources], axis=0)
    return found


def _turns(table: KernelTable, place: IntArray) -> tuple[IntArray, IntArray]:
    """Return the entries ordered by place and start, and, in that order, the how manieth of its place each is."""
    order = np.lexsort((table.trace.start_ns[table.event], place))
    ordered = place[order]
    return order, np.arange(len(order)) - np.searchsorted(ordered, ordered, side="left")


def take_majority(table: KernelTable, flags: BoolArray) -> BoolArray:
    """Return, for the n-th entry of a row, what holds for the n-th in most repeats, if the table tells them apart."""
    if table.measured_ns is None:
        return flags
    row, _ = number_rows(table)
    order, nth = _turns(table, row.astype(np.int64) * table.num_repeats + table.run)
    turn = np.empty(len(order), np.int64)
    turn[order] = nth
    code, size = number_combinations((row, turn), table.num_kernels)
    found: BoolArray = (2 * sum_by(code, flags.astype(np.int64), size) > count_by(code, size))[code]
    return found


def add_repeats(rows: Iterable[Repeated]) -> list[float]:
    """Return what some rows took together in each repeat; nothing if one of them does not know it."""
    known = [row.repeat_us for row in rows]
    return [sum(values) for values in zip(*known, strict=True)] if all(known) else []


def repeats_led(first: Repeated, others: Iterable[Repeated]) -> int:
    """Return in how many repeats no other row took longer than this one."""
    longest = [max(values) for values in zip(*(row.repeat_us for row in others if row.repeat_us), strict=True)]
    return sum(mine >= most for mine, most in zip(first.repeat_us, longest, strict=True)) if longest else 0


def leads(first: Repeated, others: Iterable[Repeated]) -> bool:
    """Whether a row took longest in most repeats; it does where nothing is known of single ones.

    Args:
        first: The row.
        others: The rows it is held against; it may be among them.
    """
    return not first.repeat_us or 2 * repeats_led(first, [first, *others]) > len(first.repeat_us)
