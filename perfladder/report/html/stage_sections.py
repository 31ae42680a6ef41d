"""Sections from rung 1: stages with their distributions, runs in order, memory."""

from __future__ import annotations

from typing import Any

from perfladder.report.amounts import ms, percent
from perfladder.report.html.blocks import Block, Cell, Column, Plot, Section, Table, Text, View
from perfladder.report.html.plots import GREY, PALETTE, box, label, pattern, rows_height, rows_layout, thinned
from perfladder.report.html.run_data import RunData, grouped, name, number, numbers
from perfladder.stats import Samples
from perfladder.timing.results import ScenarioTiming, StageMemory, StagesResult

OUTSIDE = "outside every stage"
_MIB = 1 << 20
_DRAWN_STAGES = 14


def stages_section(run: RunData) -> Section:
    """Which stage dominates: table, distributions, and the runs in order."""
    result = run.stages
    if result is None:
        return run.missing("stages", "stages", "Stages")
    blocks: list[Block] = [_reading(result)]
    for scenario in result.scenarios:
        of_scenario = "" if scenario is result.default else f", scenario {scenario.name}"
        blocks += [_stage_table(scenario, of_scenario), _distributions(run, scenario, of_scenario)]
    blocks.append(_runs_in_order(result))
    if steadiness := result.default.steadiness:
        line = [f"Drift: {steadiness.drift.reason} Modes: {steadiness.bimodality.reason}"]
        blocks.append(Text(line=[*line], role="note"))
    return Section(id="stages", title="Stages", blocks=blocks)


def _reading(result: StagesResult) -> Text:
    cost = ""
    if result.overhead_ratio is not None:
        cost = f" Observing the stages cost a factor of {result.overhead_ratio:.3f}"
        if interval := result.overhead_ratio_interval:
            cost += f" (95 % interval {interval.low:.3f} to {interval.high:.3f})"
        cost += "."
    return Text(
        line=[
            "Plain runs, no profiler. Self time is without the stages inside a stage. Intervals are 95 %, of the runs "
            f"of one process: another process may well be outside them.{cost}"
        ]
    )


def _stage_table(scenario: ScenarioTiming, of_scenario: str) -> Table:
    has_device = any(stage.device_self_ms is not None for stage in scenario.stages)
    columns = [
        Column(title="stage"),
        *numbers("calls a run"),
        *numbers("self p50", "self p95", unit="ms"),
        *(numbers("device self p50", unit="ms") if has_device else []),
        *numbers("share"),
        Column(title="95 % interval", is_number=True, hint="of the share"),
        Column(title="type"),
    ]
    rows = [
        [
            name(stage.name),
            number(stage.calls_per_run),
            _ms(stage.self_ms.summary.p50),
            _ms(stage.self_ms.summary.p95),
            *([_ms(stage.device_self_ms.summary.p50 if stage.device_self_ms else None)] if has_device else []),
            number(stage.share, percent(stage.share), bar=stage.share),
            Cell(
                text=f"{100 * stage.share_interval.low:.1f} to {percent(stage.share_interval.high)}",
                value=stage.share_interval.low,
            ),
            name(stage.owner_type.rpartition(".")[2] or stage.owner_type),
        ]
        for stage in scenario.stages
    ]
    gap = [Cell()] if has_device else []
    outside, wall = scenario.outside_ms.summary, scenario.wall_ms.summary
    share, interval = scenario.outside_share, scenario.outside_share_interval
    footer = [
        [
            *(Cell(text=OUTSIDE), Cell(), _ms(outside.p50), _ms(outside.p95), *gap),
            number(share, percent(share), bar=share),
            Cell(text=f"{100 * interval.low:.1f} to {percent(interval.high)}", value=interval.low),
            Cell(),
        ],
        [
            *(Cell(text="end to end"), Cell(), _ms(wall.p50), _ms(wall.p95), *gap),
            *(Cell(text="100 %"), Cell(), Cell()),
        ],
    ]
    num_runs = len(scenario.wall_ms.values)
    return Table(
        caption=f"Stage times of {num_runs} runs{of_scenario}",
        columns=columns,
        rows=rows,
        footer=footer,
        has_total=True,
    )


def _ms(value: float | None) -> Cell:
    return number(value)


def _distributions(run: RunData, scenario: ScenarioTiming, of_scenario: str) -> Plot:
    drawn = sorted(scenario.stages, key=lambda stage: -stage.cost_ms.summary.p50)[:_DRAWN_STAGES]
    groups = [(stage.name, stage.cost_ms, run.colours.get(stage.name, GREY)) for stage in drawn]
    groups.append((OUTSIDE, scenario.outside_ms, GREY))
    names = [group[0] for group in groups]
    own = [box(title, samples.values, colour) for title, samples, colour in groups]
    layout = rows_layout(names, "ms a run")
    log = layout | {"xaxis": {"title": {"text": "ms a run"}, "type": "log"}}
    return Plot(
        title=f"Time of each stage in each run{of_scenario}",
        reading="Each dot is one run; the box holds the middle half of the runs, its line is the median. Device time "
        "where a stage used a device, else host time. A long or split row: the stage is not the same in every run.",
        views=[
            View(name="linear", traces=own, layout=layout),
            View(name="logarithmic", traces=own, layout=log),
            View(
                name="against its own median",
                traces=[box(title, _relative(samples), colour, unit="%") for title, samples, colour in groups],
                layout=rows_layout(names, "% of the stage's median")
                | {"xaxis": {"title": {"text": "% of the median"}}},
            ),
        ],
        height=rows_height(len(groups)),
    )


def _relative(samples: Samples) -> list[float]:
    middle = samples.summary.p50
    return [100 * value / middle for value in samples.values] if middle else []


def _runs_in_order(result: StagesResult) -> Plot:
    wall = result.default.wall_ms
    values, warmup = thinned(wall.values), thinned(result.warmup_ms)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "measured",
            "x": list(range(1, len(values) + 1)),
            "y": values,
            "line": {"color": PALETTE[0], "width": 1.5},
            "marker": {"size": 6, "symbol": "circle"},
            "hovertemplate": "run %{x}: %{y:.4g} ms<extra></extra>",
        }
    ]
    if warmup:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "warm-up",
                "x": list(range(1 - len(warmup), 1)),
                "y": warmup,
                "line": {"color": PALETTE[1], "width": 1.5, "dash": "dot"},
                "marker": {"size": 7, "symbol": "square-open"},
                "hovertemplate": "warm-up: %{y:.4g} ms<extra></extra>",
            }
        )
    first = f" The first call, left of these, took {ms(result.first_call_ms)} ms." if result.first_call_ms else ""
    return Plot(
        title="Runs in order",
        reading="A slope is drift, steps are modes; both make a median of few runs uncertain." + first,
        views=[
            View(
                name="runs",
                traces=traces,
                layout={
                    "xaxis": {"title": {"text": "run (warm-up up to 0)"}},
                    "yaxis": {"title": {"text": "end to end, ms"}, "rangemode": "tozero"},
                },
            )
        ],
        height=300,
    )


def memory_section(run: RunData) -> Section:
    """Peaks of the whole and of each stage: no course over time is recorded."""
    result = run.stages
    if result is None:
        return run.missing("stages", "memory", "Memory")
    found = [(stage.name, stage.memory) for stage in result.default.stages if stage.memory is not None]
    blocks: list[Block] = [Text(line=[_memory_words(result)])]
    if not found:
        blocks.append(Text(line=["The peaks of single stages were not measured in this run."], role="absent"))
        return Section(id="memory", title="Memory", blocks=blocks)
    drawn = sorted(found, key=lambda pair: -pair[1].peak_bytes)[:_DRAWN_STAGES]
    names = [stage for stage, _ in drawn]
    measures = [
        ("peak", "peak_bytes"),
        ("peak in its own part", "self_peak_bytes"),
        ("added by a call", "increase_bytes"),
    ]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": [label(stage) for stage in names],
            "x": [getattr(memory, field) / _MIB for _, memory in drawn],
            "marker": {"color": PALETTE[place], "pattern": pattern(place)},
            "hovertemplate": "%{y}: %{x:,.1f} MiB<extra>" + title + "</extra>",
        }
        for place, (title, field) in enumerate(measures)
    ]
    blocks.append(
        Plot(
            title="Peak memory while a stage runs",
            reading="Peaks, not a course over time: when within a stage the peak came was not recorded. A stage inside "
            "another counts for both; 'in its own part' is while no stage inside it ran.",
            views=[View(name="peaks", traces=traces, layout=rows_layout(names, "MiB", bargap=0.35))],
            height=rows_height(len(drawn), 48),
        )
    )
    blocks.append(_memory_table(found))
    return Section(id="memory", title="Memory", blocks=blocks)


def _memory_table(found: list[tuple[str, StageMemory]]) -> Table:
    has_reserved = any(memory.reserved_bytes is not None for _, memory in found)
    columns = [
        Column(title="stage"),
        *numbers("peak", "peak in its own part", "added by a call", unit="MiB"),
        *(numbers("reserved from the driver", unit="MiB") if has_reserved else []),
    ]
    rows = [
        [
            name(stage),
            _mib(memory.peak_bytes),
            _mib(memory.self_peak_bytes),
            _mib(memory.increase_bytes),
            *([_mib(memory.reserved_bytes)] if has_reserved else []),
        ]
        for stage, memory in found
    ]
    return Table(caption="Memory of each stage, from one untimed run", columns=columns, rows=rows)


def _mib(value: int | None) -> Cell:
    return number(value, None if value is None else f"{value / _MIB:,.1f}")


def _memory_words(result: StagesResult) -> str:
    peaks = [
        ("Device, allocated", result.peak_device_allocated_bytes),
        ("device, reserved", result.peak_device_reserved_bytes),
        ("host, resident", result.peak_host_rss_bytes),
    ]
    words = ", ".join(f"{what} {grouped(value / _MIB)} MiB" for what, value in peaks if value is not None)
    growth = [
        f" The {where}'s memory: {found.reason}"
        for where, found in (("device", result.device_memory_growth), ("host", result.host_memory_growth))
        if found is not None
    ]
    return f"Peaks of the timed runs. {words}.{''.join(growth)}"
