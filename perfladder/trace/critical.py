"""Which device work the end of a run waits for: not that after which the device ran dry until the host's next launch.

A device works in stretches without a gap. How a stretch ends tells whether it would have helped to end sooner:

- the host was waiting in a synchronization or a copy to the host, or nothing follows: yes, all of it;
- the next work was launched already (latency, a dependency): as for the next stretch;
- the host had not begun the next launch and was not waiting: no. The stretch would end sooner and the gap grow.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from perfladder.trace.intervals import unite
from perfladder.trace.kernels import KernelTable
from perfladder.trace.launches import Launches
from perfladder.trace.model import BoolArray, IntArray
from perfladder.trace.residual import HostParts, IdleSplit, Part
from perfladder.trace.rows import Row
from perfladder.trace.timeline import device_of

_DEVICE_BOUND: Final = 0.9
_HOST_BOUND: Final = 0.5
_LATER: Final = np.iinfo(np.int64).max


def find_critical(table: KernelTable, parts: HostParts) -> BoolArray:
    """Return, for each entry of the table, whether the run's end waits for it; on a host-only trace all of them."""
    critical = np.ones(table.num_kernels, bool)
    if table.is_host:
        return critical
    trace, forest = table.trace, table.trace.forest
    waits = np.flatnonzero((parts.part == Part.SYNCHRONIZATION) | (parts.part == Part.COPY_D2H))
    waiting = unite(forest.start_ns[waits], forest.end_ns[waits])
    device = device_of(trace, table.event)
    for number in np.unique(device).tolist():
        mine = np.flatnonzero(device == number)
        start, end = trace.start_ns[table.event[mine]], trace.end_ns[table.event[mine]]
        busy = unite(start, end)
        if not len(busy.start_ns):
            continue
        stretch = np.maximum(np.searchsorted(busy.start_ns, start, side="right") - 1, 0)
        next_launch_ns = _first_launches(stretch, start, table.launch_ns[mine], len(busy.start_ns))
        is_waited_for = waiting.covered_within(busy.end_ns, busy.end_ns + 1) > 0
        is_last = np.arange(len(busy.end_ns)) == len(busy.end_ns) - 1
        is_dry = (next_launch_ns > busy.end_ns) & ~is_waited_for & ~is_last
        critical[mine] = _inherit(is_waited_for | is_last, is_dry)[stretch]
    return critical


def _first_launches(stretch: IntArray, start: IntArray, launch_ns: IntArray, size: int) -> IntArray:
    """Return, for each stretch, when the first work of the next one was launched; -1 if that is unknown."""
    order = np.lexsort((start, stretch))
    first = order[np.searchsorted(stretch[order], np.arange(size), side="left")]
    return np.append(launch_ns[first][1:], _LATER)


def _inherit(is_critical: BoolArray, is_dry: BoolArray) -> BoolArray:
    """Let each stretch that is neither take what the next decided one is; the last one is always decided."""
    place = np.arange(len(is_critical))
    decided = np.where(is_critical | is_dry, place, len(place))
    following = np.minimum.accumulate(decided[::-1])[::-1]
    result: BoolArray = is_critical[following]
    return result


class Boundness(Row):
    """Whether the host or the device sets the pace, with the evidence; no single figure decides it.

    Attributes:
        verdict: `device`, `host`, `mixed`, or `no_device` where none worked.
        statement: The verdict in words.
        plain_busy_frac: Device work over the duration of plain runs; None where no plain run was timed.
        profiled_busy_frac: The same within the profiled window, whose host is slower.
        waiting_for_launch_frac: Part of that window in which the device was idle, the host had not begun the next
            launch and was not waiting itself.
        in_synchronization_frac: Part of that window in which the device was idle while the host waited for it.
        critical_frac: Part of the device time that the end of the runs waits for.
        queued_frac: Part of the kernels that were launched while earlier work was unfinished.
        mean_queue_depth: Unfinished work at a launch, mean over the launches.
        median_launch_latency_us: From the start of the launching call to the start of the kernel.
    """

    verdict: Literal["device", "host", "mixed", "no_device"]
    statement: str
    plain_busy_frac: float | None = None
    profiled_busy_frac: float | None = None
    waiting_for_launch_frac: float | None = None
    in_synchronization_frac: float | None = None
    critical_frac: float | None = None
    queued_frac: float | None = None
    mean_queue_depth: float | None = None
    median_launch_latency_us: float | None = None


def judge_boundness(
    table: KernelTable, critical: BoolArray, idle: IdleSplit | None, plain_busy_frac: float | None = None
) -> Boundness:
    """Say whether host or device sets the pace.

    Args:
        table: The kernels.
        critical: From `find_critical`.
        idle: Busy and idle time of the same window; None without device work.
        plain_busy_frac: Device work over the duration of plain runs, which decides where it is known.
    """
    if idle is None or table.is_host or not table.num_kernels:
        return Boundness(verdict="no_device", statement="No device worked: the operators themselves are the work.")
    window_us = max(idle.window_us, 1e-9)
    profiled = idle.busy_us / window_us
    busy = profiled if plain_busy_frac is None else plain_busy_frac
    verdict: Literal["device", "host", "mixed"]
    verdict = "device" if busy >= _DEVICE_BOUND else "host" if busy <= _HOST_BOUND else "mixed"
    depth = Launches(table).queue_depth
    known = depth >= 0
    return Boundness(
        verdict=verdict,
        statement=_statement(
            verdict, busy, idle.waiting_for_launch_us / window_us, is_plain=plain_busy_frac is not None
        ),
        plain_busy_frac=plain_busy_frac,
        profiled_busy_frac=profiled,
        waiting_for_launch_frac=idle.waiting_for_launch_us / window_us,
        in_synchronization_frac=idle.in_synchronization_us / window_us,
        critical_frac=float(table.duration_ns[critical].sum() / max(int(table.duration_ns.sum()), 1)),
        queued_frac=float((depth[known] > 0).mean()) if known.any() else None,
        mean_queue_depth=float(depth[known].mean()) if known.any() else None,
        median_launch_latency_us=float(np.median(table.latency_ns[known])) * 1e-3 if known.any() else None,
    )


def _statement(verdict: str, busy: float, waiting: float, *, is_plain: bool) -> str:
    where = "of plain runs" if is_plain else "of the profiled window, in which the host is slower than in plain runs"
    text = f"The device works for {busy:.0%} {where}; in the profiled window it waits for a launch for {waiting:.0%}."
    more = {
        "device": "It sets the pace: faster kernels make the whole faster.",
        "host": "The host sets the pace: faster kernels win little, fewer launches and less Python win time.",
        "mixed": "Neither sets the pace alone: only kernels that something waits for are worth making faster.",
    }
    return f"{text} {more[verdict]}"
