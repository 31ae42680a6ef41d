"""Findings about data on its way: copies between host and device, and collectives between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfladder.findings.background import Background, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.findings.host_bound import Pace
from perfladder.trace.copies import CopySite
from perfladder.trace.timeline import Timeline

TRANSFER_FRAC: Final = 0.2
"""Of a plain run, spent in copies between host and device."""
COMMUNICATION_FRAC: Final = 0.2
"""Of a plain run, spent in collectives that no kernel hides."""
_BETWEEN: Final = ("HtoD", "DtoH")
_US_PER_MS: Final = 1e3


def transfer_findings(
    pace: Pace, timeline: Timeline | None, num_runs: int, sites: Sequence[CopySite], background: Background
) -> list[Finding]:
    """Copies between host and device that take a large part of a plain run.

    Args:
        pace: Of what.
        timeline: Of all its profiled runs together.
        num_runs: How many these are.
        sites: Copies of one run by call site, where they are known.
        background: The work.
    """
    if timeline is None or not pace.plain_ms:
        return []
    rows = [row for row in timeline.copies if row.kind in _BETWEEN]
    total_us = sum(row.total_us for row in rows) / num_runs
    frac = total_us / _US_PER_MS / pace.plain_ms
    if frac < TRANSFER_FRAC:
        return []
    top = max(rows, key=lambda row: row.total_us)
    direction = "to the device" if top.kind == "HtoD" else "to the host"
    own = max((site for site in sites if site.kind == top.kind), key=lambda site: site.total_us, default=None)
    place = "" if own is None else _place(own)
    speed = f" at {top.bandwidth_gb_per_s:.3g} GB/s" if top.bandwidth_gb_per_s is not None else ""
    return [
        Finding(
            kind="transfer_bound",
            rung=pace.rung,
            stage=pace.stage,
            claim=(
                f"Copies between host and device take {total_us / _US_PER_MS:.3g} ms of a {pace.what} of "
                f"{pace.plain_ms:.3g} ms, most of it {direction}{speed}{place}."
            ),
            evidence=[
                Evidence(
                    metric="copies total_us / unprofiled_ms",
                    value=frac,
                    unit=f"of a plain {pace.what}",
                    source=where(pace.rung, "timeline.copies"),
                ),
                Evidence(
                    metric=f"{top.kind} count",
                    value=top.count / num_runs,
                    unit=f"a {pace.what}",
                    source=where(pace.rung, "timeline.copies"),
                ),
            ],
            uncertainty="time of the copies on the device; what of it kernels hide is not taken off",
            refuted_by="the same duration with the copied data on the device already",
            next_experiment=(
                "Keep the data on the device from one call to the next, or copy it from pinned memory without waiting "
                "(non_blocking=True) while other work runs; then run again and compare."
            ),
            next_command=background.command("run"),
        )
    ]


def _place(site: CopySite) -> str:
    region = "outside every module" if site.region_id is None else f"in {site.region_id.partition(':')[2]}"
    memory = f", {site.host_memory} memory" if site.host_memory else ""
    return f" by `{site.outer_operator or 'no operator'}` {region}{memory}"


def communication_findings(
    pace: Pace, timeline: Timeline | None, num_runs: int, background: Background
) -> list[Finding]:
    """Collectives that no kernel hides and that take a large part of a plain run."""
    overlap = timeline.overlap if timeline is not None else None
    if timeline is None or overlap is None or not pace.plain_ms:
        return []
    exposed_ms = overlap.exposed_communication_us / num_runs / _US_PER_MS
    frac = exposed_ms / pace.plain_ms
    if frac < COMMUNICATION_FRAC:
        return []
    top = max(timeline.communication, key=lambda row: row.total_us)
    return [
        Finding(
            kind="communication_bound",
            rung=pace.rung,
            stage=pace.stage,
            claim=(
                f"Collectives that no computation hides take {exposed_ms:.3g} ms of a {pace.what} of "
                f"{pace.plain_ms:.3g} ms, most of it {top.name}."
            ),
            evidence=[
                Evidence(
                    metric="exposed_communication_us / unprofiled_ms",
                    value=frac,
                    unit=f"of a plain {pace.what}",
                    source=where(pace.rung, "timeline.overlap"),
                ),
                Evidence(
                    metric="overlap_frac",
                    value=overlap.overlap_frac or 0.0,
                    unit="of the communication is hidden",
                    source=where(pace.rung, "timeline.overlap"),
                ),
            ],
            uncertainty="a collective's time includes waiting for the slowest rank; one rank's trace is shown",
            refuted_by="the same collectives with equal arrival of all ranks and a short duration",
            next_experiment=(
                "Compare when the ranks arrive (the ranks of rung 1): if one is late, even its work out; else overlap "
                "the collective with computation, or make it smaller or rarer."
            ),
        )
    ]
