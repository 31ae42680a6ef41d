"""Where copies come from, how large they are and how fast: one row for each kind, host memory and call site."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfladder.trace.kernels import KernelTable
from perfladder.trace.launches import Launches
from perfladder.trace.model import Category
from perfladder.trace.rows import Row
from perfladder.trace.runtime_calls import classify_copy, classify_host_memory
from perfladder.trace.sums import count_by, number_combinations, sum_by

_US: Final = 1e-3


class CopySite(Row):
    """All copies of one kind from one operator in one region.

    Attributes:
        kind: `HtoD`, `DtoH`, `DtoD`, `PtoP`, `HtoH` or `unknown`.
        host_memory: `pageable`, `pinned` or `managed`; None where no host memory takes part, or the trace is silent.
            The driver stages a pageable copy, and the host waits in the call.
        operator: Innermost operator around the copying call.
        outer_operator: Outermost operator inside the region: what the module's code called.
        region_id: Region around the call.
        count: Number of copies.
        total_us: Sum of their durations on the device.
        num_bytes: Sum of their sizes; None if one does not say its size.
        bandwidth_gb_per_s: Achieved, 10**9 bytes.
        host_us: Time the host spent in the copying calls.
    """

    kind: str
    host_memory: str | None
    operator: str | None
    outer_operator: str | None
    region_id: str | None
    count: int
    total_us: float
    num_bytes: int | None
    bandwidth_gb_per_s: float | None
    host_us: float | None


def list_copies(table: KernelTable) -> list[CopySite]:
    """Sum the copies of a table by kind and call site, the largest total first; fills are none."""
    trace, forest = table.trace, table.trace.forest
    is_copy = trace.category[table.event] == Category.GPU_MEMCPY
    chosen = np.flatnonzero(is_copy)
    if not len(chosen):
        return []
    event = table.event[chosen]
    sites = (table.operator[chosen], table.outer_operator[chosen], table.region[chosen])
    names = [np.where(site >= 0, forest.name_id[np.maximum(site, 0)], -1) for site in sites]
    code, size = number_combinations((trace.name_id[event], *names), len(chosen))
    example = np.zeros(size, np.int64)
    example[code] = chosen
    total = sum_by(code, table.duration_ns[chosen], size)
    sized = trace.num_bytes[event] >= 0
    num_bytes = sum_by(code[sized], trace.num_bytes[event[sized]], size)
    call_ns = Launches(table).call_ns[chosen]
    host_ns = sum_by(code[call_ns >= 0], call_ns[call_ns >= 0], size)
    count, num_sized, num_called = count_by(code, size), count_by(code[sized], size), count_by(code[call_ns >= 0], size)
    rows = []
    for index in np.argsort(-total, kind="stable").tolist():
        row = table.row(int(example[index]))
        is_sized = num_sized[index] == count[index]
        rows.append(
            CopySite(
                kind=classify_copy(row.kernel),
                host_memory=classify_host_memory(row.kernel),
                operator=row.operator,
                outer_operator=row.outer_operator,
                region_id=row.region,
                count=int(count[index]),
                total_us=float(total[index]) * _US,
                num_bytes=int(num_bytes[index]) if is_sized else None,
                bandwidth_gb_per_s=float(num_bytes[index] / total[index]) if is_sized and total[index] else None,
                host_us=float(host_ns[index]) * _US if num_called[index] else None,
            )
        )
    return rows
