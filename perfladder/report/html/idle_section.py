"""What the host's time is made of, and why the device is idle: from rungs 2 and 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfladder.report.html.blocks import Block, Cell, Column, Plot, Section, Table, Text, View
from perfladder.report.html.plots import (
    rows_height,
    rows_layout,
    stacked,
    with_one_legend,
)
from perfladder.report.html.run_data import RunData, number, numbers
from perfladder.trace.regions import middle_run
from perfladder.trace.residual import HostSplit, IdleSplit

_OUTSIDE = "outside every region"
_US_PER_MS = 1e3
_HOST_PARTS = {
    "python_us": "Python or waiting",
    "operator_dispatch_us": "operator dispatch",
    "operator_compute_us": "operators' own work",
    "kernel_launch_us": "kernel launch",
    "synchronization_us": "synchronization",
    "copy_h2d_us": "copy to device",
    "copy_d2h_us": "copy to host",
    "copy_other_us": "other copies",
    "runtime_other_us": "other runtime calls",
    "garbage_collection_us": "garbage collection",
    "profiler_us": "the profiler itself",
}
_IDLE_PARTS = {
    "busy_us": "working",
    "waiting_for_launch_us": "idle: waits for a launch",
    "in_synchronization_us": "idle: host waits for it",
    "other_us": "idle: other",
}


def idle_section(run: RunData) -> Section:
    """What the host's time is made of, and when the device is idle."""
    title = "Host time and idle device"
    result = run.regions
    if result is None and run.kernels is None:
        return run.missing("regions", "idle", title)
    hosts: list[tuple[str, HostSplit]] = []
    devices: list[tuple[str, IdleSplit]] = []
    if result is not None and result.runs:
        middle = middle_run(result.runs)
        hosts.append(("a whole run", middle.host))
        devices += [("a whole run", middle.device)] if middle.device else []
    if result is not None and result.residual is not None:
        hosts.append((_OUTSIDE, result.residual.host))
    if run.kernels is not None:
        stage = f"{run.kernels.stage} alone"
        hosts += [(stage, run.kernels.host)] if run.kernels.host else []
        devices += [(stage, run.kernels.idle)] if run.kernels.idle else []
    blocks: list[Block] = [
        _splits("Host time by what it is spent on", hosts, _HOST_PARTS, _HOST_READING),
        _split_table("Host time", hosts, _HOST_PARTS),
    ]
    if devices:
        blocks += [
            _splits("Device: working and idle", devices, _IDLE_PARTS, _IDLE_READING),
            _split_table("Device time", devices, _IDLE_PARTS),
        ]
    else:
        blocks.append(Text(line=["No device worked in these runs: there is no idle time to tell of."], role="note"))
    return Section(id="idle", title=title, blocks=blocks)


_HOST_READING = (
    "Parts are self times of the profiled run's own thread and add up to the whole. Much Python or dispatch beside an "
    "idle device: the host sets the pace. Each row is drawn as a share of its own sum."
)
_IDLE_READING = (
    "All streams together, in the profiled run, whose host is slower than a plain one's. 'Waits for a launch': the "
    "host had not begun the next launch; 'host waits for it': a synchronization kept the host from launching."
)


def _parts(split: HostSplit | IdleSplit, names: Mapping[str, str]) -> dict[str, float]:
    return {title: getattr(split, field) / _US_PER_MS for field, title in names.items()}


def _splits(
    title: str, rows: Sequence[tuple[str, HostSplit | IdleSplit]], names: Mapping[str, str], reading: str
) -> Plot:
    def traces(as_share: bool) -> list[dict[str, Any]]:
        found = []
        for row, split in rows:
            parts = _parts(split, names)
            whole = sum(parts.values()) / 100 if as_share else 1.0
            shown = {part: value / (whole or 1.0) for part, value in parts.items()}
            found += stacked(row, shown, "%" if as_share else "ms", list(names.values()))
        return with_one_legend(found)

    titles = [row for row, _ in rows]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
    }
    return Plot(
        title=title,
        reading=reading,
        views=[
            View(name="shares", traces=traces(True), layout=rows_layout(titles, "% of the row's time", **layout)),
            View(name="ms", traces=traces(False), layout=rows_layout(titles, "ms", **layout)),
        ],
        height=rows_height(len(rows), 52) + 60,
    )


def _split_table(title: str, rows: Sequence[tuple[str, HostSplit | IdleSplit]], names: Mapping[str, str]) -> Table:
    parts = {row: _parts(split, names) for row, split in rows}
    shown = [part for part in names.values() if any(found[part] > 0 for found in parts.values())]
    return Table(
        caption=f"{title}, ms",
        columns=[Column(title="part"), *numbers(*parts)],
        rows=[[Cell(text=part), *(number(found[part]) for found in parts.values())] for part in shown],
        footer=[[Cell(text="sum"), *(number(sum(found.values())) for found in parts.values())]],
    )
