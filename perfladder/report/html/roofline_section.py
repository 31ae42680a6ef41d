"""The roofline: achieved arithmetic against the device's peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perfladder.peaks import Peaks
from perfladder.report.amounts import percent, us
from perfladder.report.html.blocks import Block, Cell, Column, Plot, Section, Table, Text, View
from perfladder.report.html.plots import GREY, SYMBOLS, family_colour, label
from perfladder.report.html.run_data import RunData, name, number, numbers, place_of
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.families import FAMILIES
from perfladder.trace.roofline import RooflineRow

_POINTS = 150


def roofline_section(run: RunData) -> Section:
    """Achieved arithmetic against the device's peaks."""
    result = run.kernels
    if result is None:
        return run.missing("kernels", "roofline", "Roofline")
    blocks: list[Block] = [_peak_words(result)]
    if any(row.compute_tflops and row.arithmetic_intensity for row in result.roofline):
        blocks.append(_roofline_plot(result))
    elif result.roofline:
        blocks.append(
            Text(line=["No operator's operations are known, so that none has a place under a roof."], role="absent")
        )
    if not result.roofline:
        blocks.append(Text(line=["The work of no operator was counted."], role="absent"))
        return Section(id="roofline", title="Roofline", blocks=blocks, is_absent=True)
    return Section(id="roofline", title="Roofline", blocks=[*blocks, _roofline_table(result.positions.roofline)])


def _peak_words(result: KernelsResult) -> Text:
    if result.peaks is None:
        return Text(line=["No peaks of this device are known: there are no roofs to draw."], role="note")
    peaks = result.peaks
    words = f"Peaks of {peaks.device} ({peaks.label}): "
    words += ", ".join(f"{precision} {value:.3g} TFLOP/s" for precision, value in peaks.compute_tflops.items())
    words += f"; {peaks.bandwidth_gb_per_s:.4g} GB/s." if peaks.bandwidth_gb_per_s else "."
    words += f" {peaks.datasheet}." if peaks.datasheet else ""
    words += f" {peaks.reason}." if peaks.reason else ""
    if result.work_known_share is not None:
        words += f" Work is known for {percent(result.work_known_share)} of the kernel time, "
        words += f"operations for {percent(result.flops_known_share)}."
    return Text(line=[words])


def _roofline_plot(result: KernelsResult) -> Plot:
    known = [row for row in result.positions.roofline if row.compute_tflops and row.arithmetic_intensity]
    drawn = sorted(known, key=lambda row: -row.total_us)[:_POINTS]
    intensities = [row.arithmetic_intensity or 0.0 for row in drawn]
    used = {row.precision for row in drawn if row.precision}
    roofs = _roofs(result.peaks, used, intensities) if result.peaks is not None else []
    heights = [*(row.compute_tflops or 0.0 for row in drawn), *(y for roof in roofs for y in roof["y"][-1:])]
    span = [math.log10(min(heights) / 3), math.log10(max(heights) * 2.5)]
    decades = {"dtick": 1} if span[1] - span[0] > 1.5 else {}
    left_out = f" The {_POINTS} longest of {len(known)} are drawn." if len(known) > _POINTS else ""
    return Plot(
        title="Achieved arithmetic against the roofs",
        reading="Each mark is an operator in a module, repeated modules together; its area is its time, its shape and "
        "colour the family. Near the slope memory limits it, near a flat roof arithmetic does; far below both, neither."
        " Above a roof: a cache serves it." + left_out,
        views=[
            View(
                name="roofline",
                traces=[*roofs, *_points(drawn)],
                layout={
                    "xaxis": {"title": {"text": "operations for each byte, FLOP/B"}, "type": "log", "dtick": 1},
                    "yaxis": {
                        "title": {"text": "achieved, TFLOP/s"},
                        "type": "log",
                        "range": span,
                        **decades,
                    },
                },
            )
        ],
        height=480,
    )


def _points(rows: Sequence[RooflineRow]) -> list[dict[str, Any]]:
    longest = max(row.total_us for row in rows)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(family),
            "x": [row.arithmetic_intensity for row in rows if row.family == family],
            "y": [row.compute_tflops for row in rows if row.family == family],
            "marker": {
                "symbol": SYMBOLS[place % len(SYMBOLS)],
                "color": family_colour(family),
                "size": [8 + 22 * (row.total_us / longest) ** 0.5 for row in rows if row.family == family],
                "opacity": 0.75,
                "line": {"width": 1, "color": "rgba(127,127,127,0.9)"},
            },
            "text": [_hover(row) for row in rows if row.family == family],
            "hovertemplate": "%{text}<br>%{y:.3g} TFLOP/s, %{x:.3g} FLOP/B<extra></extra>",
        }
        for place, family in enumerate(FAMILIES)
        if any(row.family == family for row in rows)
    ]


def _hover(row: RooflineRow) -> str:
    lines = (
        label(row.operator),
        label(place_of(row.region_id, row.num_modules)),
        f"{us(row.total_us)} us, {row.precision or '–'}",
    )
    return "<br>".join(lines)


def _roofs(peaks: Peaks, used: set[str], intensities: Sequence[float]) -> list[dict[str, Any]]:
    """A slope of the bandwidth and one flat roof a precision in use, each from below the point where they meet."""
    slope = (peaks.bandwidth_gb_per_s or 0.0) / 1e3
    found = []
    for place, precision in enumerate(sorted(used & set(peaks.compute_tflops))):
        peak = peaks.compute_tflops[precision]
        ridge = peak / slope if slope else min(intensities)
        low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 6
        points = (
            [(low, low * slope), (ridge, peak), (high, peak)] if slope else [(low, peak), (ridge, peak), (high, peak)]
        )
        found.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"roof, {label(precision)}",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "showlegend": False,
                "line": {"color": GREY, "width": 2, "dash": ("solid", "dash", "dot", "dashdot")[place % 4]},
                "hovertemplate": f"{label(precision)}: {peak:.3g} TFLOP/s<extra>roof</extra>",
            }
        )
        found.append(
            {
                "type": "scatter",
                "mode": "text",
                "x": [high],
                "y": [peak * 1.12],
                "text": [f"{label(precision)}, {peak:.3g} TFLOP/s"],
                "textposition": "top left",
                "textfont": {"color": GREY},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    return found


def _roofline_table(rows: Sequence[RooflineRow]) -> Table:
    columns = [
        *(Column(title=title) for title in ("operator", "module", "family", "type")),
        *numbers("time", unit="us"),
        *numbers("work", unit="GFLOP"),
        *numbers("moved", unit="MB"),
        *numbers("achieved", unit="TFLOP/s"),
        *numbers("achieved", unit="GB/s"),
        *numbers("intensity", unit="FLOP/B"),
        *numbers("of compute", "of bandwidth"),
    ]
    cells = [
        [
            name(row.operator),
            name(place_of(row.region_id, row.num_modules)),
            Cell(text=row.family),
            Cell(text=row.precision or "–"),
            number(row.total_us),
            number(row.flops / 1e9),
            number(row.num_bytes / 1e6),
            number(row.compute_tflops),
            number(row.bandwidth_gb_per_s),
            number(row.arithmetic_intensity),
            number(row.compute_frac, percent(row.compute_frac)),
            number(row.bandwidth_frac, percent(row.bandwidth_frac)),
        ]
        for row in rows
    ]
    return Table(
        caption="Operators by counted work", columns=columns, rows=cells, num_shown=10, is_searchable=len(cells) > 20
    )
