"""Markdown views of a `Report`: the whole, and the summary that a terminal shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.files import write_atomically
from perfladder.markdown import templates
from perfladder.report.amounts import as_code, first_line, gib, ms, percent, short, us
from perfladder.report.model import Report
from perfladder.rundir import RunDirectory
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.ncu import NcuResult
from perfladder.tuning.inspect_workload import InspectResult
from perfladder.tuning.tune_result import TuneWorkloadResult

if TYPE_CHECKING:
    from jinja2 import Environment

    from perfladder.kernels.export import ExportResult
    from perfladder.rungs.base import RungResult
    from perfladder.tuning.proof_model import ProofOutcome


def render_markdown(report: Report) -> str:
    """The whole report; the same report always gives the same text."""
    return _templates().get_template("report.md.j2").render(report=report)


def render_summary(report: Report) -> str:
    """What a person wants to see right after a run: the stage table, the findings, and where the rest lies."""
    return _templates().get_template("summary.md.j2").render(report=report)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html`."""
    write_atomically(folder / "report.json", report.model_dump_json(indent=1))
    write_atomically(folder / "report.md", render_markdown(report))
    write_atomically(folder / "report.html", render_html(report, folder))


def render_html(report: Report, folder: Path, *, beside: Path | None = None) -> str:
    """The whole report as one page that opens offline; samples and long lists are read from the run directory.

    Args:
        report: Of that run.
        folder: The run directory.
        beside: Where the page will lie, if not in the run directory: its links to files lead from there.
    """
    from perfladder.ladder import load_results
    from perfladder.report.html import render_run

    base = os.path.relpath(folder, beside.absolute().parent) if beside is not None else "."
    return render_run(report, load_results(RunDirectory.open(folder)), base=base)


def render_capture(result: CaptureResult) -> str:
    """What a capture holds, or why there is none."""
    return _templates().get_template("capture.md.j2").render(result=result)


def render_replay(result: HarnessResult) -> str:
    """Whether a replay stands for the stage's calls in the pipeline."""
    return _templates().get_template("replay.md.j2").render(result=result)


def render_ncu(result: NcuResult) -> str:
    """What limits a kernel, and what each metric says."""
    return _templates().get_template("ncu.md.j2").render(result=result)


def render_inspection(result: InspectResult) -> str:
    """The modules that ran, as a table."""
    return _templates().get_template("inspect.md.j2").render(result=result)


def render_tuning(result: TuneWorkloadResult) -> str:
    """What was tried for each module, what it does to the whole workload, and when that pays."""
    return _templates().get_template("tune.md.j2").render(result=result)


def render_proof(outcome: ProofOutcome, steps: Mapping[str, RungResult]) -> str:
    """Whether a tuning is kept, and what each step of its proof found."""
    return _templates().get_template("proof.md.j2").render(outcome=outcome, steps=steps)


def render_export(result: ExportResult) -> str:
    """What a benchmark folder holds, and how to use it."""
    return _templates().get_template("export.md.j2").render(result=result)


def _templates() -> Environment:
    return templates("perfladder.report", ms, us, percent, gib, short, first_line, as_code)
