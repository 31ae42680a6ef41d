"""A comparison as a page that opens offline: the verdict, what differs, and every ratio with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import JsonValue

from perfladder.comparing.model import Change, Difference, OneSided, ProfiledChange, RunComparison, Side, Verdict
from perfladder.report.html import (
    Cell,
    Code,
    Column,
    Facts,
    Figure,
    Headline,
    Plot,
    Section,
    Table,
    Text,
    View,
    render_page,
)
from perfladder.report.html.blocks import Block, Line, Tone, absent
from perfladder.report.html.plots import GREY, PALETTE, label, pattern, rows_height, rows_layout
from perfladder.report.html.run_data import name, number, numbers

_TONES: Final[dict[Verdict, Tone]] = {"faster": "good", "slower": "bad", "same": "neutral", "undecided": "unsure"}
_MARKS: Final[dict[Verdict, tuple[str, str]]] = {
    "faster": ("triangle-right", PALETTE[2]),
    "slower": ("triangle-left", PALETTE[3]),
    "same": ("circle", GREY),
    "undecided": ("circle-open", PALETTE[1]),
}
_DRAWN = 25
_MOVED = 15


def render_comparison_page(comparison: RunComparison) -> str:
    """The comparison as one page; the same comparison always gives the same page."""
    return render_page(
        f"{comparison.workload}: comparison",
        [section for section in _sections(comparison) if section is not None],
        headline=_headline(comparison),
        made_by=f"perfladder {comparison.perfladder_version}",
    )


def _headline(comparison: RunComparison) -> Headline:
    metric, interval = comparison.metric, comparison.metric.interval
    turns = "measured in turns" if comparison.method == "interleaved" else "measured after each other"
    figure = None
    if metric.speedup is not None:
        ends = (
            f"95 % interval {interval.low:.3f} to {interval.high:.3f}"
            if interval
            else "too few samples for an interval"
        )
        figure = Figure(
            name=f"speedup, {comparison.metric_name}", value=f"{metric.speedup:.3f}", unit="times", range=ends
        )
    verdict = comparison.verdict if metric.same_within is None else f"the same within {metric.same_within:.1%}"
    return Headline(
        subtitle=f"{_short(comparison.baseline)} against {_short(comparison.candidate)}, {turns} · "
        f"{comparison.created_at[:19].replace('T', ' ')} UTC",
        figure=figure,
        verdict=f"{comparison.metric_name} is {verdict}. {comparison.reason}",
        tone=_TONES[comparison.verdict],
        next_step=comparison.next_step,
        chips=[
            ("baseline", _shown(metric.baseline, metric.unit)),
            ("candidate", _shown(metric.candidate, metric.unit)),
            ("device", comparison.candidate.device),
            ("no change counts below", f"{100 * comparison.min_effect:.3g} %"),
        ],
    )


def _short(side: Side) -> str:
    """A run is known by its folder's own name."""
    return side.label.rstrip("/").rpartition("/")[2] if len(side.runs) == 1 else side.label


def _sections(comparison: RunComparison) -> list[Section | None]:
    return [
        _times(comparison),
        _profiled(comparison.regions, "regions", "Regions"),
        _profiled(comparison.families, "families", "Kernel families"),
        _moved(comparison),
        _counts(comparison),
        _compared(comparison),
        _warnings(comparison),
    ]


def _times(comparison: RunComparison) -> Section:
    blocks: list[Block] = []
    if comparison.metric_name != "latency_p50":
        blocks.append(_change_table("The metric", [comparison.metric]))
    for scenario in comparison.scenarios:
        of_scenario = f", {scenario.name}" if len(comparison.scenarios) > 1 else ""
        first = [scenario.first_output] if scenario.first_output else []
        changes = [scenario.end_to_end, *first, *scenario.stages]
        blocks += [
            _forest(f"Speedup end to end and by stage{of_scenario}", changes),
            _change_table(f"Times{of_scenario}", changes),
        ]
        blocks += _one_sided(scenario.only_one_side)
    if comparison.aa_noise_floor is not None:
        words = f"The baseline differed from itself by up to {100 * comparison.aa_noise_floor:.1f} %."
        blocks.append(Text(line=[words], role="note"))
    return Section(id="times", title="Times", blocks=blocks)


def _profiled(found: ProfiledChange | None, section_id: str, title: str) -> Section:
    if found is None:
        reason = "Not compared: one of the sides has no result of this rung, or it was measured without a profiler."
        return absent(section_id, title, reason)
    words = f"By {found.what}. A profiler slows the host: compare shares, and take latencies from the stages."
    return Section(
        id=section_id,
        title=title,
        blocks=[
            Text(line=[words]),
            _forest(f"Ratio, {title.lower()}", found.rows),
            _change_table(f"{title}, profiled", found.rows),
            *_one_sided(found.only_one_side),
        ],
    )


def _forest(title: str, changes: Sequence[Change]) -> Plot:
    drawn = [change for change in changes if change.speedup is not None][:_DRAWN]
    names = [change.name for change in drawn]
    traces = [
        _marks(verdict, [change for change in drawn if change.verdict == verdict])
        for verdict in _MARKS
        if any(change.verdict == verdict for change in drawn)
    ]
    layout = rows_layout(names, "")
    layout["xaxis"] = {"title": {"text": "speedup: baseline over candidate"}, "range": _range(drawn)}
    layout["shapes"] = [
        {
            "type": "line",
            "x0": 1,
            "x1": 1,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": GREY, "width": 1.5, "dash": "dot"},
        }
    ]
    left_out = len(changes) - len(drawn)
    return Plot(
        title=title,
        reading="A mark is the speedup, the line its 95 % interval. Right of the dotted line is faster, left slower. "
        "An interval across it decides nothing, unless it is short enough to call both the same. A mark without a line "
        "has too few samples for an interval." + (f" {left_out} rows are in the table only." if left_out else ""),
        views=[View(name="speedup", traces=traces, layout=layout)],
        height=rows_height(len(drawn), 32),
    )


def _range(changes: Sequence[Change]) -> list[JsonValue]:
    """From the lowest to the highest end, 1 among them."""
    ends = [
        end for change in changes for end in ((change.interval.low, change.interval.high) if change.interval else ())
    ]
    known = [1.0, *ends, *(change.speedup for change in changes if change.speedup is not None)]
    margin = 0.06 * (max(known) - min(known)) or 0.05
    return [min(known) - margin, max(known) + margin]


def _marks(verdict: Verdict, changes: Sequence[Change]) -> dict[str, Any]:
    symbol, colour = _MARKS[verdict]
    ends = [(change.interval.low, change.interval.high) if change.interval else None for change in changes]
    speedups = [change.speedup or 0.0 for change in changes]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict,
        "x": speedups,
        "y": [label(change.name) for change in changes],
        "marker": {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2, "color": colour}},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [end[1] - speed if end else None for end, speed in zip(ends, speedups, strict=True)],
            "arrayminus": [speed - end[0] if end else None for end, speed in zip(ends, speedups, strict=True)],
            "color": colour,
            "thickness": 2,
            "width": 5,
        },
        "hovertemplate": "%{y}: %{x:.3f} times<extra>" + verdict + "</extra>",
    }


def _change_table(caption: str, changes: Sequence[Change]) -> Table:
    columns = [
        Column(title="what"),
        *numbers("baseline", "candidate", "change"),
        *numbers("speedup"),
        Column(title="95 % interval", is_number=True, hint="of the speedup"),
        Column(title="verdict"),
    ]
    return Table(
        caption=caption,
        columns=columns,
        rows=[_change_row(change) for change in changes],
        is_searchable=len(changes) > 25,
    )


def _change_row(change: Change) -> list[Cell]:
    interval = change.interval
    same = f"same within {change.same_within:.1%}" if change.same_within is not None else change.verdict
    return [
        name(change.name),
        Cell(text=_shown(change.baseline, change.unit), value=change.baseline),
        Cell(text=_shown(change.candidate, change.unit), value=change.candidate),
        Cell(text=("+" if change.change > 0 else "") + _shown(change.change, change.unit), value=change.change),
        number(change.speedup, None if change.speedup is None else f"{change.speedup:.3f}"),
        Cell(text=f"{interval.low:.3f} to {interval.high:.3f}", value=interval.low) if interval else Cell(text="–"),
        Cell(text=same, tone=_TONES[change.verdict]),
    ]


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{places}f} {unit}"


def _one_sided(found: Sequence[OneSided]) -> list[Block]:
    if not found:
        return []
    rows = [
        [name(row.name), Cell(text=row.only), Cell(text=_shown(row.value, row.unit), value=row.value)] for row in found
    ]
    columns = [Column(title="what"), Column(title="only in the"), *numbers("there")]
    return [Table(caption="On one side only", columns=columns, rows=rows)]


def _moved(comparison: RunComparison) -> Section:
    found = comparison.kernels_moved
    if not found:
        return absent("moved", "What moved most", "No kernels were compared: a side has no result of rung 4.")
    drawn = [row for row in found if row.change_us][:_MOVED]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label(row.name) for row in drawn],
        "x": [row.change_us for row in drawn],
        "marker": {
            "color": [PALETTE[2] if row.change_us < 0 else PALETTE[3] for row in drawn],
            "pattern": pattern(0),
        },
        "text": [f"{row.change_us:+,.1f} us" for row in drawn],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:+,.1f} us<extra></extra>",
    }
    layout = rows_layout([], "us a call, candidate minus baseline", bargap=0.3)
    layout["yaxis"] = {"autorange": "reversed", "type": "category"}
    columns = [
        Column(title="kernel or operator"),
        *numbers("change", "baseline", "candidate", unit="us"),
        *numbers("baseline count", "candidate count"),
        Column(title="family"),
    ]
    rows = [
        [
            name(row.name),
            number(row.change_us),
            number(row.baseline_us) if row.baseline_count else Cell(text="not there"),
            number(row.candidate_us) if row.candidate_count else Cell(text="not there"),
            number(row.baseline_count),
            number(row.candidate_count),
            Cell(text=row.family),
        ]
        for row in found
    ]
    return Section(
        id="moved",
        title="What moved most",
        blocks=[
            Plot(
                title="Change of kernel time",
                reading="Left of 0 the candidate spends less, right of it more, in all launches of one replayed call.",
                views=[View(name="change", traces=[trace], layout=layout)],
                height=rows_height(len(drawn), 30),
            ),
            Table(caption="Kernels and operators by change", columns=columns, rows=rows, is_searchable=len(rows) > 25),
        ],
    )


def _counts(comparison: RunComparison) -> Section | None:
    if not comparison.counts:
        return None
    rows = [[name(count.name), number(count.baseline), number(count.candidate)] for count in comparison.counts]
    columns = [Column(title="count"), *numbers("baseline", "candidate")]
    words = "No noise is in a count: one that differs is a difference of the program."
    blocks: list[Block] = [Text(line=[words]), Table(caption="Counts that changed", columns=columns, rows=rows)]
    return Section(id="counts", title="Counts", blocks=blocks)


def _compared(comparison: RunComparison) -> Section:
    sides = Facts(rows=[("baseline", _side(comparison.baseline)), ("candidate", _side(comparison.candidate))])
    blocks: list[Block] = [sides]
    groups = [
        ("configuration", comparison.configuration),
        ("environment", comparison.environment),
        ("protocol", comparison.protocol),
    ]
    rows = [_difference(group, row) for group, found in groups for row in found]
    if rows:
        columns = [Column(title=title) for title in ("field", "baseline", "candidate", "part of")]
        blocks.append(Table(caption="What differs between the sides", columns=columns, rows=rows))
    else:
        words = "Nothing differs: the same configuration, commit and environment. This tells how much noise there is."
        blocks.append(Text(line=[words], role="note"))
    return Section(id="compared", title="What is compared", blocks=blocks)


def _difference(group: str, row: Difference) -> list[Cell]:
    values = ("none" if value is None else str(value) for value in (row.baseline, row.candidate))
    return [name(row.field), *(Cell(text=value) for value in values), Cell(text=group)]


def _side(side: Side) -> Line:
    commit: Line = [", commit ", Code(text=side.commit[:12])] if side.commit else []
    dirty = " with uncommitted changes" if side.is_dirty else ""
    processes = "process" if side.num_launches == 1 else "processes"
    return [side.label, *commit, f"{dirty}, on {side.device}, {side.num_runs} runs in {side.num_launches} {processes}"]


def _warnings(comparison: RunComparison) -> Section | None:
    if not comparison.warnings:
        return None
    rows = [[name(warning.code), Cell(text=warning.message)] for warning in comparison.warnings]
    columns = [Column(title="code"), Column(title="message")]
    return Section(id="warnings", title="Warnings", blocks=[Table(caption="Warnings", columns=columns, rows=rows)])
