"""Achieved arithmetic and bandwidth of each operator against the device's peaks; what limits it stays a possibility."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.peaks import Peaks
from perfladder.trace.families import families_of_groups
from perfladder.trace.kernels import KernelTable
from perfladder.trace.model import IntArray
from perfladder.trace.rows import Row
from perfladder.trace.sums import FloatArray, count_by, longest_by, number_combinations, sum_by
from perfladder.trace.work import WorkMatch

_US: Final = 1e-3
_NONE: Final = -1
_NEAR: Final = 0.7
_FAR: Final = 0.3
# Peaks are measured to some percent; so far above the bandwidth, a cache serves what is counted as memory.
_CACHED: Final = 1.2
# cuBLAS and cuDNN write the type of a product into the name; `s1688` is CUTLASS's tensor core instruction for tf32.
_TF32: Final = re.compile(r"tf32|s1688|s64x\d+x8gemm", re.IGNORECASE)


class RooflineRow(Row):
    """One operator in one region: its work, how fast it was done, and how far that is from the device's peaks.

    Times, counts and work are sums over all runs of the table.

    Attributes:
        region_id: Region; None outside every region.
        operator: The operator whose calls were counted.
        family: That which most of its time is of; on a CPU that of the operator.
        precision: `float32`, `tf32`, `bfloat16` or `float16`: which peak it is held against; other types have none.
        count: Number of calls.
        num_kernels: Number of kernels (or operators, on a CPU) that did it.
        total_us: Their time.
        flops: By formulas on the shapes; 0 where there is none.
        num_bytes: Inputs and outputs, each once.
        compute_tflops: Achieved, 10**12 operations a second; None without a formula.
        bandwidth_gb_per_s: Achieved, 10**9 bytes a second.
        arithmetic_intensity: Operations for each byte; None without a formula.
        ridge_flops_per_byte: Intensity from which the compute peak is the lower roof; None if a peak is unknown.
        compute_frac: Achieved part of the compute peak; None if unknown.
        bandwidth_frac: Achieved part of the bandwidth. Above 1 where a cache serves what was counted as memory.
        statement: The figures in words, and what they leave possible.
        num_modules: How many modules the region stands for, where repeated ones are taken together; else None.
    """

    region_id: str | None
    operator: str
    family: str
    precision: str | None
    count: int
    num_kernels: int
    total_us: float
    flops: int
    num_bytes: int
    compute_tflops: float | None
    bandwidth_gb_per_s: float | None
    arithmetic_intensity: float | None
    ridge_flops_per_byte: float | None
    compute_frac: float | None
    bandwidth_frac: float | None
    statement: str
    num_modules: int | None = None

    @property
    def achieved_frac(self) -> float | None:
        """Part of the nearer roof that is reached, at most 1; the bandwidth is no roof where a cache holds the data.

        None where operations are done that no formula counts: then nobody knows which roof is the nearer one.
        """
        if not self.flops and self.family not in _MOVES_ONLY:
            return None
        if self.compute_frac is not None and (self.bandwidth_frac is None or self.bandwidth_frac > _CACHED):
            return min(self.compute_frac, 1.0)
        known = [frac for frac in (self.compute_frac, self.bandwidth_frac) if frac is not None]
        return min(max(known), 1.0) if known else None


_MOVES_ONLY: Final = ("copy", "layout", "elementwise", "normalization", "reduction")
"""Families whose work is to move data: what they compute costs nothing beside it."""


@dataclass(frozen=True, eq=False)
class Roofline:
    """The rows, and for each entry of the table the row that it belongs to, or -1.

    Attributes:
        rows: The largest total first.
        row: For each entry of the table.
        known_share: Part of the table's time whose work was counted.
        flops_share: Part of the table's time for which there is a formula.
    """

    rows: list[RooflineRow]
    row: IntArray
    known_share: float
    flops_share: float


@dataclass(frozen=True, eq=False)
class _Groups:
    """Sums for each (region, operator, type)."""

    code: IntArray
    size: int
    total_ns: FloatArray
    num_kernels: IntArray
    num_calls: IntArray
    flops: FloatArray
    num_bytes: FloatArray
    longest: IntArray


def build_roofline(table: KernelTable, match: WorkMatch, peaks: Peaks | None) -> Roofline:
    """Sum time and work by region, operator and type, and hold both against the peaks."""
    chosen = np.flatnonzero(match.call >= 0)
    row = np.full(table.num_kernels, _NONE, np.int64)
    if not len(chosen):
        return Roofline([], row, 0.0, 0.0)
    groups = _group(table, match, chosen)
    order = np.argsort(-groups.total_ns, kind="stable")
    rank = np.empty(groups.size, np.int64)
    rank[order] = np.arange(groups.size)
    row[chosen] = rank[groups.code]
    names = [table.trace.names[index] for index in table.trace.forest.name_id[match.span[groups.longest]].tolist()]
    family = families_of_groups(table, chosen, groups.code, names)
    rows = [_row(table, match, groups, index, family[index], peaks) for index in order.tolist()]
    whole = max(float(table.duration_ns.sum()), 1e-9)
    with_formula = groups.total_ns[groups.flops > 0]
    return Roofline(rows, row, float(groups.total_ns.sum()) / whole, float(with_formula.sum()) / whole)


def _group(table: KernelTable, match: WorkMatch, chosen: IntArray) -> _Groups:
    forest, count = table.trace.forest, len(chosen)
    region = table.region[chosen]
    region_name = np.where(region >= 0, forest.name_id[np.maximum(region, 0)], _NONE)
    dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys(call.dtype for call in match.calls))}
    dtype_of_call = np.array([dtypes[call.dtype] for call in match.calls], np.int64)
    span, call = match.span[chosen], match.call[chosen]
    code, size = number_combinations((region_name, forest.name_id[span], dtype_of_call[call]), count)
    duration = table.duration_ns[chosen]
    # A call counts once, however many kernels do it.
    _, first = np.unique(span, return_index=True)
    flops = np.array([match.calls[index].flops for index in call[first].tolist()], np.int64)
    num_bytes = np.array([match.calls[index].num_bytes for index in call[first].tolist()], np.int64)
    return _Groups(
        code=code,
        size=size,
        total_ns=sum_by(code, duration, size),
        num_kernels=count_by(code, size),
        num_calls=count_by(code[first], size),
        flops=sum_by(code[first], flops, size),
        num_bytes=sum_by(code[first], num_bytes, size),
        longest=chosen[longest_by(code, duration, size)],
    )


def _row(
    table: KernelTable, match: WorkMatch, groups: _Groups, index: int, family: str, peaks: Peaks | None
) -> RooflineRow:
    entry = int(groups.longest[index])
    kernel = table.trace.names[table.trace.name_id[table.event[entry]]]
    precision = _precision(match.calls[int(match.call[entry])].dtype, kernel)
    return hold_against_peaks(
        peaks,
        region_id=table.row(entry).region,
        operator=table.trace.names[table.trace.forest.name_id[match.span[entry]]],
        family=family,
        precision=precision,
        count=int(groups.num_calls[index]),
        num_kernels=int(groups.num_kernels[index]),
        total_us=max(float(groups.total_ns[index]), 1e-9) * _US,
        flops=int(groups.flops[index]),
        num_bytes=int(groups.num_bytes[index]),
    )


def hold_against_peaks(
    peaks: Peaks | None,
    *,
    region_id: str | None,
    operator: str,
    family: str,
    precision: str | None,
    count: int,
    num_kernels: int,
    total_us: float,
    flops: int,
    num_bytes: int,
    num_modules: int | None = None,
) -> RooflineRow:
    """Return the row of some work: how fast it was done, and how far that is from the peaks."""
    total_ns = total_us / _US
    tflops = flops / total_ns / 1e3 if flops else None
    bandwidth = num_bytes / total_ns if num_bytes else None
    compute_peak = peaks.compute_tflops.get(precision or "") if peaks else None
    bandwidth_peak = peaks.bandwidth_gb_per_s if peaks else None
    compute_frac = tflops / compute_peak if tflops is not None and compute_peak else None
    bandwidth_frac = bandwidth / bandwidth_peak if bandwidth is not None and bandwidth_peak else None
    return RooflineRow(
        region_id=region_id,
        operator=operator,
        family=family,
        precision=precision,
        count=count,
        num_kernels=num_kernels,
        total_us=total_us,
        flops=flops,
        num_bytes=num_bytes,
        compute_tflops=tflops,
        bandwidth_gb_per_s=bandwidth,
        arithmetic_intensity=flops / num_bytes if flops and num_bytes else None,
        ridge_flops_per_byte=compute_peak * 1e3 / bandwidth_peak if compute_peak and bandwidth_peak else None,
        compute_frac=compute_frac,
        bandwidth_frac=bandwidth_frac,
        statement=describe(compute_frac, bandwidth_frac, total_us / max(num_kernels, 1), peaks.label if peaks else ""),
        num_modules=num_modules,
    )


def _precision(dtype: str | None, kernel: str) -> str | None:
    return "tf32" if dtype == "float32" and _TF32.search(kernel) else dtype


def describe(compute_frac: float | None, bandwidth_frac: float | None, mean_us: float, label: str) -> str:
    """Say how near an operator is to both peaks, and what that leaves possible. Neither figure alone is a verdict.

    Args:
        compute_frac: Achieved part of the compute peak.
        bandwidth_frac: Achieved part of the bandwidth.
        mean_us: Mean duration of one of its kernels.
        label: Where the peaks are from.
    """
    known = {"compute peak": compute_frac, "bandwidth": bandwidth_frac}
    figures = [f"{frac:.0%} of the {label} {what}" for what, frac in known.items() if frac is not None]
    if not figures:
        return "no peak or no count to hold it against"
    best = max(frac for frac in known.values() if frac is not None)
    text = "at " + " and ".join(figures)
    if best > _CACHED:
        return f"{text}; above a peak: a cache holds the data, or less was read than counted"
    if best >= _NEAR:
        name = max(known, key=lambda what: known[what] or 0.0)
        return f"{text}; near the {name}, which may be what limits it"
    if best <= _FAR:
        return f"{text}; near neither: launch or occupancy limited? A kernel of it takes {mean_us:.3g} us"
    return f"{text}; between the two cases, so that occupancy or stalls may matter"
