"""Whether the measured runs were alike, and how warm-up is extended until they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfladder.models import ResultWarning
from perfladder.steady import WarmupEnd, find_bimodality, find_drift, warmup_end
from perfladder.timing.results import Steadiness
from perfladder.timing.timer import RunTiming

_MIN_SAMPLES = 10


def settle(
    warmup_ms: list[float],
    runs: list[RunTiming],
    *,
    limit: int,
    measure_more: Callable[[int], list[RunTiming]],
    agreed: Callable[[float], float] = lambda value: value,
) -> tuple[list[float], list[RunTiming], WarmupEnd | None]:
    """Extend the warm-up by its rule: what `steady.warmup_end` calls warm-up among the measured runs is warm-up, and
    as many runs are measured anew, until none is left or the warm-up is `limit` runs long. With ranks, `agreed` makes
    the number of runs the same on all.

    Returns:
        The warm-up with what joined it, the measured runs, and where warm-up ended; None with too few runs to tell.
    """
    while True:
        series = [*warmup_ms, *(timing.wall_ms for timing in runs)]
        if len(series) < _MIN_SAMPLES or min(series) <= 0:
            return warmup_ms, runs, None
        end = warmup_end(series, limit=max(limit, len(warmup_ms)))
        num_early = int(agreed(max(0, end.index - len(warmup_ms)) if end.is_steady else 0))
        if num_early == 0:
            return warmup_ms, runs, end
        early, kept = runs[:num_early], runs[num_early:]
        warmup_ms = [*warmup_ms, *(timing.wall_ms for timing in early)]
        runs = [*kept, *measure_more(num_early)]


def steadiness_of(wall_ms: Sequence[float], warmup: WarmupEnd | None) -> Steadiness | None:
    """Judge a series of measured runs; None where a run took no time on the clock."""
    if min(wall_ms) <= 0:
        return None
    return Steadiness(warmup=warmup, drift=find_drift(wall_ms), bimodality=find_bimodality(wall_ms))


def steadiness_warnings(name: str, steadiness: Steadiness | None) -> list[ResultWarning]:
    """What in the series itself is a reason to doubt it."""
    if steadiness is None:
        return []
    where = "" if name == "default" else f"Scenario {name}: "
    warnings = []
    if steadiness.warmup is not None and not steadiness.warmup.is_steady:
        message = f"{where}The runs never became steady. {steadiness.warmup.reason}"
        warnings.append(ResultWarning(code="WARMUP_NOT_OVER", message=message))
    if steadiness.drift.is_drifting:
        message = f"{where}The measured runs drift. {steadiness.drift.reason}"
        warnings.append(ResultWarning(code="SAMPLES_DRIFT", message=message))
    if steadiness.bimodality.is_bimodal:
        message = f"{where}The measured runs lie on two levels. {steadiness.bimodality.reason}"
        warnings.append(ResultWarning(code="SAMPLES_BIMODAL", message=message))
    return warnings
