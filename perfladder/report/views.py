"""Markdown views of a `Report`: the whole, and the summary that a terminal shows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.files import write_atomically
from perfladder.report.model import Report

if TYPE_CHECKING:
    from jinja2 import Environment


def render_markdown(report: Report) -> str:
    """The whole report; the same report always gives the same text."""
    return _templates().get_template("report.md.j2").render(report=report)


def render_summary(report: Report) -> str:
    """What a person wants to see right after a run: the stage table, the findings, and where the rest lies."""
    return _templates().get_template("summary.md.j2").render(report=report)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json` and `report.md`."""
    write_atomically(folder / "report.json", report.model_dump_json(indent=1))
    write_atomically(folder / "report.md", render_markdown(report))


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("perfladder.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(
        ms=_ms, us=_us, percent=_percent, gib=_gib, cell=_cell, short=_short, first_line=_first_line
    )
    return environment


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f} GiB"


def _cell(value: object) -> str:
    """Text that cannot break out of a Markdown table cell."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("`", "'")


def _short(value: str, length: int = 80) -> str:
    return value if len(value) <= length else value[: length - 3] + "..."


def _first_line(value: str) -> str:
    return value.split("\n", 1)[0]
