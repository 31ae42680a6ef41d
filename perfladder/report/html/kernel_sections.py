"""The section of rung 4: which kernels hold the time, from where they are called, and what could be won."""

from __future__ import annotations

from perfladder.report.amounts import ms, percent
from perfladder.report.html.blocks import Block, Cell, Code, Column, Plot, Section, Table, Text, View
from perfladder.report.html.plots import PALETTE, family_colour, label, rows_height, rows_layout
from perfladder.report.html.run_data import RunData, counted, grouped, name, number, numbers, place_of
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.ranking import RankedGroup

_BARS = 15


def kernels_section(run: RunData) -> Section:
    """Which kernels or operators hold the time, and what could be won."""
    result = run.kernels
    if result is None:
        return run.missing("kernels", "kernels", "Kernels")
    title = "Kernels" if result.kind == "kernels" else "Operators"
    return Section(
        id="kernels",
        title=title,
        blocks=[
            _kernel_words(result),
            _kernel_bars(result),
            *_ranking_tables(result),
            _kernel_table(result),
            *_moves(result),
        ],
    )


def _kernel_words(result: KernelsResult) -> Text:
    what = "kernels" if result.kind == "kernels" else "operators, by self time"
    words = f": {grouped(result.num_kernels)} {what}, {grouped(round(result.total_us, 1))} us in one replayed call."
    if result.unprofiled_ms is not None:
        words += f" Without the profiler the call takes {ms(result.unprofiled_ms)} ms"
        words += f", in which the device works for {ms(result.device_busy_ms)} ms." if result.device_busy_ms else "."
    if result.bound is not None:
        words += f" {result.bound.statement}"
    return Text(line=["Stage ", Code(text=result.stage or "–"), words])


def _kernel_bars(result: KernelsResult) -> Plot:
    groupings = {
        "family": [(row.family, row.total_us, row.share) for row in result.families],
        "operator": [(row.name, row.total_us, row.share) for row in result.by_operator],
        "block": [(counted(row.name, row.num_modules), row.total_us, row.share) for row in result.positions.by_block],
        "kernel": [(row.name, row.total_us, row.share) for row in result.by_kernel],
    }
    views = []
    for title, found in groupings.items():
        rows = found[:_BARS]
        if not rows:
            continue
        colours = [family_colour(row[0]) if title == "family" else PALETTE[0] for row in rows]
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [label(row[0]) for row in rows],
            "x": [row[1] for row in rows],
            "marker": {"color": colours},
            "text": [percent(row[2]) for row in rows],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{y}: %{x:,.1f} us<extra></extra>",
        }
        layout = rows_layout([], "us a call", bargap=0.25)
        layout["yaxis"] = {"autorange": "reversed", "type": "category"}
        views.append(View(name=f"by {title}", traces=[trace], layout=layout))
    return Plot(
        title="Where the time of a call is",
        reading="Sum over all launches in one replayed call, with the share of all. A block is the module two levels "
        "below the stage; repeated blocks are taken together.",
        views=views,
        height=rows_height(min(_BARS, max(len(rows) for rows in groupings.values())), 30),
    )


def _ranking_tables(result: KernelsResult) -> list[Block]:
    if not result.operator_ranking:
        return []
    return [
        Table(
            caption="Where to begin: operators by possible win",
            columns=_ranking_columns(with_place=False),
            rows=[_ranked(row, with_place=False) for row in result.operator_ranking],
            num_shown=8,
        ),
        Text(line=[result.win_model], role="note"),
        Table(
            caption="The same by module, repeated modules together",
            columns=_ranking_columns(with_place=True),
            rows=[_ranked(row, with_place=True) for row in result.positions.ranking],
            num_shown=10,
            is_searchable=len(result.positions.ranking) > 20,
        ),
    ]


def _ranking_columns(*, with_place: bool) -> list[Column]:
    return [
        Column(title="operator"),
        *([Column(title="module")] if with_place else []),
        Column(title="family"),
        *numbers("count"),
        *numbers("time", unit="us"),
        *numbers("share"),
        Column(title="of the nearer roof", is_number=True),
        *numbers("possible win", unit="us"),
        *numbers("of a call", "of the run"),
    ]


def _ranked(row: RankedGroup, *, with_place: bool) -> list[Cell]:
    return [
        name(row.operator),
        *([name(place_of(row.region_id, row.num_modules))] if with_place else []),
        Cell(text=row.family),
        number(row.count),
        number(row.total_us),
        number(row.share, percent(row.share), bar=row.share),
        Cell(text="not known") if row.achieved_frac is None else number(row.achieved_frac, percent(row.achieved_frac)),
        number(row.possible_win_us),
        number(row.possible_win_frac, percent(row.possible_win_frac)),
        number(row.run_win_frac, percent(row.run_win_frac)),
    ]


def _kernel_table(result: KernelsResult) -> Table:
    what = "kernel" if result.kind == "kernels" else "operator"
    columns = [
        Column(title=what),
        *numbers("time", unit="us"),
        *numbers("share", "count"),
        *numbers("mean", "possible win", unit="us"),
        Column(title="family"),
        Column(title="called by"),
        Column(title="module"),
    ]
    ordered = sorted(result.positions.kernels, key=lambda row: (-row.total_us, row.kernel, row.region or ""))
    return Table(
        caption=f"All {what}s by where they were called, repeated modules together, the longest first",
        columns=columns,
        rows=[_kernel_row(row) for row in ordered],
        is_searchable=True,
        num_shown=20,
    )


def _kernel_row(row: KernelSummary) -> list[Cell]:
    return [
        name(row.kernel),
        number(row.total_us),
        number(row.share, percent(row.share), bar=row.share),
        number(row.count),
        number(row.mean_us),
        number(row.possible_win_us),
        Cell(text=row.family),
        name(_caller(row)),
        name(place_of(row.region, row.num_modules)),
    ]


def _caller(row: KernelSummary) -> str:
    by = row.launch_site or row.outer_operator or row.operator or ("CUDA graph" if row.is_from_graph else "–")
    return f"{by} (in a graph, {percent(row.confidence)} sure)" if row.confidence else by


def _moves(result: KernelsResult) -> list[Block]:
    found: list[Block] = []
    if result.copies:
        columns = [
            *(Column(title=title) for title in ("copy", "host memory", "operator", "module")),
            *numbers("count"),
            *numbers("time", unit="us"),
            *numbers("size", unit="MB"),
            *numbers("bandwidth", unit="GB/s"),
        ]
        rows = [
            [
                Cell(text=row.kind),
                Cell(text=row.host_memory or "–"),
                name(row.outer_operator or row.operator or "–"),
                name(place_of(row.region_id)),
                number(row.count),
                number(row.total_us),
                number(None if row.num_bytes is None else row.num_bytes / 1e6),
                number(row.bandwidth_gb_per_s),
            ]
            for row in result.copies
        ]
        found.append(Table(caption="Copies", columns=columns, rows=rows, num_shown=10))
    if result.synchronizations:
        columns = [
            *(Column(title=title) for title in ("the host waits in", "operator", "module")),
            *numbers("count"),
            *numbers("time", unit="us"),
        ]
        rows = [
            [
                name(row.call),
                name(row.outer_operator),
                name(place_of(row.region_id)),
                number(row.count),
                number(row.total_us),
            ]
            for row in result.synchronizations
        ]
        found.append(Table(caption="Waits of the host for the device", columns=columns, rows=rows, num_shown=10))
    return found
