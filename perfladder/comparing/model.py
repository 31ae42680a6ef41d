"""What a comparison says: the models of `comparison.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from perfladder.models import SCHEMA_VERSION, Model, ResultWarning
from perfladder.stats import Comparison, Interval
from perfladder.timing.results import StagesResult
from perfladder.workload import Metric

Verdict = Literal["faster", "slower", "same", "undecided"]
Method = Literal["interleaved", "sequential"]
Where = Literal["baseline", "candidate"]


class Side(Model):
    """One of the two versions: where it was measured, and how often."""

    label: str = Field(description="What the user named.")
    runs: list[str] = Field(description="Run directories; none where it was measured for the comparison.")
    workload: str
    commit: str | None = None
    is_dirty: bool = False
    device: str
    started_at: str | None = None
    num_launches: int = Field(description="Processes that its times come from.")
    num_runs: int = Field(description="Measured runs of the workload's own inputs, in all of them.")


class Difference(Model):
    """A field that is not the same on both sides; nested fields are dotted."""

    field: str
    baseline: JsonValue
    candidate: JsonValue


class Change(Model):
    """One time on both sides, and the verdict on it. Less is better, also where it is memory."""

    name: str
    unit: Literal["ms", "us", "bytes"]
    baseline: float = Field(description="Median of all samples of the side.")
    candidate: float = Field(description="Likewise.")
    speedup: float | None = Field(
        description="Baseline over candidate, above 1 is faster; None where a side has zeros."
    )
    interval: Interval | None = Field(
        default=None, description="Of the speedup, 95 %; None: there are too few samples."
    )
    verdict: Verdict
    same_within: float | None = Field(
        default=None, description="Relative change that the interval rules out; where the verdict is `same`."
    )
    reason: str = Field(description="The verdict in words, and what to do where it is `undecided`.")
    comparison: Comparison | None = Field(default=None, description="What the samples gave; None: nothing to compare.")

    @property
    def change(self) -> float:
        """Candidate minus baseline, in `unit`."""
        return self.candidate - self.baseline


class OneSided(Model):
    """A stage, a region or a kernel family that one side alone has."""

    name: str
    only: Where
    value: float = Field(description="Its median, or its sum, on that side.")
    unit: Literal["ms", "us"]


class ScenarioChange(Model):
    """One set of inputs: end to end, then stage by stage, the largest change first."""

    name: str
    end_to_end: Change
    first_output: Change | None = Field(default=None, description="Of a stream: from the start to its first chunk.")
    stages: list[Change] = Field(description="Own time; device time where both sides have it.")
    only_one_side: list[OneSided]


class ProfiledChange(Model):
    """Times of profiled windows: ratios of shares, no latencies; one value for each run directory of a side."""

    rung: Literal["regions", "kernels"]
    what: str = Field(description="What was profiled, in words.")
    rows: list[Change]
    only_one_side: list[OneSided]


class KernelMove(Model):
    """A kernel, or on a CPU an operator, by all its launches in one replayed call; 0 us: it is not there."""

    name: str
    family: str
    baseline_us: float
    candidate_us: float
    baseline_count: int
    candidate_count: int

    @property
    def change_us(self) -> float:
        """Candidate minus baseline."""
        return self.candidate_us - self.baseline_us


class CountChange(Model):
    """A count that is not the same on both sides: no noise is in it."""

    name: str
    baseline: float
    candidate: float


class RunComparison(Model):
    """Two versions of the same work, compared."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    created_at: str
    workload: str
    method: Method
    baseline: Side
    candidate: Side
    min_effect: float = Field(description="Relative change below which none counts.")
    aa_noise_floor: float | None = Field(
        default=None, description="Relative; how far the baseline was from itself, where that was measured."
    )
    metric_name: Metric
    verdict: Verdict = Field(description="That of the metric.")
    reason: str
    next_step: str | None = Field(default=None, description="What to do where the verdict is `undecided`.")
    metric: Change
    configuration: list[Difference] = Field(description="What is compared, besides the environment.")
    environment: list[Difference]
    protocol: list[Difference]
    scenarios: list[ScenarioChange]
    counts: list[CountChange] = Field(description="Counts that differ: graph breaks, calls, kernels.")
    regions: ProfiledChange | None = None
    families: ProfiledChange | None = None
    kernels_moved: list[KernelMove] = Field(default=[], description="The largest changes first.")
    warnings: list[ResultWarning] = []
    measured: dict[Where, StagesResult] = Field(
        default={}, description="With all samples, where the sides were measured for the comparison."
    )

    @property
    def is_slower(self) -> bool:
        """Whether the metric, or a scenario end to end, is slower for certain."""
        return "slower" in {self.metric.verdict, *(scenario.end_to_end.verdict for scenario in self.scenarios)}

    @property
    def has_more_graph_breaks(self) -> bool:
        """Whether torch.compile broke graphs, or gave up recompiling, more often than in the baseline."""
        names = ("graph_breaks", "limit_hits")
        return any(count.name in names and count.candidate > count.baseline for count in self.counts)
