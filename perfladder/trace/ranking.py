"""In which order to work: what each group of kernels could win end to end, were it done at the nearer roof.

win = time that the end of a run waits for x (1 - achieved part of the nearer roof). A group whose work is not known is
taken to win all of that time, so its win is an upper bound. Wins do not add up: one may uncover the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.trace.dynamo import RUNTIME_NAME
from perfladder.trace.families import families_of_groups
from perfladder.trace.kernels import KernelTable
from perfladder.trace.model import BoolArray, IntArray
from perfladder.trace.roofline import Roofline
from perfladder.trace.rows import Row
from perfladder.trace.sums import FloatArray, count_by, longest_by, number_combinations, sum_by
from perfladder.trace.work import WorkMatch

_US: Final = 1e-3
_NONE: Final = -1
_RUNTIME_REASON: Final = (
    "guards and dispatch of torch.compile, no operator: fewer graph breaks and guards make it shorter; what a backend "
    "other than Inductor runs past torch's operators is in it too"
)
MODEL: Final = (
    "Possible win = kernel time that the end of the call waits for x (1 - achieved part of the nearer roof); time in "
    "which the host is behind wins nothing. Where the work is not known, all of that time: an upper bound. Wins do not "
    "add up."
)


class RankedGroup(Row):
    """All kernels of one operator, in one region or in all of them, with what they could win; times are over all runs.

    Attributes:
        region_id: Region; None outside every region, and where regions are taken together.
        operator: The counted operator, else the outermost one inside the region, else the kernel's name.
        family: That which most of its time is of; on a CPU that of the operator.
        count: Number of kernels.
        total_us: Their time.
        share: Fraction of all kernel time.
        critical_us: The part of their time that the end of a run waits for.
        achieved_frac: Part of the nearer roof; None where it is not known.
        possible_win_us: `critical_us` times what is left to that roof.
        possible_win_frac: The same as a fraction of the calls' duration without the profiler; None if unknown.
        run_win_frac: The same as a fraction of the whole run: times the stage's share; None if unknown.
        reason: Why it is no more, in words.
        repeat_us: Their time in each repeat; empty where repeats are not told apart.
        num_modules: How many modules the region stands for, where repeated ones are taken together; else None.
    """

    region_id: str | None
    operator: str
    family: str
    count: int
    total_us: float
    share: float
    critical_us: float
    achieved_frac: float | None
    possible_win_us: float
    possible_win_frac: float | None = None
    run_win_frac: float | None = None
    reason: str
    repeat_us: list[float] = []
    num_modules: int | None = None


@dataclass(frozen=True, eq=False)
class Ranking:
    """The groups, the largest possible win first, and the possible win of each entry of the table in ns."""

    groups: list[RankedGroup]
    win_ns: FloatArray


def rank_groups(
    table: KernelTable,
    match: WorkMatch,
    roofline: Roofline,
    critical: BoolArray,
    *,
    calls_us: float | None = None,
    stage_share: float | None = None,
    by_region: bool = True,
) -> Ranking:
    """Rank operators by what making them as fast as the device allows could win.

    Args:
        table: The kernels of the runs.
        match: Which counted call each of them belongs to.
        roofline: How near to the peaks these are.
        critical: Which kernels the end of a run waits for.
        calls_us: Duration of all runs of the table without the profiler.
        stage_share: The stage's share of the whole run.
        by_region: Whether an operator is a group in each region, or one over all of them.
    """
    count = table.num_kernels
    if not count:
        return Ranking([], np.empty(0))
    achieved = np.array(
        [row.achieved_frac if row.achieved_frac is not None else np.nan for row in roofline.rows] or [np.nan]
    )
    reached = np.where(roofline.row >= 0, achieved[np.maximum(roofline.row, 0)], np.nan)
    name = _operator_names(table, match)
    is_operator = np.array([known != RUNTIME_NAME for known in table.trace.names], bool)[name]
    win_ns = table.duration_ns * critical * is_operator * (1 - np.nan_to_num(reached))
    region = np.where(table.region >= 0, table.trace.forest.name_id[np.maximum(table.region, 0)], _NONE)
    code, size = number_combinations((region, name) if by_region else (name,), count)
    total, win = sum_by(code, table.duration_ns, size), sum_by(code, win_ns, size)
    waited = sum_by(code, table.duration_ns * critical, size)
    known_ns = sum_by(code, np.where(np.isnan(reached), 0, table.duration_ns), size)
    reached_ns = sum_by(code, np.nan_to_num(reached) * table.duration_ns, size)
    number, longest = count_by(code, size), longest_by(code, table.duration_ns, size)
    operators = [table.trace.names[index] for index in name[longest].tolist()]
    family = families_of_groups(table, np.arange(count), code, operators)
    whole, repeat_us = max(float(total.sum()), 1e-9), table.repeat_us(code, size)
    groups = []
    for index in np.lexsort((-total, -win)).tolist():
        entry = int(longest[index])
        known = float(reached_ns[index] / known_ns[index]) if known_ns[index] else None
        win_us = float(win[index]) * _US
        fraction = min(win_us / calls_us, 1.0) if calls_us else None
        groups.append(
            RankedGroup(
                region_id=table.row(entry).region if by_region else None,
                operator=operators[index],
                family=family[index],
                count=int(number[index]),
                total_us=float(total[index]) * _US,
                share=float(total[index]) / whole,
                critical_us=float(waited[index]) * _US,
                achieved_frac=known,
                possible_win_us=win_us,
                possible_win_frac=fraction,
                run_win_frac=fraction * stage_share if fraction is not None and stage_share is not None else None,
                reason=reason_of(operators[index], float(waited[index] / max(total[index], 1e-9)), known),
                repeat_us=repeat_us[index],
            )
        )
    return Ranking(groups, win_ns)


def _operator_names(table: KernelTable, match: WorkMatch) -> IntArray:
    """Return the index of the name that each entry's group goes by."""
    forest = table.trace.forest
    position = np.where(match.span >= 0, match.span, table.outer_operator)
    position = np.where(position >= 0, position, table.operator)
    named = np.where(position >= 0, forest.name_id[np.maximum(position, 0)], table.trace.name_id[table.event])
    return named.astype(np.int64)


def reason_of(operator: str, waited_frac: float, achieved: float | None) -> str:
    """Say why an operator could win no more.

    Args:
        operator: Its name.
        waited_frac: The part of its time that the end of a run waits for.
        achieved: Part of the nearer roof; None where it is not known.
    """
    if operator == RUNTIME_NAME:
        return _RUNTIME_REASON
    host = (
        "" if waited_frac >= 0.995 else f"{waited_frac:.0%} of its time is waited for, the rest hides behind the host; "
    )
    if achieved is None:
        return f"{host}work not known: an upper bound"
    return f"{host}it is at {achieved:.0%} of the nearer roof"
