"""Findings about how the pipeline is set up: compilation that goes on, memory near its end, precision."""

from __future__ import annotations

from typing import Final

from perfladder.findings.background import Background, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.rungs.base import RungResult
from perfladder.timing.results import Compilations, StagesResult, StageTiming

DEVICE_FULL_FRAC: Final = 0.9
"""Of a device's memory held by the allocator: from here on allocations become slow or fail."""
HOST_FULL_FRAC: Final = 0.8
"""Of the machine's memory in one process."""
WIDE_SHARE: Final = 0.1
"""Of the time: a stage below it is not worth another precision."""
_BITS: Final = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
_OUT_OF_MEMORY: Final = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
)


def setup_findings(result: StagesResult, background: Background) -> list[Finding]:
    """What plain runs show of compilation, memory and precision."""
    return [*_compile_churn(result), *_memory_capacity(result, background), *_wider_dtype(result, background)]


def _compile_churn(result: StagesResult) -> list[Finding]:
    parts = result.compilations
    measured = parts.get("measured", Compilations())
    limit_hits = sum(part.limit_hits for part in parts.values())
    breaks = sum(part.graph_breaks for part in parts.values())
    told = []
    if measured.graphs or measured.recompiles:
        told.append(
            f"{measured.graphs} graphs were made in the measured runs ({measured.recompiles} recompilations, "
            f"{measured.seconds:.3g} s)"
        )
    if limit_hits:
        told.append(f"{limit_hits} functions reached the limit of recompilations and run uncompiled")
    if breaks:
        told.append(f"{breaks} graph breaks leave Python between the graphs")
    if not told:
        return []
    metrics = {"measured.recompiles": measured.recompiles, "limit_hits": limit_hits, "graph_breaks": breaks}
    return [
        Finding(
            kind="compile_churn",
            rung="stages",
            claim=f"torch.compile does not settle, or not on whole graphs: {'; '.join(told)}.",
            evidence=[
                Evidence(metric=metric, value=value, unit="times", source=where("stages", "compilations"))
                for metric, value in metrics.items()
            ],
            uncertainty="counted by torch; what a graph break or a recompilation costs is not measured here",
            refuted_by="runs with the same inputs in which nothing is compiled, and graphs without breaks",
            next_experiment=(
                "Run once with TORCH_LOGS=recompiles,graph_breaks in the environment, which names the guards and "
                "lines; make changing "
                "sizes dynamic, and take what breaks the graph out of the module."
            ),
        )
    ]


def _memory_capacity(result: StagesResult, background: Background) -> list[Finding]:
    total, reserved = background.total_device_bytes, result.peak_device_reserved_bytes
    if total and reserved and reserved / total >= DEVICE_FULL_FRAC:
        return [_capacity("device", reserved, total, "peak_device_reserved_bytes", background)]
    machine, resident = background.info.environment.total_memory_bytes, result.peak_host_rss_bytes
    if resident and resident / machine >= HOST_FULL_FRAC:
        return [_capacity("machine", resident, machine, "peak_host_rss_bytes", background)]
    return []


def _capacity(whose: str, used: int, total: int, metric: str, background: Background) -> Finding:
    return Finding(
        kind="memory_capacity",
        rung="stages",
        claim=f"At the peak {used / total:.0%} of the {whose}'s {total / 2**30:.3g} GiB of memory are taken.",
        evidence=[Evidence(metric=metric, value=used, unit="bytes", source=where("stages", metric))],
        uncertainty="an allocator that holds memory back looks fuller than the tensors need",
        refuted_by="the same duration with more memory free",
        next_experiment="See which stage the peak is in, then make its inputs smaller, or its weights narrower.",
        next_command=background.command("run", "--set", "metric=peak_memory", "--until", "stages"),
    )


def out_of_memory_findings(result: RungResult, background: Background) -> list[Finding]:
    """A rung that ended for a lack of memory."""
    reason = (result.reason or "").lower()
    if result.status != "failed" or not any(phrase in reason for phrase in _OUT_OF_MEMORY):
        return []
    return [
        Finding(
            kind="memory_capacity",
            rung=result.rung,
            claim=f"Rung {result.rung} ended for a lack of memory: {result.reason}",
            evidence=[],
            uncertainty="none of the failure; other processes may have taken the memory",
            refuted_by="the same failure with most of the memory free",
            next_experiment="Free memory that others hold, or take a smaller shape; then see where the peak is.",
            next_command=background.command("run", "--set", "metric=peak_memory", "--until", "stages"),
        )
    ]


def _wider_dtype(result: StagesResult, background: Background) -> list[Finding]:
    """A stage whose weights are wider than those of the others, and which takes time that shows."""
    stages = [stage for stage in result.default.stages if _width(stage) is not None]
    if len(stages) < 2:
        return []
    narrowest = min(_width(stage) or 0 for stage in stages)
    wide = [stage for stage in stages if (_width(stage) or 0) > narrowest and stage.share >= WIDE_SHARE]
    if not wide:
        return []
    stage = max(wide, key=lambda stage: stage.share)
    other = next(one for one in stages if _width(one) == narrowest)
    dtype, narrow = stage.dtypes[0], other.dtypes[0]
    return [
        Finding(
            kind="wider_dtype",
            rung="stages",
            stage=stage.name,
            claim=(
                f"{stage.name} computes with {dtype} weights and holds {stage.share:.0%} of the time, while "
                f"{other.name} has {narrow} ones."
            ),
            evidence=[
                Evidence(metric="share", value=stage.share, unit="of wall time", source=where("stages", stage.name)),
                Evidence(
                    metric=f"{dtype} bits", value=_BITS[dtype], unit="bits a weight", source=where("stages", stage.name)
                ),
            ],
            uncertainty="weights say nothing of autocast inside; the wider type may be there for accuracy",
            refuted_by=f"{stage.name} in {narrow} that takes as long, or whose output is not good enough",
            next_experiment=f"Try {stage.name} in {narrow}, with a gate on the quality of the whole output.",
            next_command=_under_autocast(stage, narrow, background) if stage.is_module else None,
        )
    ]


def _under_autocast(stage: StageTiming, dtype: str, background: Background) -> str | None:
    if dtype == "float32":  # autocast goes below it only
        return None
    backend = f"eager:autocast_enabled=true,autocast_dtype={dtype}"
    return background.tune_command("--module", stage.name, "--backend", backend, "--quality", "psnr>=30")


def _width(stage: StageTiming) -> int | None:
    """Bits of its weights; None where they have several types, or none of floating point."""
    return _BITS.get(stage.dtypes[0]) if len(stage.dtypes) == 1 else None
