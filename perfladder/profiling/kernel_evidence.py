"""What a kernel table says beside durations: families, copies, waits, who sets the pace, roofline, ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
from pydantic import BaseModel

from perfladder.peaks import Peaks
from perfladder.trace.attribution import Attribution
from perfladder.trace.copies import CopySite, list_copies
from perfladder.trace.critical import Boundness, find_critical, judge_boundness
from perfladder.trace.kernels import KernelSummary, KernelTable, summarize_kernels
from perfladder.trace.launches import FamilyRow, summarize_families
from perfladder.trace.model import BoolArray
from perfladder.trace.ranking import RankedGroup, rank_groups
from perfladder.trace.repeats import take_majority
from perfladder.trace.residual import NO_OPERATOR, HostParts, IdleSplit, SyncSite
from perfladder.trace.roofline import RooflineRow, build_roofline
from perfladder.trace.work import OperatorCall, match_work

_US_PER_MS: Final = 1e3
_COUNTS: Final = ("count", "num_kernels", "num_bytes", "flops")
_TIMES: Final = ("total_us", "launch_call_us", "host_us", "critical_us", "possible_win_us")
R = TypeVar("R", bound=BaseModel)


def per_call(row: R, repeats: int) -> R:
    """Return a row of sums over repeats of one call as one of a single call."""
    fields, changes = type(row).model_fields, dict[str, float]()
    for name in (*_COUNTS, *_TIMES):
        value = getattr(row, name) if name in fields else None
        if value is not None:
            changes[name] = round(value / repeats) if name in _COUNTS else value / repeats
    return row.model_copy(update=changes)


def list_synchronizations(parts: HostParts, chosen: BoolArray) -> list[SyncSite]:
    """Return where the host waited for the device, of the chosen spans, the longest first."""
    group = np.zeros(len(chosen), np.int64)
    return list(parts.split(chosen, group, 1)[0].synchronizations)


@dataclass(frozen=True)
class KernelEvidence:
    """What rung 4 reports of one replayed call; all times, counts and work are of a single call.

    Attributes:
        kernels: The kernels with their possible win, the largest total first.
        families: Kernels by what they do.
        copies: Copies by kind and call site.
        synchronizations: Where the stage made the host wait.
        bound: Who sets the pace.
        roofline: Achieved against peak, by operator and region.
        work_known_share: Part of the kernel time whose operator calls were counted.
        flops_known_share: Part of it for which there is a formula.
        ranking: Operators in their regions by possible win.
        operator_ranking: The same over all regions.
    """

    kernels: list[KernelSummary]
    families: list[FamilyRow]
    copies: list[CopySite]
    synchronizations: list[SyncSite]
    bound: Boundness
    roofline: list[RooflineRow]
    work_known_share: float
    flops_known_share: float
    ranking: list[RankedGroup]
    operator_ranking: list[RankedGroup]


def collect_evidence(
    table: KernelTable,
    attribution: Attribution,
    idle: IdleSplit | None,
    *,
    repeats: int,
    calls: Sequence[OperatorCall] = (),
    peaks: Peaks | None = None,
    unprofiled_ms: float | None = None,
    busy_ms: float | None = None,
    stage_share: float | None = None,
) -> KernelEvidence:
    """Derive the evidence from the kernels of some runs of one call.

    Args:
        table: Kernels of the runs.
        attribution: Of the same trace.
        idle: Busy and idle time of the devices in the median one of the runs.
        repeats: How many runs.
        calls: Operator calls of one run, counted in a pass of their own.
        peaks: Of the device.
        unprofiled_ms: Duration of the call without the profiler.
        busy_ms: Device work of a call.
        stage_share: The stage's share of the whole run.
    """
    parts = HostParts(table.trace, attribution)
    plain_busy_frac = min(busy_ms / unprofiled_ms, 1.0) if busy_ms is not None and unprofiled_ms else None
    critical = take_majority(table, find_critical(table, parts))
    bound = judge_boundness(table, critical, idle, plain_busy_frac)
    if bound.verdict == "device":  # the host lags only because it is profiled
        critical = np.ones(table.num_kernels, bool)
    match = match_work(table, attribution, calls)
    roofline = build_roofline(table, match, peaks)
    calls_us = unprofiled_ms * _US_PER_MS * repeats if unprofiled_ms else None
    rank = partial(rank_groups, table, match, roofline, critical, calls_us=calls_us, stage_share=stage_share)
    ranking = rank()
    # What stands outside every region and operator is the replay's own wait at the end of each call.
    sites = list_synchronizations(parts, attribution.run >= 0)
    own = [site for site in sites if site.region_id is not None or site.operator != NO_OPERATOR]
    return KernelEvidence(
        kernels=[per_call(row, repeats) for row in summarize_kernels(table, win_ns=ranking.win_ns)],
        families=[per_call(row, repeats) for row in summarize_families(table)],
        copies=[per_call(row, repeats) for row in list_copies(table)],
        synchronizations=[per_call(site, repeats) for site in own],
        bound=bound,
        roofline=[per_call(row, repeats) for row in roofline.rows],
        work_known_share=roofline.known_share,
        flops_known_share=roofline.flops_share,
        ranking=[per_call(group, repeats) for group in ranking.groups],
        operator_ranking=[per_call(group, repeats) for group in rank(by_region=False).groups],
    )
