"""Which stage dominates the metric that matters."""

from __future__ import annotations

from perfladder.timing.results import ScenarioTiming, StageTiming
from perfladder.workload import Metric


def dominating_stage(metric: Metric, timing: ScenarioTiming) -> tuple[str | None, str | None]:
    """The stage to look into, and the measure that says so.

    For peak memory it is the stage during whose own part the peak was reached; for cadence the one that costs most in
    a chunk after the first; for everything else the one with the largest share of the time.
    """
    if metric == "peak_memory":
        with_memory = [stage for stage in timing.stages if stage.memory is not None]
        if with_memory:
            return max(with_memory, key=_memory_rank).name, "self_peak_bytes"
    if metric == "cadence_p95":
        in_chunks = [stage for stage in timing.stages if stage.chunk_self_ms is not None]
        if in_chunks:
            return max(in_chunks, key=_chunk_cost).name, "chunk_self_ms"
    return (timing.stages[0].name, "share") if timing.stages else (None, None)


def _memory_rank(stage: StageTiming) -> tuple[int, int]:
    assert stage.memory is not None
    return stage.memory.self_peak_bytes, stage.memory.increase_bytes


def _chunk_cost(stage: StageTiming) -> float:
    assert stage.chunk_self_ms is not None
    return stage.chunk_self_ms.summary.p50
