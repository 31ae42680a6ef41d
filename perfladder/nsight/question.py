"""Which one kernel is worth a look with Nsight Compute: a question that rung 4 leaves open, and where its launch is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perfladder.errors import InputError, TraceError
from perfladder.nsight.names import function_name
from perfladder.profiling.shares import Share
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.kernels import KernelTable
from perfladder.trace.repeats import leads
from perfladder.trace.runtime_calls import is_communication

_WORTH_A_LOOK: Final = 0.1
_NEAR_THE_ROOF: Final = 0.8
_WAITS_FOR_OTHERS: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_?kernel|nvshmem|multimem|symm_mem|cross_device",
    re.IGNORECASE,
)
"""Kernels outside of NCCL that wait for another device: custom collectives of vLLM, TensorRT-LLM, torch, NVSHMEM."""


def refuse_communication(kernel: str) -> None:
    """Refuse a kernel that waits for other devices: ncu repeats each kernel alone, so that it would wait forever.

    Raises:
        InputError: It is one.
    """
    if waits_for_others(kernel):
        raise InputError(
            f"kernel: {kernel!r} waits for other devices, and ncu repeats a kernel while the others stand still, so "
            "that it would never end. Choose one that computes; rung 2 has the time of communication."
        )


def open_question(result: KernelsResult) -> Share | None:
    """The kernel whose slowness rung 4 cannot explain, or None where there is no such question.

    It must be one: a kernel with at least a tenth of the kernel time, while the device sets the pace, whose operator is
    not near its roof, and which is the heaviest in most of the profiled replays. It is reproducible, since rung 4 has
    seen it in each replay of a call that gives the same output.
    """
    if result.kind != "kernels" or (result.bound is not None and result.bound.verdict == "host"):
        return None
    candidates = _candidates(result)
    top = candidates[0] if candidates else None
    if top is None or top.share < _WORTH_A_LOOK or not leads(top, candidates):
        return None
    achieved = achieved_frac(result, top.name)
    return None if achieved is not None and achieved >= _NEAR_THE_ROOF else top


def heaviest_kernel(result: KernelsResult) -> Share | None:
    """The kernel with the largest share that ncu can profile: no copy, and none that waits for other devices."""
    return next(iter(_candidates(result)), None)


def _candidates(result: KernelsResult) -> list[Share]:
    kernels = {row.kernel for row in result.kernels if row.category == "kernel" and not waits_for_others(row.kernel)}
    return [share for share in result.by_kernel if share.name in kernels]


def waits_for_others(kernel: str) -> bool:
    """Whether a kernel communicates with other devices."""
    return is_communication(kernel) or _WAITS_FOR_OTHERS.search(kernel) is not None


def achieved_frac(result: KernelsResult, kernel: str) -> float | None:
    """The part of the nearer roof that the kernel's operator reaches, where most of its time is; None if unknown."""
    row = max((row for row in result.kernels if row.kernel == kernel), key=lambda row: row.total_us)
    names = (row.operator, row.outer_operator)
    group = next((group for group in result.ranking if group.operator in names and group.region_id == row.region), None)
    return None if group is None else group.achieved_frac


def launch_index(trace: Path, kernel: str) -> int | None:
    """How many launches of the same function come before the kernel's first one in a replayed call; None if unknown.

    ncu filters by the function, of which a call may launch several instantiations.
    """
    from perfladder.trace.attribution import attribute
    from perfladder.trace.kernels import list_kernels
    from perfladder.trace.read import read_trace

    try:
        found = read_trace(trace)
    except TraceError:
        return None
    names = _in_order(list_kernels(found, attribute(found), only_runs=True))
    same = [name for name in names if function_name(name) == function_name(kernel)]
    if kernel == function_name(kernel) and same:
        return 0
    return same.index(kernel) if kernel in same else None


def _in_order(table: KernelTable) -> Sequence[str]:
    """Names of the kernels of the first replayed call in the order in which they were launched."""
    names, first = table.trace.names, min((int(run) for run in table.run), default=0)
    rows = [
        (int(table.launch_ns[i]), int(table.trace.start_ns[table.event[i]]), names[table.trace.name_id[table.event[i]]])
        for i in range(table.num_kernels)
        if table.run[i] == first
    ]
    return [name for _, _, name in sorted(rows)]
