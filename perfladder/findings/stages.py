"""Findings of rung 1: where the time goes, whether the cadence is met, what memory does."""

from __future__ import annotations

from perfladder.findings.background import Background, interval_text, where
from perfladder.findings.finding import Evidence, Finding
from perfladder.findings.load import load_findings
from perfladder.findings.setup import setup_findings
from perfladder.rungs.stages import StagesResult
from perfladder.text import clause
from perfladder.workload import Workload

_DOMINANT_SHARE = 0.5
_CLEAR_SHARE = 0.2
_ENOUGH_CHUNKS = 100


def stages_findings(result: StagesResult, background: Background) -> list[Finding]:
    """Which stage dominates, and what else plain runs show."""
    workload = background.workload
    timing, found = result.default, []
    outside, interval = timing.outside_share, timing.outside_share_interval
    top = timing.stages[0] if timing.stages else None
    outside_evidence = Evidence(
        metric="outside_share", value=outside, unit="of wall time", source=where("stages", "outside_share")
    )
    if top is None or (interval.low > _DOMINANT_SHARE and outside > top.share):
        found.append(
            Finding(
                kind="outside_dominates",
                rung="stages",
                claim=(
                    f"{outside:.0%} of the time is outside every stage: in the pipeline's own code or in parts that "
                    "are not observed."
                ),
                evidence=[outside_evidence],
                uncertainty=interval_text(interval),
                refuted_by="a stage, named under 'stages', that covers this time",
                next_experiment=(
                    "Read the regions of rung 2 for what runs outside; name the methods that do it under 'stages' "
                    "in the workload and run again."
                ),
            )
        )
    elif top.share_interval.low > _CLEAR_SHARE:
        rivals = [stage for stage in timing.stages[1:] if stage.share_interval.high > top.share_interval.low]
        found.append(
            Finding(
                kind="dominant_stage",
                rung="stages",
                stage=top.name,
                claim=(
                    f"Stage {top.name} holds {top.share:.0%} of the time, in {top.calls_per_run:g} "
                    f"{'call' if top.calls_per_run == 1 else 'calls'} a run."
                ),
                evidence=[
                    Evidence(metric="share", value=top.share, unit="of wall time", source=where("stages", top.name)),
                    Evidence(
                        metric="cost_ms_p50",
                        value=top.cost_ms.summary.p50,
                        unit="ms",
                        source=where("stages", top.name),
                    ),
                    outside_evidence,
                ],
                uncertainty=interval_text(top.share_interval)
                + (f"; {', '.join(stage.name for stage in rivals)} cannot be told from it" if rivals else ""),
                refuted_by="another stage holding more on the same workload, beyond the interval",
                next_experiment=f"Replay {top.name} alone (rung 3) and attribute its kernels (rung 4).",
            )
        )
    else:
        found.append(
            Finding(
                kind="no_dominant_stage",
                rung="stages",
                stage=top.name,
                claim=f"No stage stands out: the largest, {top.name}, holds {top.share:.0%}.",
                evidence=[
                    Evidence(metric="share", value=top.share, unit="of wall time", source=where("stages", top.name))
                ],
                uncertainty=interval_text(top.share_interval),
                refuted_by="coarser stages, named under 'stages', of which one dominates",
                next_experiment="Read the regions of rung 2; name coarser stages in the workload.",
            )
        )
    own = [*_peak_memory(result, workload), *_memory_growth(result), *_cadence(result, workload)]
    return [*found, *own, *load_findings(result), *setup_findings(result, background)]


def _peak_memory(result: StagesResult, workload: Workload) -> list[Finding]:
    stage = next((stage for stage in result.default.stages if stage.name == result.dominating), None)
    if workload.metric != "peak_memory" or stage is None or stage.memory is None:
        return []
    memory = stage.memory
    whose = "host" if result.peak_device_allocated_bytes is None else "device"
    return [
        Finding(
            kind="peak_memory_stage",
            rung="stages",
            stage=stage.name,
            claim=(
                f"The {whose}'s memory is fullest in {stage.name}: {memory.self_peak_bytes / 2**30:.3g} GiB, of which "
                f"a call of it adds {memory.increase_bytes / 2**30:.3g} GiB to what was there."
            ),
            evidence=[
                Evidence(metric=metric, value=getattr(memory, metric), unit="bytes", source=where("stages", stage.name))
                for metric in ("self_peak_bytes", "increase_bytes")
            ],
            uncertainty="one run apart from the timed ones; work on other threads is not told apart",
            refuted_by="another stage with a higher peak in a further run",
            next_experiment=(
                f"If the increase is most of the peak, make the inputs of {stage.name} smaller or split its call; "
                "otherwise look at what is kept from before."
            ),
        )
    ]


def _memory_growth(result: StagesResult) -> list[Finding]:
    growths = {"device": result.device_memory_growth, "host": result.host_memory_growth}
    for whose, growth in growths.items():
        if growth is not None and growth.is_growing and growth.bytes_per_run is not None:
            return [
                Finding(
                    kind="memory_grows",
                    rung="stages",
                    claim=f"The {whose}'s memory in use grows by {growth.bytes_per_run / 2**20:.3g} MiB a run.",
                    evidence=[
                        Evidence(
                            metric="bytes_per_run",
                            value=growth.bytes_per_run,
                            unit="bytes a run",
                            source=where("stages", f"{whose}_memory_growth"),
                        )
                    ],
                    uncertainty=clause(growth.reason),
                    refuted_by="more runs after which it stays level: a cache that fills is no leak",
                    next_experiment="Raise measured_runs; if it goes on, look for what is kept between runs.",
                )
            ]
    return []


def _cadence(result: StagesResult, workload: Workload) -> list[Finding]:
    cadence, media = result.default.cadence, workload.media
    if cadence is None or media is None or cadence.headroom_ms is None:
        return []
    is_met = cadence.headroom_ms >= 0
    return [
        Finding(
            kind="cadence_met" if is_met else "cadence_missed",
            rung="stages",
            claim=(
                f"p95 chunk latency is {cadence.chunk_ms.p95:.1f} ms against {media.chunk_ms:.1f} ms of media minus a "
                f"margin of {media.margin_ms:.1f} ms: {abs(cadence.headroom_ms):.1f} ms "
                f"{'of headroom' if is_met else 'too late'}."
            ),
            evidence=[
                Evidence(
                    metric="chunk_ms_p95", value=cadence.chunk_ms.p95, unit="ms", source=where("stages", "cadence")
                ),
                Evidence(
                    metric="num_late_chunks",
                    value=cadence.num_late_chunks or 0,
                    unit=f"of {cadence.chunk_ms.n} chunks",
                    source=where("stages", "cadence"),
                ),
                Evidence(
                    metric="num_stalls",
                    value=cadence.num_stalls or 0,
                    unit="chunks that a viewer waits for",
                    source=where("stages", "cadence"),
                ),
                Evidence(
                    metric="first_chunk_ms_p50",
                    value=cadence.first_chunk_ms.summary.p50,
                    unit="ms",
                    source=where("stages", "cadence"),
                ),
            ],
            uncertainty=(
                f"{cadence.chunk_ms.n} chunks, from {cadence.chunk_ms.min:.1f} to {cadence.chunk_ms.max:.1f} ms"
            ),
            refuted_by="a longer run in which the p95 crosses the limit",
            stage=result.dominating if result.dominating_by == "chunk_self_ms" else None,
            next_experiment=_cadence_experiment(is_met, cadence.chunk_ms.n, result.dominating),
        )
    ]


def _cadence_experiment(is_met: bool, num_chunks: int, stage: str | None) -> str:
    if num_chunks < _ENOUGH_CHUNKS:
        return f"Raise measured_runs until p95 rests on at least {_ENOUGH_CHUNKS} chunks."
    if is_met:
        return "None is needed for the cadence."
    return f"Speed up {stage or 'the dominating stage'}, or lower the cadence that is asked for."
