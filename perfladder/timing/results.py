"""What rung 1 reports: the models of `stages.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from perfladder.environment import Snapshot
from perfladder.models import Model
from perfladder.rungs.base import RungResult
from perfladder.stats import Interval, Samples, Summary
from perfladder.steady import Bimodality, Drift, WarmupEnd
from perfladder.timing.cold_start import ColdStart
from perfladder.timing.concurrency import ConcurrencyLevel
from perfladder.timing.energy import Energy
from perfladder.timing.ranks import RankTable, merge_ranks
from perfladder.timing.throughput import Saturation, Throughput
from perfladder.workload import Metric

INTERVAL_BASIS = "runs of one process, resampled in blocks of consecutive ones"
"""What intervals of metric and shares rest on: they tell how exact this process's number is, not the next one's."""


class StageMemory(Model):
    """Peak memory while a stage ran, from runs of their own; what is inside a stage counts for it too.

    On an accelerator it is the allocator's, without one the resident memory of the process.
    """

    peak_bytes: int
    increase_bytes: int = Field(description="The most that a call added to what was there when it began.")
    self_peak_bytes: int = Field(description="Peak while no stage inside it ran.")
    reserved_bytes: int | None = Field(default=None, description="Peak of what the allocator held from the driver.")


class MemoryGrowth(Model):
    """Whether memory grows from run to run, as a leak does."""

    is_growing: bool
    bytes_per_run: float | None = Field(default=None, description="Slope of the Theil-Sen line over the runs.")
    reason: str


class HostMemory(Model):
    """Resident memory of the process and all below it, seen by a thread that looks now and then in extra runs."""

    peak_process_bytes: int
    peak_tree_bytes: int = Field(description="Pages that processes share are counted in each.")
    num_processes: int
    num_looks: int
    look_us: float = Field(description="What one look cost.")


class Steadiness(Model):
    """Whether the runs were alike."""

    warmup: WarmupEnd | None = None
    drift: Drift
    bimodality: Bimodality


class Compilations(Model):
    """What torch.compile did in some runs."""

    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    limit_hits: int = Field(default=0, description="Functions that were recompiled too often and run uncompiled.")
    seconds: float = 0.0


class StageTiming(Model):
    """One stage over all measured runs. Self time is without the stages inside it; all samples are one a run."""

    name: str
    owner_type: str
    is_module: bool = Field(
        default=False, description="Whether the call site is a module, and no method or phase of one."
    )
    dtypes: list[str] = Field(default=[], description="Of its owner's parameters, where that is a module.")
    aliases: list[str] = []
    calls_per_run: float
    items_per_run: float = Field(
        default=0.0, description="Resumptions of a generator: its items, and once more to its end."
    )
    total_ms: Samples
    self_ms: Samples
    device_total_ms: Samples | None = None
    device_self_ms: Samples | None = None
    end_ms: Samples | None = Field(
        default=None, description="On a CPU: from the start of the run to the end of the stage's last call in it."
    )
    call_ms: Summary = Field(description="Host time of single calls, or of the resumptions of a generator.")
    device_call_ms: Summary | None = None
    call_samples_ms: list[float] = Field(default=[], description="The raw samples of `call_ms`.")
    overlap_ms: Samples | None = Field(
        default=None,
        description="Of the stage's own time, that in which another stage ran on another thread or stream.",
    )
    chunk_self_ms: Samples | None = Field(default=None, description="Cost in each streamed chunk after the first.")
    memory: StageMemory | None = None
    share: float
    share_interval: Interval

    @property
    def cost_ms(self) -> Samples:
        """The samples that the shares come from: device time where the stage used a device, else host time."""
        return self.device_self_ms or self.self_ms


class StageOverlap(Model):
    """Two stages that ran at once, on different threads, tasks or streams; both names are one stage's if it did so."""

    first: str
    second: str
    overlap_ms: Samples


class GenerationTiming(Model):
    """Tokens of a model's `generate`; a step makes one token of each sequence in the batch."""

    model: str = Field(description="Path of the model on the target; empty for the target itself.")
    generations_per_run: float
    steps_per_generation: float
    first_token_ms: Samples = Field(description="From the call of `generate` to the first token; one a generation.")
    prefill_ms: Samples = Field(description="The model's call that reads the prompt.")
    token_ms: Summary | None = Field(description="Time for each later token; None if there was none.")
    token_samples_ms: list[float] = Field(default=[], description="The raw samples of `token_ms`, in order.")


class CadenceTiming(Model):
    """Arrival of streamed chunks; latency of a chunk counts from the chunk before it (the first from the start).

    Where nothing is streamed but the workload says what a chunk is, each call is one chunk.
    """

    media_ms_per_chunk: float | None
    margin_ms: float | None
    chunks_per_run: float
    first_chunk_ms: Samples
    chunk_ms: Summary
    chunk_samples_ms: list[float] = Field(default=[], description="The raw samples of `chunk_ms`, in order.")
    num_late_chunks: int | None
    headroom_ms: float | None
    num_stalls: int | None = Field(
        default=None,
        description="Chunks not there when the one before had been played, a viewer starting at the first.",
    )


class MetricValue(Model):
    """The metric that matters, as this run has it."""

    name: Metric
    value: float
    unit: Literal["ms", "items/s", "bytes"]
    interval: Interval | None = None
    interval_basis: str | None = Field(default=None, description="What the interval speaks for.")


class ScenarioTiming(Model):
    """End to end and stage by stage, for one set of inputs."""

    name: str
    run_start_ns: list[int] = Field(
        default=[], description="When each run began, on the machine's monotonic clock: one for all ranks of a run."
    )
    wall_ms: Samples
    outside_ms: Samples
    outside_share: float
    outside_share_interval: Interval
    overlap_ms: Samples | None = Field(
        default=None, description="Self times and the time outside, added up, exceed the wall time by this much."
    )
    overlaps: list[StageOverlap] = []
    stages: list[StageTiming]
    cadence: CadenceTiming | None = None
    generation: GenerationTiming | None = None
    steadiness: Steadiness | None = None


class Observed(Model):
    """What the runs showed about the work that the workload file does not say."""

    output_type: str
    output_shapes: dict[str, list[int]]
    num_items: int | None
    stage_calls: dict[str, float]
    is_compile_warm: bool
    are_caches_warm: bool
    synchronization_points: list[str]


class StagesResult(RungResult):
    """Stage timing of the workload; `scenarios[0]` is the workload's own inputs."""

    rung: str = "stages"
    metric: MetricValue | None = None
    dominating: str | None = None
    dominating_by: str | None = Field(default=None, description="The measure by which it dominates.")
    first_call_ms: float | None = None
    first_call_stages_ms: dict[str, float] = Field(
        default={},
        description="Host time of each stage in the first call; empty where something is compiled, which observing it "
        "would change.",
    )
    warmup_ms: list[float] = []
    scenarios: list[ScenarioTiming] = []
    overhead_ratio: float | None = None
    overhead_ratio_interval: Interval | None = None
    num_overhead_pairs: int = Field(default=0, description="Bare and observed runs in turn that the ratio rests on.")
    compilations: dict[str, Compilations] = Field(
        default={}, description="In the first call, the warm-up and the measured runs."
    )
    peak_device_allocated_bytes: int | None = None
    peak_device_reserved_bytes: int | None = None
    peak_host_rss_bytes: int | None = None
    host_memory: HostMemory | None = None
    device_memory_growth: MemoryGrowth | None = None
    host_memory_growth: MemoryGrowth | None = None
    observed: Observed | None = None
    snapshot_before: Snapshot | None = Field(default=None, description="Load and clocks just before the first run.")
    snapshot_after: Snapshot | None = Field(default=None, description="The same just after the last measured run.")
    throughput: list[Throughput] = Field(default=[], description="One entry for each scenario, the default first.")
    saturation: Saturation | None = Field(default=None, description="Of the sweep.")
    concurrency: list[ConcurrencyLevel] = []
    cold_start: ColdStart | None = None
    energy: Energy | None = None
    ranks: RankTable | None = Field(
        default=None, description="Where there are several ranks: each of them. All else here is then of the whole job."
    )

    @classmethod
    def of_ranks(cls, results: Sequence[StagesResult]) -> StagesResult:
        """What all ranks saw, as one job: a run takes as long as its slowest rank."""
        return merge_ranks(results)

    @property
    def default(self) -> ScenarioTiming:
        """Timing of the workload's own inputs."""
        return self.scenarios[0]
