"""How the workload fares beyond one call after the other: load, streams, cold starts, energy, ranks."""

from __future__ import annotations

from perfladder.report.amounts import ms
from perfladder.report.html.blocks import Block, Cell, Column, Section, Table, Text
from perfladder.report.html.run_data import RunData, number, numbers
from perfladder.report.load import LoadView
from perfladder.stats import Summary
from perfladder.timing.ranks import RankTable
from perfladder.timing.results import CadenceTiming, GenerationTiming


def load_section(run: RunData) -> Section | None:
    """Throughput, requests at once, cold start, energy, ranks; None where the workload asks for none of them."""
    report = run.report
    blocks: list[Block] = []
    if report.load is not None:
        blocks += _load_blocks(report.load, is_asked=report.workload.metric == "throughput")
    if report.ranks is not None:
        blocks.append(_ranks(report.ranks))
    blocks += _streams(run)
    return Section(id="load", title="Load, streams and ranks", blocks=blocks) if blocks else None


def _load_blocks(load: LoadView, *, is_asked: bool) -> list[Block]:
    blocks: list[Block] = []
    if len(load.throughput) > 1 or is_asked:
        columns = [
            Column(title="scenario"),
            *numbers("items a call"),
            *numbers("p50", "p95", "p99", unit="ms"),
            *numbers("items/s"),
            Column(title="95 % interval", is_number=True),
        ]
        rows = [
            [
                Cell(text=row.scenario),
                number(row.items_per_call),
                *(number(value) for value in (row.latency_ms.p50, row.latency_ms.p95, row.latency_ms.p99)),
                number(row.items_per_s, f"{row.items_per_s:.4g}"),
                Cell(
                    text=f"{row.items_per_s_interval.low:.4g} to {row.items_per_s_interval.high:.4g}",
                    value=row.items_per_s_interval.low,
                ),
            ]
            for row in load.throughput
        ]
        blocks.append(Table(caption="Throughput", columns=columns, rows=rows))
        if load.saturation:
            where = "was not reached" if load.saturation.scenario is None else f"at {load.saturation.scenario}"
            blocks.append(Text(line=[f"Saturation {where}: {load.saturation.reason}."], role="note"))
    if load.concurrency:
        columns = [
            *numbers("requests at once"),
            *numbers("p50", "p95", "p99", unit="ms"),
            *numbers("items/s", "CPU cores used"),
            Column(title="errors"),
        ]
        rows = [
            [
                number(row.concurrency),
                *(number(value) for value in _percentiles(row.latency_ms)),
                number(row.items_per_s),
                number(row.cpu_cores_used),
                Cell(text=row.failure or f"{row.num_errors} of {row.num_requests}"),
            ]
            for row in load.concurrency
        ]
        blocks.append(Table(caption="Requests at once, each level in a process of its own", columns=columns, rows=rows))
    if load.cold_start:
        cold = load.cold_start
        parts = {
            **{title.replace("_", " "): samples for title, samples in cold.parts_ms.items()},
            "until the first output": cold.total_ms,
        }
        rows = [
            [Cell(text=title), *(number(value) for value in (s.summary.p50, s.summary.min, s.summary.max))]
            for title, s in parts.items()
        ]
        blocks.append(
            Table(
                caption=f"Cold start, {len(cold.total_ms.launches)} launches",
                columns=[Column(title="part"), *numbers("p50", "min", "max", unit="ms")],
                rows=rows,
            )
        )
    if load.energy and load.energy.energy_j_per_run is not None:
        energy = load.energy
        words = (
            f"Energy: {energy.energy_j_per_run:.4g} J a run, {energy.energy_j_per_item:.4g} J an item, "
            f"{energy.mean_power_w:.4g} W on average: {energy.covers}, idle power included."
        )
        blocks.append(Text(line=[words]))
    return blocks


def _percentiles(summary: Summary | None) -> tuple[float | None, ...]:
    return (summary.p50, summary.p95, summary.p99) if summary is not None else (None, None, None)


def _ranks(ranks: RankTable) -> Table:
    columns = [
        *numbers("rank"),
        *numbers("end to end p50", "behind p50", "outside p50", unit="ms"),
        *numbers("slowest in runs"),
    ]
    rows = [
        [
            number(own.rank),
            number(own.wall_ms.summary.p50),
            number(own.lag_ms),
            number(own.outside_ms),
            number(own.num_runs_slowest),
        ]
        for own in ranks.ranks
    ]
    return Table(
        caption=f"{ranks.world_size} ranks; rank {ranks.slowest_rank} is the slowest", columns=columns, rows=rows
    )


def _streams(run: RunData) -> list[Block]:
    table = run.report.stages[0] if run.report.stages else None
    words = [
        _chunks(table.cadence) if table and table.cadence else "",
        _tokens(table.generation) if table and table.generation else "",
    ]
    return [Text(line=[found]) for found in words if found]


def _chunks(cadence: CadenceTiming) -> str:
    chunk = cadence.chunk_ms
    words = f"Chunks: the first after {ms(cadence.first_chunk_ms.summary.p50)} ms; then p50 {ms(chunk.p50)}, "
    words += f"p95 {ms(chunk.p95)}, p99 {ms(chunk.p99)} ms"
    if not cadence.media_ms_per_chunk:
        return f"{words}."
    words += f" against {ms(cadence.media_ms_per_chunk)} ms of media: headroom {ms(cadence.headroom_ms)} ms"
    return f"{words}, {cadence.num_late_chunks} late."


def _tokens(made: GenerationTiming) -> str:
    words = f"Tokens: the first after {ms(made.first_token_ms.summary.p50)} ms, of which the prefill takes "
    words += f"{ms(made.prefill_ms.summary.p50)} ms"
    if made.token_ms is None:
        return f"{words}."
    return f"{words}; each later one {ms(made.token_ms.p50)} ms (p95 {ms(made.token_ms.p95)})."
