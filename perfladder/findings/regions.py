"""Findings of rung 2: what lies outside every region, and whether the profiler distorts."""

from __future__ import annotations

from perfladder.findings.background import Background, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.findings.host_bound import OTHER_THREADS_FRAC, Pace, pace_findings
from perfladder.findings.movement import communication_findings, transfer_findings
from perfladder.rungs.regions import RegionsResult
from perfladder.trace.regions import middle_run

_CLEAR_SHARE = 0.2
_DISTORTION = 1.5


def regions_findings(result: RegionsResult, background: Background) -> list[Finding]:
    """Where the run's time is outside modules, who sets its pace, and how much the profiler changed."""
    found = []
    residual, ratio = result.residual, result.profiled_ratio
    share = _own_share(result)
    others = _other_threads_frac(result)
    if others >= OTHER_THREADS_FRAC:
        found.append(_other_threads(others))
    elif residual is not None and share > _CLEAR_SHARE:
        parts = {
            "Python or waiting": residual.host.python_us,
            "operator dispatch": residual.host.operator_dispatch_us,
            "operators' own work": residual.host.operator_compute_us,
            "kernel launch": residual.host.kernel_launch_us,
        }
        largest = max(parts, key=lambda name: parts[name])
        found.append(
            Finding(
                kind="outside_regions",
                rung="regions",
                claim=f"{share:.0%} of the host time is outside every module; most of it is {largest}.",
                evidence=[
                    Evidence(
                        metric="residual.cpu_share without waits",
                        value=share,
                        unit="of host time",
                        source=where("regions", "residual"),
                    ),
                    Evidence(
                        metric=largest, value=parts[largest], unit="us a run", source=where("regions", "residual.host")
                    ),
                ],
                uncertainty="shares of profiled runs, in which Python and dispatch weigh more than in plain ones",
                refuted_by="stage timing in which the time outside every stage is small",
                next_experiment="Name the pipeline's own methods under 'stages' to see which of them holds it.",
            )
        )
    found += _pace_of_run(result, background)
    if ratio is not None and ratio > _DISTORTION:
        found.append(
            Finding(
                kind="profiler_distorts",
                rung="regions",
                claim=f"Profiled runs took {ratio:.1f} times as long as plain ones; perhaps many operators are short.",
                evidence=[
                    Evidence(
                        metric="profiled_ratio",
                        value=ratio,
                        unit="profiled / plain",
                        source=where("regions", "profiled_ratio"),
                    )
                ],
                uncertainty="the plain runs are those of rung 1, in the same process",
                refuted_by="a profiled run that is as fast as a plain one",
                next_experiment="Trust a region's share only where stage timing agrees; quote latency from rung 1.",
            )
        )
    return found


def _other_threads_frac(result: RegionsResult) -> float:
    """Host work of other threads in the run of median duration; of several threads together it may be above 1."""
    if not result.runs:
        return 0.0
    middle = middle_run(result.runs)
    return middle.other_threads_cpu_time_us / max(middle.wall_time_us, 1e-9)


def _other_threads(frac: float) -> Finding:
    return Finding(
        kind="other_threads",
        rung="regions",
        claim=(
            f"Other threads do host work for {frac:.0%} of a run. Its own thread may wait for them, so its time "
            "outside modules tells nothing by itself."
        ),
        evidence=[
            Evidence(
                metric="other_threads_cpu_time_us / wall_time_us",
                value=frac,
                unit="of a profiled run, over all other threads",
                source=where("regions", "runs[]"),
            )
        ],
        uncertainty="operators of these threads in one profiled run; Python between them is not counted",
        refuted_by="a run as long in which these threads have nothing to do",
        next_experiment="Make these calls on the run's own thread in a workload of their own; compare its findings.",
    )


def _own_share(result: RegionsResult) -> float:
    """Part of the host time outside every region in which it does not wait for the device."""
    residual = result.residual
    if residual is None or not residual.host.total_us:
        return 0.0
    return residual.cpu_share * (1 - residual.host.synchronization_us / residual.host.total_us)


def _pace_of_run(result: RegionsResult, background: Background) -> list[Finding]:
    if not result.runs:
        return []
    middle = middle_run(result.runs)
    pace = Pace(
        rung="regions",
        stage=None,
        host=middle.host,
        idle=middle.device,
        busy_ms=result.device_busy_ms,
        plain_ms=result.unprofiled_ms,
        waits=result.waits,
        other_threads_frac=_other_threads_frac(result),
        gap=result.lanes.longest_gap() if result.lanes is not None else None,
    )
    # A host that waits for copies is no further cause.
    copies = transfer_findings(pace, result.copies, background)
    return [
        *(copies or pace_findings(pace, background)),
        *communication_findings(pace, result.timeline, len(result.runs), background),
    ]
