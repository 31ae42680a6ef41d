"""The part of a report about load: throughput of each scenario, requests at once, cold starts, energy."""

from __future__ import annotations

from perfladder.models import Model
from perfladder.rungs.stages import StagesResult
from perfladder.stats import Summary
from perfladder.timing.cold_start import ColdStart
from perfladder.timing.concurrency import Mode
from perfladder.timing.energy import Energy
from perfladder.timing.throughput import Saturation, Throughput


class LevelRow(Model):
    """One level of concurrency, without its raw samples."""

    concurrency: int
    mode: Mode | None
    num_requests: int
    num_errors: int
    errors: dict[str, int]
    latency_ms: Summary | None
    first_output_ms: Summary | None
    items_per_s: float | None
    cpu_cores_used: float | None
    failure: str | None


class LoadView(Model):
    """How the workload fares beyond one call after the other in one warm process."""

    throughput: list[Throughput]
    saturation: Saturation | None
    concurrency: list[LevelRow]
    cold_start: ColdStart | None
    energy: Energy | None

    @classmethod
    def of(cls, result: StagesResult) -> LoadView:
        """From the result of rung 1."""
        samples = ("latency_ms", "first_output_ms")
        rows = [
            LevelRow(
                **{name: getattr(level, name) for name in LevelRow.model_fields if name not in samples},
                **{name: found.summary if (found := getattr(level, name)) else None for name in samples},
            )
            for level in result.concurrency
        ]
        return cls(
            throughput=result.throughput,
            saturation=result.saturation,
            concurrency=rows,
            cold_start=result.cold_start,
            energy=result.energy,
        )
