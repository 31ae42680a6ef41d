"""Joins counted operator calls with the operators of a trace: by region, operator and order of occurrence in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from perfladder.trace.attribution import Attribution
from perfladder.trace.kernels import KernelTable
from perfladder.trace.model import BoolArray, Category, IntArray
from perfladder.trace.sums import number_combinations

_NONE: Final = -1


class OperatorCall(NamedTuple):
    """One call of an operator that touches memory, counted apart from the trace.

    Attributes:
        region: Region id of the innermost module or method, as in the trace; None outside every region.
        operator: Its name as the profiler writes it, e.g. `aten::addmm`.
        flops: Multiplications and additions by a formula on the shapes; 0 where there is none, as for elementwise work.
        num_bytes: Inputs and outputs, each counted once and whole. Memory that is read several times, scratch memory
            and what a cache saves are not in it.
        dtype: Of the first floating point tensor, e.g. `bfloat16`.
    """

    region: str | None
    operator: str
    flops: int
    num_bytes: int
    dtype: str | None


@dataclass(frozen=True, eq=False)
class WorkMatch:
    """For each entry of a kernel table, the operator whose call it belongs to.

    Attributes:
        calls: The counted calls.
        span: Position (in the forest) of the outermost operator around the entry that was counted, or -1.
        call: Index into `calls`, or -1.
        num_mismatched: Kinds of calls (region and operator) that occur another number of times in the trace.
    """

    calls: Sequence[OperatorCall]
    span: IntArray
    call: IntArray
    num_mismatched: int


def match_work(table: KernelTable, attribution: Attribution, calls: Sequence[OperatorCall]) -> WorkMatch:
    """Join the calls, counted in one run, with every run of the trace.

    A call of a region and operator is joined only if a run has as many of them as were counted: then the n-th is the
    n-th. An operator inside another that was counted belongs to the outer one, as it was counted.
    """
    count = table.num_kernels
    absent = np.full(count, _NONE, np.int64)
    kinds: dict[tuple[str | None, str], list[int]] = {}
    for index, call in enumerate(calls):
        kinds.setdefault((call.region, _base_name(call.operator)), []).append(index)
    if not kinds or not count:
        return WorkMatch(calls, absent, absent, len(kinds))
    forest = table.trace.forest
    kind = _kinds_of_spans(table, attribution, {key: number for number, key in enumerate(kinds)})
    outer = forest.outermost(kind >= 0, barrier=attribution.is_region)
    is_counted = outer == np.arange(forest.num_spans)
    call_of_span, num_mismatched = _number_calls(table, attribution, kind, is_counted, list(kinds.values()))
    inside = np.where(table.operator >= 0, outer[np.maximum(table.operator, 0)], _NONE)
    matched = np.where(inside >= 0, call_of_span[np.maximum(inside, 0)], _NONE)
    return WorkMatch(calls, np.where(matched >= 0, inside, _NONE), matched, num_mismatched)


def _base_name(operator: str) -> str:
    """In place or not is the same work; which of the two a composite operator chooses depends on who watches."""
    return operator.rstrip("_")


def _kinds_of_spans(table: KernelTable, attribution: Attribution, kinds: dict[tuple[str | None, str], int]) -> IntArray:
    """Return the kind of counted call that each operator span of a run could be, or -1."""
    trace, forest = table.trace, table.trace.forest
    is_label = np.array([label is not None for label in trace.labels], bool)[forest.name_id]
    chosen = np.flatnonzero((trace.category[forest.event] == Category.CPU_OP) & ~is_label & (attribution.run >= 0))
    region = attribution.region[chosen]
    region_name = np.where(region >= 0, forest.name_id[np.maximum(region, 0)], _NONE)
    name = forest.name_id[chosen]
    code, size = number_combinations((region_name, name), len(chosen))
    example = np.zeros(size, np.int64)
    example[code] = np.arange(len(chosen))
    found = np.full(size, _NONE, np.int64)
    for index, place in enumerate(example.tolist()):
        label = attribution.labels[region_name[place]] if region_name[place] >= 0 else None
        key = (label.region_id if label else None, _base_name(trace.names[name[place]]))
        found[index] = kinds.get(key, _NONE)
    kind = np.full(forest.num_spans, _NONE, np.int64)
    kind[chosen] = found[code]
    return kind


def _number_calls(
    table: KernelTable,
    attribution: Attribution,
    kind: IntArray,
    is_counted: BoolArray,
    members: list[list[int]],
) -> tuple[IntArray, int]:
    """Return the call of each counted span, or -1; and how many kinds occur another number of times than counted."""
    forest = table.trace.forest
    spans = np.flatnonzero(is_counted)
    order = spans[np.lexsort((forest.start_ns[spans], attribution.run[spans], kind[spans]))]
    starts = np.flatnonzero(
        np.diff(kind[order], prepend=_NONE).astype(bool) | np.diff(attribution.run[order], prepend=_NONE).astype(bool)
    )
    lengths = np.diff(np.append(starts, len(order)))
    wanted = np.array([len(member) for member in members], np.int64)
    first = np.concatenate(([0], np.cumsum(wanted)))[:-1]
    flat = np.array([index for member in members for index in member], np.int64)
    group_kind = kind[order][starts]
    rank = np.arange(len(order)) - np.repeat(starts, lengths)
    is_equal = np.repeat(lengths == wanted[group_kind], lengths)
    place = first[kind[order]] + rank
    call = np.full(forest.num_spans, _NONE, np.int64)
    call[order[is_equal]] = flat[place[is_equal]]
    seen = np.unique(group_kind[lengths == wanted[group_kind]])
    return call, len(members) - len(seen)
