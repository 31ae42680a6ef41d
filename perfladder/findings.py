"""What the evidence says, and the one table that decides how far the ladder is climbed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from perfladder.finding import Evidence, Finding, Kind
from perfladder.nsight.findings import kernel_diagnosis, kernel_question
from perfladder.profiling.kernel_findings import possible_win
from perfladder.rungs.base import RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.rungs.regions import RegionsResult
from perfladder.rungs.stages import StagesResult
from perfladder.stats import Interval
from perfladder.target import LoadedInfo
from perfladder.timing.load_findings import load_findings
from perfladder.trace.dynamo import RUNTIME_NAME
from perfladder.workload import Workload

_DOMINANT_SHARE = 0.5
_CLEAR_SHARE = 0.2
_BUSY_FRAC = 0.9
_DISTORTION = 1.5
_ENOUGH_CHUNKS = 100


class PolicyRow(NamedTuple):
    """A finding of this kind makes these rungs needless."""

    kind: Kind
    skips: tuple[str, ...]
    reason: str


POLICY = (
    PolicyRow(
        "outside_dominates",
        ("capture", "harness", "kernels", "ncu"),
        "Most of the time is outside every stage, so no stage is worth replaying alone.",
    ),
    PolicyRow(
        "not_replayable",
        ("harness", "kernels", "ncu"),
        "The dominating stage cannot be replayed alone, so there is nothing to attribute kernels in.",
    ),
    PolicyRow(
        "replay_output_differs",
        ("kernels", "ncu"),
        "The replay does not compute what the pipeline computes, so its kernels are no evidence.",
    ),
)
"""The stopping policy. Whatever is in no row goes on to the next rung."""


_MATTERS_MOST: tuple[Kind, ...] = (
    "outside_dominates",
    "cadence_missed",
    "replay_output_differs",
    "not_replayable",
    "device_mostly_idle",
    "outside_regions",
    "kernel_diagnosis",
    "largest_possible_win",
    "dominant_kernels",
    "no_dominant_stage",
    "dominant_stage",
)
"""Whose next experiment is the one to begin with, the first that was found."""


def smallest_next_experiment(findings: list[Finding]) -> str | None:
    """The experiment to begin with: a thing that settles a question before one that refines an answer."""
    by_kind = {finding.kind: finding for finding in reversed(findings)}
    first = next((by_kind[kind] for kind in _MATTERS_MOST if kind in by_kind), None)
    return first.next_experiment if first else findings[-1].next_experiment if findings else None


def rungs_to_skip(findings: list[Finding]) -> dict[str, str]:
    """The rungs that the findings make needless, with the reason."""
    kinds = {finding.kind for finding in findings}
    skipped: dict[str, str] = {}
    for row in POLICY:
        if row.kind in kinds:
            for rung in row.skips:
                skipped.setdefault(rung, row.reason)
    return skipped


def collect_findings(workload: Workload, info: LoadedInfo, results: Mapping[str, RungResult]) -> list[Finding]:
    """Derive all findings from the results so far; the same results always give the same findings."""
    found: list[Finding] = []
    for result in results.values():
        derive = _DERIVATIONS.get(type(result))
        if result.status == "done" and derive is not None:
            found += derive(result, workload)
        elif isinstance(result, CaptureResult) and result.status == "not_applicable" and result.stage is not None:
            found += _not_replayable(result)
    return found


def _from_stages(result: StagesResult, workload: Workload) -> list[Finding]:
    timing, found = result.default, []
    outside, interval = timing.outside_share, timing.outside_share_interval
    top = timing.stages[0] if timing.stages else None
    outside_evidence = Evidence(
        metric="outside_share", value=outside, unit="of wall time", source=_where("stages", "outside_share")
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
                uncertainty=_interval_text(interval),
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
                    Evidence(metric="share", value=top.share, unit="of wall time", source=_where("stages", top.name)),
                    Evidence(
                        metric="cost_ms_p50",
                        value=top.cost_ms.summary.p50,
                        unit="ms",
                        source=_where("stages", top.name),
                    ),
                    outside_evidence,
                ],
                uncertainty=_interval_text(top.share_interval)
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
                    Evidence(metric="share", value=top.share, unit="of wall time", source=_where("stages", top.name))
                ],
                uncertainty=_interval_text(top.share_interval),
                refuted_by="coarser stages, named under 'stages', of which one dominates",
                next_experiment="Read the regions of rung 2; name coarser stages in the workload.",
            )
        )
    own = [*_peak_memory(result, workload), *_memory_growth(result), *_cadence(result, workload)]
    return [*found, *own, *load_findings(result)]


def _peak_memory(result: StagesResult, workload: Workload) -> list[Finding]:
    stage = next((stage for stage in result.default.stages if stage.name == result.dominating), None)
    if workload.metric != "peak_memory" or stage is None or stage.memory is None:
        return []
    memory = stage.memory
    where = "host" if result.peak_device_allocated_bytes is None else "device"
    return [
        Finding(
            kind="peak_memory_stage",
            rung="stages",
            stage=stage.name,
            claim=(
                f"The {where}'s memory is fullest in {stage.name}: {memory.self_peak_bytes / 2**30:.3g} GiB, of which "
                f"a call of it adds {memory.increase_bytes / 2**30:.3g} GiB to what was there."
            ),
            evidence=[
                Evidence(
                    metric=metric, value=getattr(memory, metric), unit="bytes", source=_where("stages", stage.name)
                )
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
    for where, growth in growths.items():
        if growth is not None and growth.is_growing and growth.bytes_per_run is not None:
            return [
                Finding(
                    kind="memory_grows",
                    rung="stages",
                    claim=f"The {where}'s memory in use grows by {growth.bytes_per_run / 2**20:.3g} MiB a run.",
                    evidence=[
                        Evidence(
                            metric="bytes_per_run",
                            value=growth.bytes_per_run,
                            unit="bytes a run",
                            source=_where("stages", f"{where}_memory_growth"),
                        )
                    ],
                    uncertainty=growth.reason.rstrip("."),
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
                    metric="chunk_ms_p95", value=cadence.chunk_ms.p95, unit="ms", source=_where("stages", "cadence")
                ),
                Evidence(
                    metric="num_late_chunks",
                    value=cadence.num_late_chunks or 0,
                    unit=f"of {cadence.chunk_ms.n} chunks",
                    source=_where("stages", "cadence"),
                ),
                Evidence(
                    metric="num_stalls",
                    value=cadence.num_stalls or 0,
                    unit="chunks that a viewer waits for",
                    source=_where("stages", "cadence"),
                ),
                Evidence(
                    metric="first_chunk_ms_p50",
                    value=cadence.first_chunk_ms.summary.p50,
                    unit="ms",
                    source=_where("stages", "cadence"),
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


def _not_replayable(result: CaptureResult) -> list[Finding]:
    return [
        Finding(
            kind="not_replayable",
            rung="capture",
            stage=result.stage,
            claim=result.reason or "The dominating stage cannot be replayed alone.",
            evidence=[],
            uncertainty="none: the stage's inputs were looked at",
            refuted_by="a call site inside the stage that takes and returns plain tensors",
            next_experiment="Name a narrower call site under 'stages', such as the module that the stage calls.",
        )
    ]


def _from_harness(result: HarnessResult, workload: Workload) -> list[Finding]:
    assert result.timing_ratio is not None
    assert result.timing_ratio_interval is not None
    ratio = Evidence(
        metric="timing_ratio",
        value=result.timing_ratio,
        unit="replayed / in pipeline",
        source=_where("harness", "timing_ratio"),
    )
    error = Evidence(
        metric="max_rel_error",
        value=result.max_rel_error or 0.0,
        unit="of the largest value",
        source=_where("harness", "parity"),
    )
    kind: Kind
    if result.parity == "different" or any(call.second_replay_differs for call in result.calls):
        kind, claim = (
            "replay_output_differs",
            f"The replay of {result.stage} is not faithful. {' '.join(result.unfaithful_because)}",
        )
        next_experiment = (
            "Name a call site that holds its own state under 'stages', or remove the hidden state, and run again."
        )
    elif result.is_timing_faithful is False:
        kind, claim = (
            "replay_timing_differs",
            f"The replay of {result.stage} gives the same output. {result.unfaithful_because[0]}",
        )
        next_experiment = "Use the replay for shares and kernels only; time changes in the whole pipeline."
    elif result.is_timing_faithful is None:
        kind = "replay_timing_undecided"
        speed = next((w.message for w in result.warnings if w.code == "REPLAY_SPEED_CHANGED"), None)
        claim = (
            f"The replay of {result.stage} gives the same output; whether it takes as long as in the pipeline cannot "
            f"be told: {result.timing_ratio:.2f} times, from noisy samples.{f' {speed}' if speed else ''}"
        )
        next_experiment = (
            "Run again on an idle machine with more repeats; until then trust its shares, not its durations."
        )
    else:
        kind = "replay_faithful"
        parity = "bit for bit" if result.parity == "exact" else "within tolerance"
        claim = (
            f"{result.stage} alone behaves as in the pipeline: the same output {parity}, {result.timing_ratio:.2f} "
            "times its duration."
        )
        next_experiment = "Try a change on the replay first: it takes seconds, and stands for the pipeline."
    return [
        Finding(
            kind=kind,
            rung="harness",
            stage=result.stage,
            claim=claim,
            evidence=[ratio, error],
            uncertainty="timing ratio " + _interval_text(result.timing_ratio_interval, percent=False),
            refuted_by="a replay on an idle machine that says otherwise",
            next_experiment=next_experiment,
        )
    ]


def _from_regions(result: RegionsResult, workload: Workload) -> list[Finding]:
    found = []
    residual, ratio = result.residual, result.profiled_ratio
    if residual is not None and residual.cpu_share > _CLEAR_SHARE:
        parts = {
            "Python or waiting": residual.host.python_us,
            "operator dispatch": residual.host.operator_dispatch_us,
            "operators' own work": residual.host.operator_compute_us,
            "kernel launch": residual.host.kernel_launch_us,
            "synchronization": residual.host.synchronization_us,
        }
        largest = max(parts, key=lambda name: parts[name])
        found.append(
            Finding(
                kind="outside_regions",
                rung="regions",
                claim=f"{residual.cpu_share:.0%} of the host time is outside every module; most of it is {largest}.",
                evidence=[
                    Evidence(
                        metric="residual.cpu_share",
                        value=residual.cpu_share,
                        unit="of host time",
                        source=_where("regions", "residual"),
                    ),
                    Evidence(
                        metric=largest, value=parts[largest], unit="us a run", source=_where("regions", "residual.host")
                    ),
                ],
                uncertainty="shares of profiled runs, in which Python and dispatch weigh more than in plain ones",
                refuted_by="stage timing in which the time outside every stage is small",
                next_experiment="Name the pipeline's own methods under 'stages' to see which of them holds it.",
            )
        )
    found += _device_idle(result.device_busy_ms, result.unprofiled_ms, "regions", None)
    if ratio is not None and ratio > _DISTORTION:
        found.append(
            Finding(
                kind="profiler_distorts",
                rung="regions",
                claim=f"Profiled runs took {ratio:.1f} times as long as plain ones; perhaps many operators are short.",
                evidence=[
                    Evidence(
                        metric="profiled_ratio",
                        value=ratio,
                        unit="profiled / plain",
                        source=_where("regions", "profiled_ratio"),
                    )
                ],
                uncertainty="the plain runs are those of rung 1, in the same process",
                refuted_by="a profiled run that is as fast as a plain one",
                next_experiment="Trust a region's share only where stage timing agrees; quote latency from rung 1.",
            )
        )
    return found


def _from_kernels(result: KernelsResult, workload: Workload) -> list[Finding]:
    if not result.by_operator:
        return []
    what = "kernel time" if result.kind == "kernels" else "operator time"
    # The runtime of torch.compile is no operator that one could replace.
    operators = [share for share in result.by_operator if share.name != RUNTIME_NAME] or result.by_operator
    top, leaders = operators[0], operators[:3]
    others = "".join(f", {share.name} {share.share:.0%}" for share in leaders[1:])
    block = result.by_block[0]
    found = [
        Finding(
            kind="dominant_kernels",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"In {result.stage}, {top.name} holds {top.share:.0%} of the {what}{others}; "
                f"the heaviest block is {block.name} with {block.share:.0%}."
            ),
            evidence=[
                Evidence(
                    metric=f"{share.name} share",
                    value=share.share,
                    unit=f"of {what}",
                    source=_where("kernels", "by_operator"),
                )
                for share in leaders
            ],
            uncertainty=f"{result.repeats} profiled replays of one call; shares, no latencies",
            refuted_by="another order in an unprofiled comparison with one of these replaced",
            next_experiment=(
                "The host sets the pace here, so that faster kernels win little: launch fewer of them first."
                if result.bound is not None and result.bound.verdict == "host"
                else f"Replace or fuse {top.name} in {block.name}, check the output on the replay, time the workload."
            ),
        )
    ]
    found += [*possible_win(result), *kernel_question(result)]
    return found + _device_idle(result.device_busy_ms, result.unprofiled_ms, "kernels", result.stage)


def _device_idle(busy_ms: float | None, plain_ms: float | None, rung: str, stage: str | None) -> list[Finding]:
    """The device's work from the profiled window against the duration of plain runs: profiling slows only the host."""
    if busy_ms is None or not plain_ms or busy_ms / plain_ms >= _BUSY_FRAC:
        return []
    what = "run" if stage is None else f"call of {stage}"
    source = _where(rung, "device_busy_ms")
    return [
        Finding(
            kind="device_mostly_idle",
            rung=rung,
            stage=stage,
            claim=f"The device works for {busy_ms:.3g} ms of a {what} of {plain_ms:.3g} ms: it waits for the host.",
            evidence=[
                Evidence(
                    metric="device_busy_ms / unprofiled_ms",
                    value=busy_ms / plain_ms,
                    unit="of a plain " + what,
                    source=source,
                )
            ],
            uncertainty="device work is from profiled runs, the duration from plain ones; clocks may differ",
            refuted_by=f"a plain {what} in which kernels follow each other without gaps",
            next_experiment=(
                "Take launches off the host: compile the stage (compile: {mode: reduce-overhead} in the workload) and "
                "run again."
            ),
        )
    ]


_DERIVATIONS: dict[type[RungResult], Callable[..., list[Finding]]] = {
    StagesResult: _from_stages,
    HarnessResult: _from_harness,
    RegionsResult: _from_regions,
    KernelsResult: _from_kernels,
    NcuResult: lambda result, workload: kernel_diagnosis(result),
}


def _where(rung: str, field: str) -> str:
    return f"{rung}.json: {field}"


def _interval_text(interval: Interval, *, percent: bool = True) -> str:
    if percent:
        return f"95 % interval {interval.low:.1%} to {interval.high:.1%}, runs of one process"
    return f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
