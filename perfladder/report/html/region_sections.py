"""Sections from rung 2: one run over time, and regions inside regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from perfladder.report.amounts import both_ends, ms, percent
from perfladder.report.html.blocks import Block, Cell, Column, Plot, Section, Table, Text, View, absent
from perfladder.report.html.plots import (
    GREY,
    label,
    pattern,
    rows_height,
    rows_layout,
)
from perfladder.report.html.run_data import RunData, grouped, name, number, numbers, place_of
from perfladder.rungs.regions import RegionsResult
from perfladder.trace.lanes import LaneSpan, RunLanes
from perfladder.trace.regions import RegionNode

Measure = Literal["cpu", "device"]

_US_PER_MS = 1e3
_LANES = 14
_NODES = 800
_BARS = 20
_OUTSIDE = "outside every region"


def timeline_section(run: RunData) -> Section:
    """One profiled run over time."""
    title = "One run over time"
    result = run.regions
    if result is None:
        return run.missing("regions", "timeline", title)
    if result.lanes is None:
        return absent(
            "timeline",
            title,
            "This run's regions.json holds no course over time: it was measured before "
            "perfladder recorded it. Its trace file does; Perfetto opens it.",
        )
    lanes = result.lanes
    return Section(id="timeline", title=title, blocks=[_timeline(run, lanes), _lane_table(lanes)])


def _timeline(run: RunData, lanes: RunLanes) -> Plot:
    rows = _by_region(lanes.host)
    chosen = sorted(rows, key=lambda region: -sum(span.duration_us for span in rows[region]))[:_LANES]
    ordered = sorted(chosen, key=lambda region: rows[region][0].start_us)
    names = [place_of(region) for region in ordered]
    traces = [_bars(place_of(region), rows[region], run.colours.get(place_of(region), GREY)) for region in ordered]
    if lanes.other_threads:
        names.append("other threads")
        traces += [
            _bars("other threads", spans, run.colours.get(place_of(region), GREY), region=place_of(region))
            for region, spans in _by_region(lanes.other_threads).items()
        ]
    if lanes.device:
        names.append("device")
        traces += [
            _bars("device", spans, run.colours.get(place_of(region), GREY), region=place_of(region), is_hatched=True)
            for region, spans in _by_region(lanes.device).items()
        ]
    left_out = len(rows) - len(chosen)
    return Plot(
        title=f"Profiled run {lanes.run_index}, {ms(lanes.wall_us / _US_PER_MS)} ms",
        reading="A row is a region, from its first call on; gaps in all rows are time outside every region. Device "
        "work may go on after the host's call has returned; it has the colour of the region that launched it. Drag to "
        "zoom, double-click to go back." + (f" {left_out} short regions are not drawn." if left_out else ""),
        views=[
            View(
                name="time",
                traces=traces,
                layout=rows_layout(names, "ms from the start of the run", barmode="overlay", bargap=0.3)
                | {
                    "xaxis": {
                        "title": {"text": "ms from the start of the run"},
                        "range": [0, lanes.wall_us / _US_PER_MS],
                    }
                },
            )
        ],
        height=rows_height(len(names), 32),
    )


def _by_region(spans: Sequence[LaneSpan]) -> dict[str, list[LaneSpan]]:
    rows: dict[str, list[LaneSpan]] = {}
    for span in spans:
        rows.setdefault(span.region_id or f":{_OUTSIDE}", []).append(span)
    return rows


def _bars(
    row: str, spans: Sequence[LaneSpan], colour: str, *, region: str | None = None, is_hatched: bool = False
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(region or row),
        "showlegend": False,
        "y": [label(row)] * len(spans),
        "base": [span.start_us / _US_PER_MS for span in spans],
        "x": [span.duration_us / _US_PER_MS for span in spans],
        "marker": {"color": colour, "line": {"width": 0}, "pattern": pattern(int(is_hatched))},
        "hovertemplate": "from %{base:.3f} ms, %{x:.3f} ms long<extra>" + label(region or row) + "</extra>",
    }


def _lane_table(lanes: RunLanes) -> Table:
    columns = [
        Column(title="where"),
        Column(title="region"),
        *numbers("stretches"),
        *numbers("first start", "last end", "sum", unit="ms"),
    ]
    found = [("host", lanes.host), ("other threads", lanes.other_threads), ("device", lanes.device)]
    rows = [
        [
            Cell(text=where),
            name(place_of(region)),
            number(len(spans)),
            *(
                number(value / _US_PER_MS)
                for value in (
                    spans[0].start_us,
                    max(span.start_us + span.duration_us for span in spans),
                    sum(span.duration_us for span in spans),
                )
            ),
        ]
        for where, lane in found
        for region, spans in _by_region(lane).items()
    ]
    return Table(caption="The same as numbers", columns=columns, rows=rows, num_shown=12)


def regions_section(run: RunData) -> Section:
    """Which module or method holds the time, nested and flat."""
    result = run.regions
    if result is None:
        return run.missing("regions", "regions", "Regions")
    ratio = f"{result.profiled_ratio:.2f}" if result.profiled_ratio else "an unknown number of"
    words = f"Shares of profiled runs, which took {ratio} times as long as unprofiled ones: they are no latencies."
    if result.device_busy_ms is not None and result.unprofiled_ms is not None:
        words += f" The device works for {ms(result.device_busy_ms)} ms of a run "
        words += f"that takes {ms(result.unprofiled_ms)} ms unprofiled."
    blocks: list[Block] = [Text(line=[words])]
    if result.region_tree:
        blocks.append(_icicle(run, result))
    else:
        reason = "This result holds no tree of regions, so that regions inside regions are not drawn."
        blocks.append(Text(line=[reason], role="absent"))
    blocks.append(_region_table(result))
    return Section(id="regions", title="Regions", blocks=blocks)


def _icicle(run: RunData, result: RegionsResult) -> Plot:
    has_device = any(node.device_time_us for node in result.region_tree)
    measures: list[tuple[Measure, str]] = [("cpu", "host")]
    if has_device:
        measures.append(("device", "device"))
    views = [
        view
        for measure, title in measures
        for view in (_nested(run, result, measure, title), _own(run, result, measure, title))
    ]
    num_nodes = sum(1 for _ in _walk(result.region_tree))
    cut = f" The {_NODES} largest of {num_nodes} regions are drawn." if num_nodes > _NODES else ""
    return Plot(
        title="Regions inside regions",
        reading="Inclusive: width is time with all that is called inside; the part under which nothing stands is the "
        "region's own. Click a region to enter it, the bar on top to leave. Self: the same regions by their own time "
        "alone." + cut,
        views=views,
        height=460,
    )


def _walk(nodes: Sequence[RegionNode], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], RegionNode]]:
    """All nodes with the ids of those around them, parents first."""
    for node in nodes:
        yield path, node
        yield from _walk(node.children, (*path, node.region_id))


def _time_us(node: RegionNode, measure: Measure, *, own: bool) -> float:
    if measure == "cpu":
        return node.self_cpu_time_us if own else node.cpu_time_us
    return (node.self_device_time_us if own else node.device_time_us) or 0.0


def _nested(run: RunData, result: RegionsResult, measure: Measure, title: str) -> View:
    per_run = 1 / max(result.num_runs, 1) / _US_PER_MS
    nodes = [(path, node) for path, node in _walk(result.region_tree) if _time_us(node, measure, own=False) > 0]
    kept = sorted(nodes, key=lambda pair: -_time_us(pair[1], measure, own=False))[:_NODES]
    ids = {(*path, node.region_id) for path, node in kept}
    # What is left out is inside a region that stays, and counts as that one's own.
    rest_ms = (result.residual.cpu_ms if measure == "cpu" else result.residual.device_ms) if result.residual else None
    values = [
        (
            _time_us(node, measure, own=False)
            - sum(
                _time_us(child, measure, own=False)
                for child in node.children
                if (*path, node.region_id, child.region_id) in ids
            )
        )
        * per_run
        for path, node in kept
    ]
    root = f"all {title} time"
    trace: dict[str, Any] = {
        "type": "icicle",
        "ids": ["", *("/".join((*path, node.region_id)) for path, node in kept), _OUTSIDE],
        "labels": [root, *(_short_name(path, node) for path, node in kept), _OUTSIDE],
        "parents": [None, *("/".join(path) for path, _ in kept), ""],
        "values": [0, *(max(value, 0.0) for value in values), rest_ms or 0.0],
        "customdata": [
            "",
            *(
                f"{label(place_of(node.region_id))}<br>{grouped(node.calls / max(result.num_runs, 1))} calls a run"
                for _, node in kept
            ),
            "",
        ],
        "branchvalues": "remainder",
        "tiling": {"orientation": "v", "pad": 1},
        "maxdepth": 6,
        "marker": {"colors": ["rgba(138,143,152,0.25)", *(_colour(run, path, node) for path, node in kept), GREY]},
        "texttemplate": "%{label}<br>%{percentRoot:.1%}",
        "hovertemplate": "<b>%{label}</b><br>%{customdata}<br>%{value:.4g} ms a run, %{percentRoot:.1%}<extra></extra>",
        "textposition": "middle center",
        "sort": True,
    }
    trace["ids"][0] = "root"
    trace["parents"] = ["", *("/".join(path) or "root" for path, _ in kept), "root"]
    return View(name=f"{title}, inclusive", traces=[trace], layout={"margin": {"l": 4, "r": 4, "t": 8, "b": 8}})


def _short_name(path: tuple[str, ...], node: RegionNode) -> str:
    """The part of a region's name that the region around it does not say."""
    own = place_of(node.region_id)
    around = place_of(path[-1]) if path else ""
    return label(both_ends(own[len(around) + 1 :] if around and own.startswith(f"{around}.") else own, 40))


def _colour(run: RunData, path: tuple[str, ...], node: RegionNode) -> str:
    for region_id in (*path, node.region_id):
        if colour := run.colours.get(place_of(region_id)):
            return colour
    return GREY


def _own(run: RunData, result: RegionsResult, measure: Measure, title: str) -> View:
    per_run = 1 / max(result.num_runs, 1) / _US_PER_MS
    sums: dict[str, float] = {}
    colours: dict[str, str] = {}
    for path, node in _walk(result.region_tree):
        region = place_of(node.region_id)
        sums[region] = sums.get(region, 0.0) + _time_us(node, measure, own=True) * per_run
        colours.setdefault(region, _colour(run, path, node))
    rest_ms = (result.residual.cpu_ms if measure == "cpu" else result.residual.device_ms) if result.residual else None
    largest = sorted(((value, region) for region, value in sums.items() if value > 0), reverse=True)[:_BARS]
    rows = [(region, value, colours[region]) for value, region in largest]
    if rest_ms is not None:
        rows.append((_OUTSIDE, rest_ms, GREY))
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label(region) for region, _, _ in rows],
        "x": [value for _, value, _ in rows],
        "marker": {"color": [colour for _, _, colour in rows]},
        "text": [f"{ms(value)}" for _, value, _ in rows],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.4g} ms a run<extra></extra>",
    }
    layout = rows_layout([region for region, _, _ in rows], f"own {title} time, ms a run", bargap=0.25)
    return View(name=f"{title}, self", traces=[trace], layout=layout)


def _region_table(result: RegionsResult) -> Table:
    has_device = any(region.device_ms is not None for region in result.regions)
    columns = [
        Column(title="region"),
        *numbers("calls a run"),
        *numbers("host", unit="ms"),
        *numbers("host share"),
        *([*numbers("device", unit="ms"), *numbers("device share")] if has_device else []),
        Column(title="type"),
    ]

    def times(cpu_ms: float, cpu_share: float, device_ms: float | None, device_share: float | None) -> list[Cell]:
        cells = [number(cpu_ms), number(cpu_share, percent(cpu_share), bar=cpu_share)]
        if has_device:
            cells += [number(device_ms), number(device_share, percent(device_share), bar=device_share)]
        return cells

    rows = [
        [
            name(region.name),
            number(region.calls_per_run),
            *times(region.cpu_ms, region.cpu_share, region.device_ms, region.device_share),
            name(region.module_type.rpartition(".")[2] or "–"),
        ]
        for region in result.regions
    ]
    footer = []
    if rest := result.residual:
        own = times(rest.cpu_ms, rest.cpu_share, rest.device_ms, rest.device_share)
        footer = [[Cell(text=_OUTSIDE), Cell(), *own, Cell()]]
    return Table(
        caption="Flat regions that do not overlap, means over the profiled runs",
        columns=columns,
        rows=rows,
        footer=footer,
        is_searchable=len(rows) > 12,
        num_shown=15,
    )
