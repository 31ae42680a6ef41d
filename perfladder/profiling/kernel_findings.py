"""Findings of rung 4 that rest on counted work: what the first group of the ranking could win."""

from __future__ import annotations

from perfladder.findings import Evidence, Finding
from perfladder.rungs.kernels import KernelsResult

_WORTH_A_TRY = 0.02


def possible_win(result: KernelsResult) -> list[Finding]:
    """What the first group of the ranking could win; where the host sets the pace, the kernels win nothing."""
    first = result.ranking[0] if result.ranking else None
    if first is None or result.bound is None or not first.possible_win_frac:
        return []
    if result.bound.verdict == "host" or first.possible_win_frac < _WORTH_A_TRY:
        return []
    place = f" in {first.region_id.partition(':')[2]}" if first.region_id else ""
    row = next(
        (r for r in result.roofline if (r.region_id, r.operator) == (first.region_id, first.operator)),
        None,
    )
    source = "kernels.json: ranking"
    evidence = [
        Evidence(metric="possible_win_frac", value=first.possible_win_frac, unit="of a plain call", source=source),
        Evidence(metric="share", value=first.share, unit="of kernel time", source=source),
    ]
    if first.achieved_frac is not None:
        evidence.append(
            Evidence(metric="achieved_frac", value=first.achieved_frac, unit="of the nearer roof", source=source)
        )
    of_run = f", {first.run_win_frac:.0%} of the run" if first.run_win_frac is not None else ""
    return [
        Finding(
            kind="largest_possible_win",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"{first.operator}{place} could win most: at most {first.possible_win_frac:.0%} of a call{of_run}. "
                + (f"It is {row.statement}." if row is not None else "How near it is to the device's peaks is unknown.")
            ),
            evidence=evidence,
            uncertainty="an upper bound by counted work and peaks; inputs and outputs count once, caches are left out",
            refuted_by="a faster implementation of it that leaves the call as long as it was",
            next_experiment=(
                f"Try another implementation of {first.operator}{place} (backend, layout, precision, fusion) on the "
                "replay, check its output, and time the workload."
            ),
        )
    ]
