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


def transfer_findings(pace: Pace, sites: Sequence[CopySite], background: Background) -> list[Finding]:
    """Copies between host and device that take a large part of a plain run.

    Args:
        pace: Of what.
        sites: Its copies by call site.
        background: The work.
    """
    between = [site for site in sites if site.kind in _BETWEEN]
    if not pace.plain_ms or not between:
        return []
    total_us = sum(site.total_us for site in between)
    frac = total_us / _US_PER_MS / pace.plain_ms
    if frac < TRANSFER_FRAC:
        return []
    top = max(between, key=lambda site: site.total_us)
    direction = "to the device" if top.kind == "HtoD" else "to the host"
    speed = f" at {top.bandwidth_gb_per_s:.3g} GB/s" if top.bandwidth_gb_per_s is not None else ""
    return [
        Finding(
            kind="transfer_bound",
            rung=pace.rung,
            stage=pace.stage,
            claim=(
                f"Copies between host and device take {total_us / _US_PER_MS:.3g} ms of a {pace.what} of "
                f"{pace.plain_ms:.3g} ms, most of it {direction}{speed} by {_place(top)}."
            ),
            evidence=[
                Evidence(
                    metric="copies total_us / unprofiled_ms",
                    value=frac,
                    unit=f"of a plain {pace.what}",
                    source=where(pace.rung, "copies"),
                ),
                Evidence(
                    metric=f"{top.kind} count",
                    value=top.count,
                    unit=f"a {pace.what}",
                    source=where(pace.rung, "copies"),
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
    return f"`{site.outer_operator or 'no operator'}` {region}{memory}"


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
