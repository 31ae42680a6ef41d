"""Findings of rung 4 that rest on counted work: which operator could win most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfladder.findings.finding import Evidence, Finding
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.ranking import RankedGroup
from perfladder.trace.repeats import leads

_US_PER_MS = 1e3
_WORTH_A_TRY = 0.02
_SOURCE = "kernels.json: operator_ranking"


@dataclass(frozen=True)
class _RepeatedWin:
    """What an operator could win in each repeat."""

    typical_us: float
    repeat_us: Sequence[float]

    @staticmethod
    def of(group: RankedGroup) -> _RepeatedWin:
        """By its time there: the same part of it is waited for, and its work at the roof takes as long in each."""
        waited_frac = group.critical_us / group.total_us if group.total_us else 0.0
        repeat_us = [group.possible_win_us + (us - group.total_us) * waited_frac for us in group.repeat_us]
        return _RepeatedWin(group.possible_win_us, repeat_us)


def possible_win(result: KernelsResult) -> list[Finding]:
    """What the first operator of the ranking whose work is known could win.

    Without its work the whole of its time would be the bound, which says nothing. Where the host sets the pace, kernels
    win nothing. Where another operator could win most in every second profiled replay, none is first.
    """
    known = [group for group in result.operator_ranking if group.achieved_frac is not None]
    first = known[0] if known else None
    if first is None or result.bound is None or result.bound.verdict == "host":
        return []
    if first.possible_win_frac is None or first.possible_win_frac < _WORTH_A_TRY:
        return []
    wins = [_RepeatedWin.of(group) for group in known]
    if not leads(wins[0], wins):
        return []
    place = _heaviest_place(result, first.operator)
    of_run = f", {first.run_win_frac:.0%} of the run" if first.run_win_frac is not None else ""
    return [
        Finding(
            kind="largest_possible_win",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"Of the operators whose work is known {first.operator} could win most: at most "
                f"{first.possible_win_frac:.0%} of a call{of_run}"
                f"{f', first of all in {place}' if place else ''}. {_how_near(result, first)}"
            ),
            evidence=_evidence(first),
            uncertainty=(
                "an upper bound by counted work and peaks; inputs and outputs count once, caches are left out"
                f"{_spread(result, wins[0])}"
            ),
            refuted_by="a faster implementation of it that leaves the call as long as it was",
            next_experiment=(
                f"Try another implementation of {first.operator} (backend, layout, precision, fusion) on the replay, "
                "check its output, and time the workload."
            ),
        )
    ]


def _spread(result: KernelsResult, win: _RepeatedWin) -> str:
    """The same win by the time of each profiled replay, as parts of a plain call."""
    call_us = (result.unprofiled_ms or 0.0) * _US_PER_MS
    if not win.repeat_us or not call_us:
        return ""
    wins = [min(max(us, 0.0) / call_us, 1.0) for us in (win.typical_us, *win.repeat_us)]
    return f"; {min(wins):.0%} to {max(wins):.0%} of a call by its times in {len(win.repeat_us)} profiled replays"


def _heaviest_place(result: KernelsResult, operator: str) -> str | None:
    row = next((group for group in result.positions.ranking if group.operator == operator), None)
    if row is None or not row.region_id:
        return None
    many = f" ({row.num_modules})" if row.num_modules and row.num_modules > 1 else ""
    return row.region_id.partition(":")[2] + many


def _how_near(result: KernelsResult, group: RankedGroup) -> str:
    """The operator's place under the roof where most of its time is, in the roofline's own words."""
    row = next((row for row in result.positions.roofline if row.operator == group.operator), None)
    if row is None:
        return f"It is at {group.achieved_frac:.0%} of the nearer roof."
    return f"Where most of its time is, it is {row.statement}."


def _evidence(group: RankedGroup) -> list[Evidence]:
    assert group.possible_win_frac is not None
    assert group.achieved_frac is not None
    return [
        Evidence(metric="possible_win_frac", value=group.possible_win_frac, unit="of a plain call", source=_SOURCE),
        Evidence(metric="share", value=group.share, unit="of kernel time", source=_SOURCE),
        Evidence(metric="achieved_frac", value=group.achieved_frac, unit="of the nearer roof", source=_SOURCE),
    ]
