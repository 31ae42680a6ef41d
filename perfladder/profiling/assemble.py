"""From profiled runs to `ProfileData`: pure functions, apart from asking the wrappers for their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import numpy as np

import perfladder
from perfladder.managed import managed_state
from perfladder.models import ResultWarning
from perfladder.profiling.data import (
    Config,
    Input,
    KeyAverages,
    ManagedRegion,
    MarkedRegion,
    ProfileData,
    Profiler,
    Region,
    RegionShare,
    RegionTimes,
    ResidualShare,
    Run,
    Scenario,
    Summary,
    Target,
    Timing,
    Unprofiled,
    UntunedRegion,
)
from perfladder.profiling.discover import AOT, JIT, Part, find_parts
from perfladder.profiling.warnings import ProfileWarningCode, list_names, warn
from perfladder.profiling.window import ProfiledRuns
from perfladder.trace.labels import MARK_KIND
from perfladder.trace.regions import RegionRow, RunAttribution

_MANAGED_KINDS: Final[dict[str, Literal["aot_managed_module", "jit_managed_module"]]] = {
    AOT: "aot_managed_module",
    JIT: "jit_managed_module",
}


def assemble(
    obj: Any,
    profiled: ProfiledRuns,
    *,
    config: Config,
    inputs: dict[str | None, Input],
    unprofiled_us: dict[str | None, list[float]],
    warnings: Sequence[ResultWarning],
) -> ProfileData:
    """Make the profile's data.

    Args:
        obj: The profiled object; its wrappers are asked for their state now.
        profiled: The runs.
        config: How often the work was run.
        inputs: By scenario; None is the only one if there are no scenarios.
        unprofiled_us: Wall time of the plain runs by scenario.
        warnings: What was found before the runs.
    """
    runs = [
        _run(run, wall_us, name)
        for run, wall_us, name in zip(profiled.report.runs, profiled.wall_time_us, profiled.call_names, strict=True)
    ]
    regions, lost = _regions(obj, profiled)
    averages = profiled.key_averages()
    scenarios = {
        name: Scenario(input=given, summary=_summarize([r for r in runs if r.scenario == name], [unprofiled_us[name]]))
        for name, given in inputs.items()
        if name is not None
    }
    return ProfileData(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        perfladder_version=perfladder.__version__,
        config=config,
        target=Target(type=f"{type(obj).__module__}.{type(obj).__qualname__}"),
        input=next(iter(inputs.values())),
        runs=runs,
        profiler=Profiler(
            activities=[activity.upper() for activity in profiled.activities],
            key_averages=KeyAverages.model_validate(averages),
            num_events=profiled.trace.num_events,
            analysis_s=profiled.analysis_s,
            had_profiled_before=not profiled.is_first,
        ),
        regions=regions,
        warnings=[*warnings, *lost, *profiled.warnings],
        summary=_summarize(runs, list(unprofiled_us.values())),
        scenarios=scenarios,
        region_tree=list(profiled.report.region_tree),
    )


def _run(run: RunAttribution, wall_us: float, scenario: str | None) -> Run:
    return Run(
        run_index=run.run_index,
        scenario=scenario,
        timing=Timing(wall_time_us=wall_us, cpu_time_us=run.cpu_time_us, device_time_us=run.device_time_us),
        regions=[_region_times(row) for row in run.regions],
        residual=run.residual,
        host=run.host,
        device=run.device,
    )


def _region_times(row: RegionRow) -> RegionTimes:
    return RegionTimes(
        region_id=row.region_id,
        calls=row.calls,
        cpu_time_us=row.cpu_time_us,
        cpu_time_fraction=row.cpu_time_fraction,
        device_time_us=row.device_time_us,
        device_time_fraction=row.device_time_fraction,
        self_cpu_time_us=row.self_cpu_time_us,
        wall_time_us=row.cpu_time_us + row.other_threads_cpu_time_us,
        device_span_us=row.device_span_us,
    )


def _regions(obj: Any, profiled: ProfiledRuns) -> tuple[list[Region], list[ResultWarning]]:
    """Describe each region that some run called, and warn of wrappers that are gone."""
    rows: dict[str, list[RegionRow]] = {}
    for run in profiled.report.runs:
        for row in run.regions:
            rows.setdefault(row.region_id, []).append(row)
    there = {id(part.module) for part in find_parts(obj) if part.managed is not None}
    paths = {f"{kind}:{name}": path for path, (kind, name) in profiled.sites.labels.items()}
    regions: list[Region] = []
    unknown = []
    for region_id, found in rows.items():
        walls = [row.cpu_time_us + row.other_threads_cpu_time_us for row in found]
        peak = profiled.peaks.get(paths.get(region_id, ""))
        part = profiled.sites.owner.get(region_id)
        common: dict[str, Any] = {
            "id": region_id,
            "name": found[0].name,
            "module_type": part.module_type if part else "",
            "wall_time_p50_us": float(np.median(walls)),
            "wall_time_p95_us": float(np.percentile(walls, 95)),
            "peak_memory_bytes": peak.peak_bytes if peak else None,
            "peak_memory_increase_bytes": peak.increase_bytes if peak else None,
        }
        if found[0].kind == MARK_KIND:
            regions.append(MarkedRegion(kind="marked_stage", **common))
            continue
        if found[0].kind not in _MANAGED_KINDS:
            regions.append(UntunedRegion(kind="untuned_module", **common))
            continue
        state = _state(part, there)
        if state == "unknown":
            unknown.append(region_id)
        regions.append(ManagedRegion(kind=_MANAGED_KINDS[found[0].kind], wrapper_state=state, **common))
    if not unknown:
        return regions, []
    message = f"No wrapper gives the state of {list_names(unknown)} any more."
    return regions, [warn(ProfileWarningCode.UNREGISTERED_AOT_REGION, message)]


def _state(part: Part | None, there: set[int]) -> Literal["tuned", "recording", "passthrough", "unknown"]:
    """Return a wrapper's state as of now, `unknown` if the object no longer holds it."""
    now = managed_state(part.module) if part is not None and id(part.module) in there else None
    return now.state if now else "unknown"


def _summarize(runs: list[Run], unprofiled_us: list[list[float]]) -> Summary:
    warm = [wall for walls in unprofiled_us for wall in (walls[1:] if len(walls) > 1 else walls)]
    plain_us = float(np.median(warm)) if warm else None
    profiled_us = float(np.median([run.timing.wall_time_us for run in runs]))
    residuals = [run.residual for run in runs]
    return Summary(
        num_runs=len(runs),
        unprofiled=Unprofiled(
            wall_time_us=[wall for walls in unprofiled_us for wall in walls], wall_time_p50_us=plain_us
        ),
        profiled_wall_time_p50_us=profiled_us,
        profiled_ratio=profiled_us / plain_us if plain_us else None,
        regions=_shares(runs),
        residual=ResidualShare(
            cpu_time_p50_us=float(np.median([r.cpu_time_us for r in residuals])),
            cpu_time_fraction=float(np.mean([r.cpu_time_fraction for r in residuals])),
            device_time_p50_us=_known(np.median, [r.device_time_us for r in residuals]),
            device_time_fraction=_known(np.mean, [r.device_time_fraction for r in residuals]),
        ),
    )


def _shares(runs: list[Run]) -> list[RegionShare]:
    rows: dict[str, list[RegionTimes]] = {}
    for run in runs:
        for row in run.regions:
            rows.setdefault(row.region_id, []).append(row)
    shares = [
        RegionShare(
            region_id=region_id,
            num_runs=len(found),
            calls_per_run=sum(row.calls for row in found) / len(runs),
            cpu_time_p50_us=float(np.median([row.cpu_time_us for row in found])),
            cpu_time_fraction=sum(row.cpu_time_fraction for row in found) / len(runs),
            device_time_p50_us=_known(np.median, [row.device_time_us for row in found]),
            device_time_fraction=_known(
                lambda values: sum(values) / len(runs), [r.device_time_fraction for r in found]
            ),
        )
        for region_id, found in rows.items()
    ]
    return sorted(shares, key=lambda share: -(share.device_time_fraction or share.cpu_time_fraction))


def _known(average: Callable[[Any], Any], values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(average(there)) if there and len(there) == len(values) else None
