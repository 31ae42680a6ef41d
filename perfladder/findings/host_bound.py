"""Who keeps the pace: a device that waits for the host, and what the host does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perfladder.findings.background import Background, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.trace.lanes import HostGap
from perfladder.trace.residual import HostSplit, IdleSplit
from perfladder.trace.waits import WaitModel

BUSY_FRAC: Final = 0.9
"""A device that works for so much of a plain run sets the pace itself."""
RECOVERABLE_FRAC: Final = 0.25
"""Idle time of a plain run that would go with the waits, from which on they are worth a finding."""
LEAST_WIN_FRAC: Final = 0.02
"""Of a plain run: less is not worth a change."""
MAIN_PART: Final = 0.5
"""Of the host's own work: one kind of it is the cause from here on."""
GLUE_US: Final = 20.0
"""Python for each operator that is called, from which on it is more than calling the operator takes."""
OWN_WORK_FRAC: Final = 0.5
"""Of a plain run on a CPU: below it operators work for less than half of the time."""
OTHER_THREADS_FRAC: Final = 0.2
"""Of a run: from here on the work of other threads is part of who keeps the pace."""
_US_PER_MS: Final = 1e3
_PROFILED: Final = "the host's parts are of profiled runs, in which both weigh more than in plain ones"
_SCHEDULER: Final = (
    " Where a scheduler only looks its timestep up, `perfladder tune` gives it a copy on the host, if that is faster."
)


@dataclass(frozen=True)
class Pace:
    """What is known of one run of the workload, or one call of a stage.

    Attributes:
        rung: Whose result it is.
        stage: The stage; None for the whole run.
        host: What the host's time of a profiled one is made of.
        idle: Busy and idle time of the device in it; None without a device.
        busy_ms: Work of the device in one.
        plain_ms: Duration of one without the profiler.
        waits: What the host's waits cost in it.
        other_threads_frac: Host work of other threads during it, for which its own thread may wait.
        gap: The host's longest stretch outside every region, in a profiled one.
    """

    rung: str
    stage: str | None
    host: HostSplit
    idle: IdleSplit | None
    busy_ms: float | None
    plain_ms: float | None
    waits: WaitModel | None = None
    other_threads_frac: float = 0.0
    gap: HostGap | None = None

    @property
    def what(self) -> str:
        """The unit of it, in words."""
        return "run" if self.stage is None else f"call of {self.stage}"


def pace_findings(pace: Pace, background: Background) -> list[Finding]:
    """Say why the device waits, or on a CPU why operators work for less than half of the time; nothing if they do not.

    The device's work of profiled runs stands against the duration of plain ones, since profiling slows only the host.
    """
    if not pace.plain_ms:
        return []
    if pace.busy_ms is None:
        return _without_device(pace, background)
    if pace.idle is None or pace.busy_ms / pace.plain_ms >= BUSY_FRAC:
        return []
    if _is_idle_at_its_edges(pace):
        # A stage alone waits for its first launch and for its end; in the pipeline these overlap other work.
        return [_at_edges(pace)] if pace.stage is None else []
    waits = _synchronization(pace, background)
    if waits is not None:
        return [waits]
    return [_host_work(pace, background, _busy(pace)) or _undecided(pace)]


def _is_idle_at_its_edges(pace: Pace) -> bool:
    """Whether what the device idles in a plain one is no more than it does before its first and after its last work."""
    assert pace.idle is not None
    assert pace.busy_ms is not None
    assert pace.plain_ms
    inside_us = (pace.plain_ms - pace.busy_ms) * _US_PER_MS - pace.idle.edge_us
    return inside_us < (1 - BUSY_FRAC) * pace.plain_ms * _US_PER_MS


def _busy(pace: Pace) -> Evidence:
    assert pace.busy_ms is not None
    assert pace.plain_ms
    return Evidence(
        metric="device_busy_ms / unprofiled_ms",
        value=pace.busy_ms / pace.plain_ms,
        unit=f"of a plain {pace.what}",
        source=where(pace.rung, "device_busy_ms"),
    )


def _waits_text(pace: Pace) -> str:
    assert pace.busy_ms is not None
    assert pace.plain_ms
    return f"The device works for {pace.busy_ms:.3g} ms of a {pace.what} of {pace.plain_ms:.3g} ms"


def _synchronization(pace: Pace, background: Background) -> Finding | None:
    """Waits that keep the host from being ahead: what a run without them would win, as the model says."""
    model = pace.waits
    if model is None or not model.sites or pace.busy_ms is None or not pace.plain_ms:
        return None
    idle_us = (pace.plain_ms - pace.busy_ms) * _US_PER_MS
    frac, of_run = model.win_us / max(idle_us, 1e-9), model.win_us / model.plain_us
    if frac < RECOVERABLE_FRAC or of_run < LEAST_WIN_FRAC:
        return None
    site, source = model.sites[0], where(pace.rung, "waits")
    is_step = (site.region_id or "").endswith("scheduler.step") and pace.stage is None
    place = "outside every module" if site.region_id is None else f"in {site.region_id.partition(':')[2]}"
    return Finding(
        kind="host_bound_synchronization",
        rung=pace.rung,
        stage=pace.stage,
        claim=(
            f"{_waits_text(pace)}. Waits of the host keep it from being ahead: without them a {pace.what} would take "
            "about "
            f"{of_run:.0%} less. The longest: `{site.outer_operator}` {place} ({site.call}, {site.count} a "
            f"{pace.what})."
        ),
        evidence=[
            Evidence(metric="win_us / plain_us", value=of_run, unit=f"of a plain {pace.what}", source=source),
            Evidence(
                metric=f"{site.outer_operator} wait_us",
                value=site.wait_us,
                unit=f"us waited a {pace.what}",
                source=source,
            ),
            Evidence(metric="host_scale", value=model.host_scale, unit="plain / profiled host time", source=source),
            _busy(pace),
        ],
        uncertainty=(
            "a model: the profiled run with its host sped up until it takes as long as a plain one; what the waiting "
            "operators cost themselves is not in it"
        ),
        refuted_by="the same duration in runs without that wait",
        next_experiment=(
            f"Take the wait out of `{site.outer_operator}` {place}: keep the value on the device, make it once before "
            f"the loop, or read it after; then run again and compare.{_SCHEDULER if is_step else ''}"
        ),
        next_command=background.command("run"),
    )


def _host_work(pace: Pace, background: Background, work: Evidence) -> Finding | None:
    """Which kind of the host's own work is most of it: dispatch, Python, or neither.

    Calling an operator takes Python too, so that Python counts as the cause only where much of it is run for each one.
    """
    host = pace.host
    if pace.other_threads_frac >= OTHER_THREADS_FRAC:
        return None
    python = host.python_us + host.garbage_collection_us
    dispatch = host.operator_dispatch_us + host.kernel_launch_us + host.runtime_other_us
    each_us = python / max(host.num_operators, 1)
    if max(python, dispatch) <= 0:
        return None
    frac = python / (python + dispatch)
    source = where(pace.rung, "host")
    evidence = [
        work,
        Evidence(metric="python_us / own", value=frac, unit="of the host's own work", source=source),
        Evidence(metric="num_operators", value=host.num_operators, unit=f"a {pace.what}", source=source),
        Evidence(metric="python_us / num_operators", value=each_us, unit="us", source=source),
    ]
    if frac >= MAIN_PART and each_us >= GLUE_US:
        return _python(pace, evidence, frac)
    if frac < MAIN_PART or each_us < GLUE_US:
        return _dispatch(pace, background, evidence)
    return None


def _start(pace: Pace, work: Evidence) -> str:
    if pace.busy_ms is None:
        return f"Operators work for {work.value:.0%} of a plain {pace.what}"
    return f"{_waits_text(pace)}: it waits for the host"


def _without_device(pace: Pace, background: Background) -> list[Finding]:
    """The same on a CPU, where operators' own work stands against the plain duration."""
    frac = pace.host.operator_compute_us / ((pace.plain_ms or 0.0) * _US_PER_MS)
    if frac >= OWN_WORK_FRAC:
        return []
    work = Evidence(
        metric="operator_compute_us / unprofiled_ms",
        value=frac,
        unit=f"of a plain {pace.what}",
        source=where(pace.rung, "host.operator_compute_us"),
    )
    found = _host_work(pace, background, work)
    return [] if found is None else [found]


def _python(pace: Pace, evidence: list[Evidence], frac: float) -> Finding:
    return Finding(
        kind="host_bound_python",
        rung=pace.rung,
        stage=pace.stage,
        claim=(
            f"{_start(pace, evidence[0])}; {frac:.0%} of the host's own work is Python between the operators, or "
            "waiting "
            f"that the profiler does not see ({evidence[-1].value:.3g} us for each operator)."
        ),
        evidence=evidence,
        uncertainty=_PROFILED,
        refuted_by=_refutation(pace),
        next_experiment=(
            "Name the methods that run between the modules under 'stages', to see which of them holds it."
            f"{_where(pace)}"
            if pace.stage is None
            else f"Read the code of {pace.stage} between its operators; move out what does not depend on the input."
        ),
    )


def _dispatch(pace: Pace, background: Background, evidence: list[Evidence]) -> Finding:
    options = ":cuda_graphs=true" if pace.busy_ms is not None else ""
    count = pace.host.num_operators
    return Finding(
        kind="host_bound_dispatch",
        rung=pace.rung,
        stage=pace.stage,
        claim=f"{_start(pace, evidence[0])}; calling and launching {count} small operators a {pace.what} takes longer.",
        evidence=evidence,
        uncertainty=_PROFILED,
        refuted_by=_refutation(pace),
        next_experiment=(
            f"Take operators and launches off the host: compile {pace.stage or 'what is called most'}, and compare "
            "on the "
            "whole workload."
        ),
        next_command=background.tune_command(pace.stage, "--backend", f"inductor_jit{options}"),
    )


def _refutation(pace: Pace) -> str:
    if pace.busy_ms is None:
        return f"a plain {pace.what} that takes much longer with larger tensors"
    return f"a plain {pace.what} in which kernels follow each other without gaps"


def _at_edges(pace: Pace) -> Finding:
    assert pace.idle is not None
    edge = Evidence(metric="edge_us", value=pace.idle.edge_us, unit="us", source=where(pace.rung, "idle"))
    return Finding(
        kind="device_mostly_idle",
        rung=pace.rung,
        stage=pace.stage,
        claim=(
            f"{_waits_text(pace)}; it idles before its first and after its last work, and hardly in between: a "
            f"{pace.what} "
            "is too short for it."
        ),
        evidence=[_busy(pace), edge],
        uncertainty="the edges are of a profiled run, in which they are longer",
        refuted_by=f"a plain {pace.what} with more work in which the device idles as large a part",
        next_experiment=(
            f"Give it more work at a time (a larger batch, more requests), and compare throughput.{_where(pace)}"
        ),
    )


def _where(pace: Pace) -> str:
    """Where the host's longest stretch outside every region is, if one could win something there."""
    gap = pace.gap
    if gap is None or not pace.plain_ms or gap.duration_us < LEAST_WIN_FRAC * pace.plain_ms * _US_PER_MS:
        return ""
    after, before = (region.partition(":")[2] if region is not None else None for region in (gap.after, gap.before))
    place = f"between {after} and {before}"
    if after is None or before is None:
        place = f"before {before}" if after is None else f"after {after}"
    return f" The host's longest stretch outside every region, {gap.duration_us / _US_PER_MS:.3g} ms, is {place}."


def _undecided(pace: Pace) -> Finding:
    return Finding(
        kind="device_mostly_idle",
        rung=pace.rung,
        stage=pace.stage,
        claim=f"{_waits_text(pace)}: it waits, and neither waits, dispatch nor Python alone explain it.",
        evidence=[_busy(pace)],
        uncertainty="device work is from profiled runs, the duration from plain ones; clocks may differ",
        refuted_by=f"a plain {pace.what} in which kernels follow each other without gaps",
        next_experiment="Open the trace, and see what the host does in the device's longest gaps.",
    )
