"""The models behind `PerformanceProfile.data`. Times are microseconds, fractions run from 0 to 1, None is unknown."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perfladder.managed import WrapperState
from perfladder.models import Model, ResultWarning
from perfladder.trace.operators import OperatorRow
from perfladder.trace.regions import RegionNode, Residual
from perfladder.trace.residual import HostSplit, IdleSplit


class Config(Model):
    """How often the work was run."""

    warmup_runs: int
    measured_runs: int
    uses_inference_function: bool


class Target(Model):
    """What was profiled."""

    type: str


class Input(Model):
    """How the work was called: the number of positional arguments and the names of the others."""

    args_count: int
    kwargs: list[str]


class Timing(Model):
    """One profiled run by the host's clock and by the profiler. A profiled run is slower than a plain one."""

    wall_time_us: float
    cpu_time_us: float
    device_time_us: float | None


class RegionTimes(Model):
    """One region of a run; all its calls are one row.

    `device_time_us` is the sum of the kernels launched inside, `device_span_us` their stretch on the device's timeline,
    gaps included. `wall_time_us` also counts calls on other recorded threads, which are in no fraction.
    """

    region_id: str
    calls: int
    cpu_time_us: float
    cpu_time_fraction: float
    device_time_us: float | None
    device_time_fraction: float | None
    self_cpu_time_us: float
    wall_time_us: float
    device_span_us: float | None


class Run(Model):
    """One measured run: flat regions whose fractions and the residual's add up to 1, and what the time is made of."""

    run_index: int
    scenario: str | None
    timing: Timing
    regions: list[RegionTimes]
    residual: Residual
    host: HostSplit
    device: IdleSplit | None


class _Region(Model):
    id: str
    name: str
    module_type: str
    wall_time_p50_us: float = Field(description="Of a run's calls together, over the runs that call it.")
    wall_time_p95_us: float
    peak_memory_bytes: int | None = Field(description="Most that was allocated on the device during a call.")
    peak_memory_increase_bytes: int | None = Field(description="Of that, above what was allocated at the call's start.")


class ManagedRegion(_Region):
    """A module that a wrapper of ours manages, with the wrapper's state when the report was made."""

    kind: Literal["aot_managed_module", "jit_managed_module"]
    wrapper_state: WrapperState


class UntunedRegion(_Region):
    """A module, or a method of one, that nothing of ours has replaced."""

    kind: Literal["untuned_module"]


class MarkedRegion(_Region):
    """A stage that user code marks with `perfladder.stage`: what no module inside it covers."""

    kind: Literal["marked_stage"]


Region = Annotated[ManagedRegion | UntunedRegion | MarkedRegion, Field(discriminator="kind")]


class KeyAverages(Model):
    """The operators with the largest totals over all measured runs."""

    cpu_time_total: list[OperatorRow]
    device_time_total: list[OperatorRow]


class Profiler(Model):
    """What the profiler recorded."""

    activities: list[str]
    key_averages: KeyAverages
    num_events: int
    analysis_s: float
    had_profiled_before: bool


class Unprofiled(Model):
    """The warm-up runs: plain ones, timed before the profiler started. Only these are latencies."""

    wall_time_us: list[float]
    wall_time_p50_us: float | None = Field(description="Without the first run if there are more, since it is cold.")


class RegionShare(Model):
    """One region over several runs: medians, and the mean of its fractions, so that these still add up to 1."""

    region_id: str
    num_runs: int
    calls_per_run: float
    cpu_time_p50_us: float
    cpu_time_fraction: float
    device_time_p50_us: float | None
    device_time_fraction: float | None


class ResidualShare(Model):
    """The residual over several runs."""

    cpu_time_p50_us: float
    cpu_time_fraction: float
    device_time_p50_us: float | None
    device_time_fraction: float | None


class Summary(Model):
    """Several runs together."""

    num_runs: int
    unprofiled: Unprofiled
    profiled_wall_time_p50_us: float
    profiled_ratio: float | None = Field(description="Median profiled over median unprofiled wall time.")
    regions: list[RegionShare]
    residual: ResidualShare


class Scenario(Model):
    """One named input."""

    input: Input
    summary: Summary


class ProfileData(Model):
    """The whole profile."""

    schema_version: Literal[1] = 1
    created_at: str
    perfladder_version: str
    config: Config
    target: Target
    input: Input
    runs: list[Run]
    profiler: Profiler
    regions: list[Region]
    warnings: list[ResultWarning]
    summary: Summary
    scenarios: dict[str, Scenario]
    region_tree: list[RegionNode]
