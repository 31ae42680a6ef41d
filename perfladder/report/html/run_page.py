"""The page of a run: from the headline down to the files, in the order in which one asks."""

from __future__ import annotations

from collections.abc import Mapping

from perfladder.findings import smallest_next_experiment
from perfladder.report.html.blocks import Figure, Headline, Section, Tone
from perfladder.report.html.context_sections import (
    files_section,
    findings_section,
    warnings_section,
    workload_section,
)
from perfladder.report.html.harness_section import harness_section
from perfladder.report.html.idle_section import idle_section
from perfladder.report.html.kernel_sections import kernels_section
from perfladder.report.html.load_section import load_section
from perfladder.report.html.ncu_section import ncu_section
from perfladder.report.html.page import render_page
from perfladder.report.html.region_sections import regions_section, timeline_section
from perfladder.report.html.roofline_section import roofline_section
from perfladder.report.html.run_data import RunData
from perfladder.report.html.stage_sections import memory_section, stages_section
from perfladder.report.model import Report
from perfladder.rundir import RunStatus
from perfladder.rungs.base import RungResult
from perfladder.stats import Interval


def render_run(report: Report, results: Mapping[str, RungResult], *, base: str = ".") -> str:
    """The page of a run; the same files always give the same page.

    Args:
        report: From `build_report`.
        results: From `load_results`, of the same run: samples and lists that the report leaves out.
        base: The run directory as seen from the folder in which the page will lie.
    """
    run = RunData(report, results, base)
    return render_page(
        f"{report.workload.name}: {report.run.run_id}",
        run_sections(run),
        headline=_headline(run),
        made_by=f"perfladder {report.run.perfladder_version}",
    )


def run_sections(run: RunData) -> list[Section]:
    """All sections; one whose rung did not run says why."""
    found = [
        findings_section(run),
        stages_section(run),
        load_section(run),
        timeline_section(run),
        regions_section(run),
        idle_section(run),
        harness_section(run),
        kernels_section(run),
        roofline_section(run),
        ncu_section(run),
        memory_section(run),
        workload_section(run),
        warnings_section(run),
        files_section(run),
    ]
    return [section for section in found if section is not None]


def _headline(run: RunData) -> Headline:
    report = run.report
    first = smallest_next_experiment(report.findings)
    place = report.findings.index(first) + 1 if first is not None else None
    num_warnings = sum(len(line.warnings) for line in report.rungs)
    return Headline(
        subtitle=f"{report.workload.target} · {report.run.started_at[:19].replace('T', ' ')} UTC",
        figure=_figure(run),
        verdict=first.claim if first is not None else "Nothing can be claimed: no rung was finished.",
        tone=_tone(run),
        verdict_href=f"#finding-{place}" if place is not None else None,
        next_step=first.next_experiment if first is not None else None,
        command=first.next_command if first is not None else None,
        chips=[
            ("status", report.run.status),
            ("device", _device(run)),
            ("rungs done", f"{sum(line.status == 'done' for line in report.rungs)} of {len(report.rungs)}"),
            ("findings", str(len(report.findings))),
            ("warnings", str(num_warnings)),
        ],
        alert=_alert(run),
    )


def _figure(run: RunData) -> Figure | None:
    metric = run.report.metric
    if metric is None:
        return None
    interval, num_runs = metric.interval, len(run.stages.default.wall_ms.values) if run.stages else 0
    basis = metric.interval_basis or "runs of one process"
    value, unit = _scaled(metric.value, metric.unit)
    shown = f"95 % interval {_ends(interval, metric.unit)}, from {num_runs} {basis}" if interval else None
    return Figure(name=metric.name, value=value, unit=unit, range=shown)


def _scaled(value: float, unit: str) -> tuple[str, str]:
    return (f"{value / 2**20:,.1f}", "MiB") if unit == "bytes" else (f"{value:#.4g}".rstrip("."), unit)


def _ends(interval: Interval, unit: str) -> str:
    low, high = _scaled(interval.low, unit)[0], _scaled(interval.high, unit)[0]
    return f"{low} to {high}"


def _device(run: RunData) -> str:
    info = run.report.environment
    if info is None:
        return "not known"
    devices = info.environment.devices
    return f"{info.device}, {devices[0].name}" if devices and info.device != "cpu" else info.device


def _tone(run: RunData) -> Tone:
    return _TONES[run.report.run.status]


_TONES: Mapping[RunStatus, Tone] = {"done": "neutral", "running": "unsure", "failed": "bad", "interrupted": "bad"}


def _alert(run: RunData) -> str | None:
    report = run.report
    failed = [line.name for line in report.rungs if line.status == "failed"]
    said = f"The run is {report.run.status}." if report.run.status != "done" else ""
    said += f" Failed: {', '.join(failed)}." if failed else ""
    said += f" {report.run.error}" if report.run.error else ""
    return said.strip() or None
