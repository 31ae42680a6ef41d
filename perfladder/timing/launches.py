"""Results of several process launches as one: samples side by side, and what rests on them made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfladder.models import Model
from perfladder.stats import Samples, Summary, summarize
from perfladder.timing.results import CadenceTiming, ScenarioTiming, StagesResult, StageTiming
from perfladder.timing.scenario import interval_of_share

_RAW = "_samples_ms"
_PEAKS = ("peak_device_allocated_bytes", "peak_device_reserved_bytes", "peak_host_rss_bytes")


def merge_launches(results: Sequence[StagesResult]) -> StagesResult:
    """The first launch's result with the samples of all; a stage that not every launch has seen keeps what it has.

    Peaks are the largest of any launch; warnings are each told once. What is not a sample, such as the first call or
    the machine's state, is that of the first launch.
    """
    merged: StagesResult = _merge(list(results))
    warnings = {(w.code, w.message): w for result in results for w in result.warnings}
    peaks = {name: _largest([getattr(result, name) for result in results]) for name in _PEAKS}
    scenarios = [_with_shares(scenario, _run_starts(results, scenario.name)) for scenario in merged.scenarios]
    return merged.model_copy(update={"scenarios": scenarios, "warnings": list(warnings.values()), **peaks})


def _merge(values: list[Any]) -> Any:
    """Values of one place in each launch: samples are joined, models and lists of named models are entered."""
    first = values[0]
    if isinstance(first, Samples):
        return Samples(launches=[launch for value in values if value is not None for launch in value.launches])
    if isinstance(first, Model):
        return _merge_models([value for value in values if type(value) is type(first)])
    if isinstance(first, list) and first and hasattr(first[0], "name"):
        by_name = [{item.name: item for item in value} for value in values]
        return [_merge([names[item.name] for names in by_name if item.name in names]) for item in first]
    return first


def _merge_models(models: list[Any]) -> Any:
    """The first, with its samples joined; of `chunk_samples_ms`, a plain list, the summary `chunk_ms` is made anew."""
    merged = {name: _merge([getattr(model, name) for model in models]) for name in type(models[0]).model_fields}
    for name in merged:
        if name.endswith(_RAW):
            merged[name] = [value for model in models for value in getattr(model, name)]
            if merged[name]:
                merged[name.removesuffix(_RAW) + "_ms"] = summarize(merged[name])
    if isinstance(models[0], CadenceTiming):
        merged |= _cadence_verdict(models, merged["chunk_ms"])
    return models[0].model_copy(update=merged)


def _cadence_verdict(launches: list[CadenceTiming], chunk_ms: Summary) -> dict[str, int | float | None]:
    """Late chunks and stalls of all launches, and the headroom of all their chunks."""
    first = launches[0]
    if first.media_ms_per_chunk is None or first.margin_ms is None:
        return {}
    return {
        "num_late_chunks": sum(launch.num_late_chunks or 0 for launch in launches),
        "num_stalls": sum(launch.num_stalls or 0 for launch in launches),
        "headroom_ms": first.media_ms_per_chunk - first.margin_ms - chunk_ms.p95,
    }


def _run_starts(results: Sequence[StagesResult], scenario: str) -> list[int]:
    return [
        ns for result in results for timing in result.scenarios if timing.name == scenario for ns in timing.run_start_ns
    ]


def _with_shares(scenario: ScenarioTiming, run_start_ns: list[int]) -> ScenarioTiming:
    """Shares of the joined samples, and the order of the stages by them."""
    stages = [_with_share(stage, scenario.wall_ms) for stage in scenario.stages]
    return scenario.model_copy(
        update={
            "run_start_ns": run_start_ns,
            "stages": sorted(stages, key=lambda stage: -stage.share),
            "outside_share": sum(scenario.outside_ms.values) / sum(scenario.wall_ms.values),
            "outside_share_interval": interval_of_share(scenario.outside_ms.values, scenario.wall_ms.values),
        }
    )


def _with_share(stage: StageTiming, wall_ms: Samples) -> StageTiming:
    cost_ms = stage.cost_ms.values
    if len(cost_ms) != len(wall_ms.values):
        return stage
    update = {"share": sum(cost_ms) / sum(wall_ms.values), "share_interval": interval_of_share(cost_ms, wall_ms.values)}
    return stage.model_copy(update=update)


def _largest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
