"""The nights of workloads as a page that opens offline: each level over time, its changes, and what came with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from perfladder.nightly.trend import Trend, TrendChange, TrendPoint, Trends
from perfladder.nightly.words import percent
from perfladder.report.html import (
    Cell,
    Column,
    Headline,
    Plot,
    Section,
    Table,
    Text,
    View,
    render_page,
    write_page,
)
from perfladder.report.html.blocks import Tone
from perfladder.report.html.plots import GREY, PALETTE, label

PAGE_FILE: Final = "nightly.html"
"""In the runs folder: the page as the last night has left it."""

_TABLE_ROWS: Final = 60
_MIB: Final = 2**20
_MARKS: Final = {
    "usual": ("circle", PALETTE[0], "night"),
    "alarm": ("triangle-up", PALETTE[3], "regression"),
    "second": ("diamond-open", PALETTE[1], "second measurement"),
    "other": ("x", GREY, "other work, hardware or a disturbed machine"),
}


def write_trends_page(trends: Trends, path: Path) -> None:
    """Write the page of all trends."""
    write_page(render_trends_page(trends), path)


def render_trends_page(trends: Trends) -> str:
    """The trends as one page; the same trends always give the same page."""
    alarms = [trend for trend in trends.trends if _last(trend).verdict == "regression"]
    tone: Tone = "bad" if alarms else "good" if trends.trends else "unsure"
    count = len(trends.trends)
    verdict = (
        f"Slower since the last good night: {', '.join(trend.workload for trend in alarms)}."
        if alarms
        else f"No regression on the last night, of {count} {'workload' if count == 1 else 'workloads'}."
        if count
        else "There are no nights yet."
    )
    nights = [point.started_at for trend in trends.trends for point in trend.points]
    chips = [("nights", str(len({moment[:10] for moment in nights}))), ("runs folder", trends.runs_dir)]
    return render_page(
        "Nights",
        [_overview(trends.trends), *(_section(trend, place) for place, trend in enumerate(trends.trends))],
        headline=Headline(
            subtitle=f"until {max(nights)[:16].replace('T', ' ')} UTC" if nights else "nothing measured yet",
            verdict=verdict,
            tone=tone,
            next_step="Look at what moved in the night's own report, then compare the two commits in turns."
            if alarms
            else None,
            chips=chips,
        ),
    )


def _overview(trends: Sequence[Trend]) -> Section:
    rows = []
    for trend in trends:
        last = _last(trend)
        change = trend.changes[-1] if trend.changes else None
        rows.append(
            [
                Cell(text=trend.workload),
                Cell(text=trend.metric),
                _amount(last.value, trend.unit),
                Cell(text=last.verdict or "not judged"),
                Cell(text="not known") if trend.noise is None else Cell(value=round(100 * trend.noise, 2)),
                Cell(text="none" if change is None else f"{percent(change.ratio)} on {change.started_at[:10]}"),
            ]
        )
    columns = [
        Column(title="workload"),
        Column(title="metric"),
        Column(title="last night", is_number=True),
        Column(title="verdict"),
        Column(title="noise", is_number=True, unit="%", hint="standard deviation of a night around its level"),
        Column(title="last change of the level"),
    ]
    return Section(id="overview", title="Last night", blocks=[Table(caption="Workloads", columns=columns, rows=rows)])


def _section(trend: Trend, place: int) -> Section:
    title = f"{trend.workload}: {trend.metric}"
    return Section(
        id=f"workload-{place}",
        title=title,
        blocks=[_plot(trend), *_changes(trend), _table(trend)],
    )


def _plot(trend: Trend) -> Plot:
    groups: dict[str, list[TrendPoint]] = {}
    for point in trend.points:
        groups.setdefault(_kind(point), []).append(point)
    traces = [_level_line(trend, first, last, level) for first, last, level in _levels(trend)]
    traces += [_points(trend, kind, groups[kind]) for kind in _MARKS if kind in groups]
    shapes = [
        {
            "type": "line",
            "x0": change.started_at,
            "x1": change.started_at,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": PALETTE[3], "width": 1.5, "dash": "dot"},
        }
        for change in trend.changes
    ]
    unit = "MiB" if trend.unit == "bytes" else trend.unit
    layout: dict[str, Any] = {"yaxis": {"title": {"text": unit}}, "xaxis": {"type": "date"}, "shapes": shapes}
    return Plot(
        title=trend.workload,
        reading="A mark is a night, the line at it the 95 % interval of its launches. A level line is the median of a "
        "stretch of nights; a dotted line is a night on which the level changed.",
        views=[View(name=trend.metric, traces=traces, layout=layout)],
        height=380,
    )


def _kind(point: TrendPoint) -> str:
    if point.is_second:
        return "second"
    if not point.is_comparable or point.is_disturbed:
        return "other"
    return "alarm" if point.verdict == "regression" else "usual"


def _points(trend: Trend, kind: str, points: Sequence[TrendPoint]) -> dict[str, Any]:
    symbol, colour, name = _MARKS[kind]
    ends = [point.interval for point in points]
    values = [_scaled(point.value, trend.unit) for point in points]
    pairs = list(zip(ends, values, strict=True))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point.started_at for point in points],
        "y": values,
        "text": [label(f"{point.run_id}, {_commit(point)}") for point in points],
        "marker": {"symbol": symbol, "size": 8, "color": colour},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [_scaled(end.high, trend.unit) - value if end else None for end, value in pairs],
            "arrayminus": [value - _scaled(end.low, trend.unit) if end else None for end, value in pairs],
            "color": colour,
            "thickness": 1,
            "width": 2,
        },
        "hovertemplate": "%{x}<br>%{y:.4g}<br>%{text}<extra>" + name + "</extra>",
    }


def _levels(trend: Trend) -> list[tuple[str, str, float]]:
    moments = {point.run_id: point.started_at for point in trend.points}
    return [(moments[level.first], moments[level.last], level.level) for level in trend.levels]


def _level_line(trend: Trend, first: str, last: str, level: float) -> dict[str, Any]:
    value = _scaled(level, trend.unit)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "level",
        "showlegend": False,
        "x": [first, last],
        "y": [value, value],
        "line": {"color": PALETTE[2], "width": 2},
        "hoverinfo": "skip",
    }


def _changes(trend: Trend) -> list[Table | Text]:
    if not trend.changes:
        return [Text(line=["The level has not changed in these nights."], role="note")]
    columns = [
        Column(title="first night of the new level"),
        Column(title="change", is_number=True),
        Column(title="95 % interval", is_number=True),
        Column(title="commits"),
        Column(title="what else changed"),
    ]
    return [Table(caption="Changes of the level", columns=columns, rows=[_change_row(row) for row in trend.changes])]


def _change_row(change: TrendChange) -> list[Cell]:
    causes = "; ".join(f"{cause.field}: {cause.baseline} to {cause.candidate}" for cause in change.causes)
    commits = f"{(change.last_commit or 'unknown')[:10]}..{(change.first_commit or 'unknown')[:10]}"
    return [
        Cell(text=change.started_at[:16].replace("T", " ")),
        Cell(text=percent(change.ratio)),
        Cell(text=f"{percent(change.interval.low)} to {percent(change.interval.high)}"),
        Cell(text=commits, is_code=True),
        Cell(text=causes or "nothing that is recorded"),
    ]


def _table(trend: Trend) -> Table:
    columns = [
        Column(title="night"),
        Column(title="run"),
        Column(title="commit"),
        Column(title=trend.metric, is_number=True),
        Column(title="verdict"),
    ]
    rows = [
        [
            Cell(text=point.started_at[:16].replace("T", " ")),
            Cell(text=point.run_id, is_code=True),
            Cell(text=_commit(point), is_code=True),
            _amount(point.value, trend.unit),
            Cell(text=("second: " if point.is_second else "") + (point.verdict or "not judged")),
        ]
        for point in reversed(trend.points)
    ]
    return Table(caption="Nights, the last first", columns=columns, rows=rows, is_searchable=len(rows) > _TABLE_ROWS)


def _last(trend: Trend) -> TrendPoint:
    return next((point for point in reversed(trend.points) if not point.is_second), trend.points[-1])


def _commit(point: TrendPoint) -> str:
    return (point.commit or "no commit")[:10] + (" and more" if point.is_dirty else "")


def _scaled(value: float, unit: str) -> float:
    return value / _MIB if unit == "bytes" else value


def _amount(value: float, unit: str) -> Cell:
    return Cell(text=f"{_scaled(value, unit):.4g} {'MiB' if unit == 'bytes' else unit}")
