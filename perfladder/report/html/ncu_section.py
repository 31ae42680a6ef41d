"""The section of rung 5: what Nsight Compute says of one kernel."""

from __future__ import annotations

from perfladder.report.amounts import percent
from perfladder.report.html.blocks import Block, Cell, Code, Column, Plot, Section, Strong, Table, Text, View
from perfladder.report.html.plots import PALETTE, label, rows_height, rows_layout
from perfladder.report.html.run_data import RunData, name, number, numbers
from perfladder.rungs.ncu import ProfiledLaunch


def ncu_section(run: RunData) -> Section:
    """Why one kernel is slow."""
    title = "Nsight Compute"
    result = run.ncu
    if result is None:
        return run.missing("ncu", "ncu", title)
    blocks: list[Block] = [Text(line=[Code(text=result.kernel or "–"), f": {result.statement or 'undecided'}"])]
    for launch in result.launches:
        blocks += _launch(launch)
    return Section(id="ncu", title=title, blocks=blocks)


def _launch(launch: ProfiledLaunch) -> list[Block]:
    found = launch.diagnosis
    which = {True: "", None: ", perhaps another instantiation", False: ", another kernel"}[launch.is_asked_kernel]
    level = f" ({found.level})" if found.level else ""
    blocks: list[Block] = [
        Text(line=[Strong(text=f"Launch {launch.index}{which}: {found.verdict}{level}. "), found.statement]),
        Text(line=[Code(text=launch.demangled_name)]),
        Table(
            caption=f"What the metrics of launch {launch.index} say",
            columns=[
                Column(title="metric"),
                *numbers("value"),
                *(Column(title=title) for title in ("unit", "says", "rules out")),
            ],
            rows=[
                [
                    name(row.metric),
                    number(row.value, f"{row.value:.4g}"),
                    Cell(text=row.unit),
                    Cell(text=row.statement),
                    Cell(text=row.rules_out or "–"),
                ]
                for row in found.observations
            ],
        ),
    ]
    if found.stalls:
        stalls = found.stalls[:10]
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [label(stall.reason) for stall in stalls],
            "x": [100 * stall.share for stall in stalls],
            "marker": {"color": PALETTE[0]},
            "text": [percent(stall.share) for stall in stalls],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
        }
        blocks += [
            Plot(
                title=f"What warps of launch {launch.index} wait for",
                reading="Parts of the time between two instructions of a warp. A high bar matters only where the "
                "verdict is latency, or where nothing else is near its limit.",
                views=[
                    View(name="stalls", traces=[trace], layout=rows_layout([s.reason for s in stalls], "% of the time"))
                ],
                height=rows_height(len(stalls), 28),
            ),
            Table(
                caption=f"Stalls of launch {launch.index}",
                columns=[Column(title="reason"), *numbers("share")],
                rows=[
                    [name(stall.reason), number(stall.share, percent(stall.share), bar=stall.share)]
                    for stall in found.stalls
                ],
                num_shown=10,
            ),
        ]
    if point := found.roofline:
        uncounted = "; the tensor cores' work is not counted" if point.has_uncounted_tensor_work else ""
        words = (
            f"Roofline, {point.precision}: {point.arithmetic_intensity:.3g} FLOP/B (ridge "
            f"{point.ridge_flops_per_byte:.3g}), {percent(point.compute_frac)} of compute, "
            f"{percent(point.bandwidth_frac)} of bandwidth{uncounted}."
        )
        blocks.append(Text(line=[words]))
    blocks += [Text(line=[reason], role="note") for reason in found.undecided_because]
    return blocks
