"""From the spans of a scenario's runs to its stage table."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from perfladder.instrument import Instrumentation, Site
from perfladder.stats import Interval, Samples, bootstrap_interval, summarize
from perfladder.timing.cadence import cadence_of
from perfladder.timing.generation import generation_of
from perfladder.timing.results import ScenarioTiming, StageOverlap, StageTiming
from perfladder.timing.timer import (
    NS_PER_MS,
    Call,
    Overlap,
    RunTiming,
    lies_in_own_site,
    outside_ms,
    overlap_of,
    resolve_device_times,
    self_ms,
    timed_spans,
)
from perfladder.workload import Media

if TYPE_CHECKING:
    import torch

_ROUNDED_TO_NS = 6


def scenario_timing(
    name: str, runs: list[RunTiming], state: Instrumentation, media: Media | None, device: torch.device
) -> ScenarioTiming:
    """Attribute the time of the runs to their stages, the most expensive stage first.

    On a device the cost of a stage is its time on the device's streams, which the shares, the time outside and the
    overlap are made of; without one it is host time. Self times and the time outside add up to the wall time, once
    what ran at the same time is taken off.
    """
    on_device = device.type != "cpu"
    if on_device:
        for timing in runs:
            resolve_device_times(timing)
    wall_ms = [timing.wall_ms for timing in runs]
    overlaps = [overlap_of(timing, on_device=on_device) for timing in runs]
    timed = [_stage(site, runs, overlaps, state, on_device=on_device) for site in _sites_seen(runs, state)]
    stages = sorted((stage for stage in timed if stage is not None), key=lambda stage: -stage.share)
    rest_ms = [outside_ms(timing, on_device=on_device) for timing in runs]
    return ScenarioTiming(
        name=name,
        run_start_ns=[timing.start_ns for timing in runs],
        wall_ms=Samples(launches=[wall_ms]),
        outside_ms=Samples(launches=[rest_ms]),
        outside_share=sum(rest_ms) / sum(wall_ms),
        outside_share_interval=interval_of_share(rest_ms, wall_ms),
        overlap_ms=Samples(launches=[[overlap.counted_again_ms for overlap in overlaps]]),
        overlaps=_pairs(overlaps),
        stages=stages,
        cadence=cadence_of(runs, media),
        generation=generation_of(runs, state.sites, on_device=on_device),
    )


def cold_stages_ms(timing: RunTiming) -> dict[str, float]:
    """Host time of each stage in one run, device not waited for; a recursive call counts once."""
    found: dict[str, float] = {}
    for call in timing.calls:
        if not lies_in_own_site(call):
            found[call.site.path] = found.get(call.site.path, 0.0) + call.duration_ns / NS_PER_MS
    return found


def _sites_seen(runs: list[RunTiming], state: Instrumentation) -> list[Site]:
    """The observed sites, and the marks that were met besides."""
    marks = (call.site for timing in runs for call in timing.calls if call.site.is_mark)
    return list(dict.fromkeys([*state.sites, *marks]))


def _stage(
    site: Site, runs: list[RunTiming], overlaps: list[Overlap], state: Instrumentation, *, on_device: bool
) -> StageTiming | None:
    per_run = [[call for call in timing.calls if call.site is site] for timing in runs]
    if not any(per_run):
        return None
    wall_ms = [timing.wall_ms for timing in runs]
    # A recursive call lies inside its own stage: only the outermost one counts towards the total.
    outer = [[call for call in calls if not lies_in_own_site(call)] for calls in per_run]
    own_ms = [self_ms(timing, calls, on_device=False) for timing, calls in zip(runs, per_run, strict=True)]
    device_own_ms = (
        [self_ms(timing, calls, on_device=True) for timing, calls in zip(runs, per_run, strict=True)]
        if on_device
        else None
    )
    cost_ms = device_own_ms or own_ms
    spans = [call for calls in per_run for call in timed_spans(calls)]
    return StageTiming(
        name=site.path,
        owner_type=site.owner_type,
        is_module=site.is_module and not site.phase,
        dtypes=_dtypes(site),
        aliases=[alias for alias, path in state.aliases.items() if path == site.path],
        calls_per_run=sum(not call.is_item for calls in per_run for call in calls) / len(runs),
        items_per_run=sum(call.is_item for calls in per_run for call in calls) / len(runs),
        total_ms=Samples(launches=[[sum(c.duration_ns for c in calls) / NS_PER_MS for calls in outer]]),
        self_ms=Samples(launches=[own_ms]),
        device_total_ms=Samples(launches=[[sum(c.device_ms for c in calls) for calls in outer]]) if on_device else None,
        device_self_ms=Samples(launches=[device_own_ms]) if device_own_ms else None,
        end_ms=None
        if on_device
        else Samples(launches=[[_end_ms(calls, timing) for calls, timing in zip(outer, runs, strict=True)]]),
        call_ms=summarize([call.duration_ns / NS_PER_MS for call in spans]),
        device_call_ms=summarize([call.device_ms for call in spans]) if on_device else None,
        call_samples_ms=[round(call.duration_ns / NS_PER_MS, _ROUNDED_TO_NS) for call in spans],
        overlap_ms=Samples(launches=[[overlap.by_stage_ms.get(site.path, 0.0) for overlap in overlaps]]),
        chunk_self_ms=_chunk_costs(runs, per_run, on_device=on_device),
        share=sum(cost_ms) / sum(wall_ms),
        share_interval=interval_of_share(cost_ms, wall_ms),
    )


def _dtypes(site: Site) -> list[str]:
    parameters = getattr(site.owner, "parameters", None)
    from torch import nn

    if parameters is None or not isinstance(site.owner, nn.Module):
        return []
    return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in site.owner.parameters()})


def _chunk_costs(runs: list[RunTiming], per_run: list[list[Call]], *, on_device: bool) -> Samples | None:
    """What a stage costs in each chunk of a stream after the first one, by the chunk in which its calls began."""
    costs: list[float] = []
    for timing, calls in zip(runs, per_run, strict=True):
        num_chunks = len(timing.item_end_ns)
        per_chunk = [0.0] * (num_chunks + 1)
        for call in calls:
            per_chunk[bisect_right(timing.item_end_ns, call.start_ns)] += self_ms(timing, [call], on_device=on_device)
        costs += per_chunk[1:num_chunks]
    return Samples(launches=[costs]) if costs else None


def _pairs(overlaps: list[Overlap]) -> list[StageOverlap]:
    pairs = sorted({pair for overlap in overlaps for pair in overlap.by_pair_ms})
    found = [
        StageOverlap(
            first=first,
            second=second,
            overlap_ms=Samples(launches=[[overlap.by_pair_ms.get((first, second), 0.0) for overlap in overlaps]]),
        )
        for first, second in pairs
    ]
    return sorted(found, key=lambda pair: -pair.overlap_ms.summary.mean)


def _end_ms(calls: list[Call], run: RunTiming) -> float:
    """From the start of the run to the end of the last of its calls; 0 if there was none."""
    return (max((call.end_ns for call in calls), default=run.start_ns) - run.start_ns) / NS_PER_MS


def interval_of_share(part_ms: list[float], wall_ms: list[float]) -> Interval:
    """Interval of a part's share of the wall time of the same runs."""
    return bootstrap_interval(
        lambda part, wall: part.sum(axis=-1) / wall.sum(axis=-1), part_ms, wall_ms, paired=True, in_blocks=True
    )
