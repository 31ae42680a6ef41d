"""The report of a run: one model, built from the run directory, and views of it: Markdown and HTML."""

from perfladder.report.model import Report, build_report
from perfladder.report.views import (
    render_capture,
    render_export,
    render_html,
    render_inspection,
    render_markdown,
    render_ncu,
    render_proof,
    render_replay,
    render_summary,
    render_tuning,
    write_report,
)

__all__ = [
    "Report",
    "build_report",
    "render_capture",
    "render_export",
    "render_html",
    "render_inspection",
    "render_markdown",
    "render_ncu",
    "render_proof",
    "render_replay",
    "render_summary",
    "render_tuning",
    "write_report",
]
