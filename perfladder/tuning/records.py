"""What is known of a candidate: the evidence behind a decision, as it is stored and reported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from perfladder.models import SCHEMA_VERSION, Model
from perfladder.stats import Comparison
from perfladder.tuning.correctness import Correctness
from perfladder.tuning.measure import Timing

Status = Literal["kept", "rejected", "not_applicable", "failed"]


class Measurement(Model):
    """One batch size, candidate against the plain module in turns."""

    batch_size: int
    baseline_ms: list[float] = Field(description="Samples of the plain module, in order.")
    candidate_ms: list[float]
    baseline_p50_ms: float
    candidate_p50_ms: float
    throughput_items_per_s: float
    baseline_throughput_items_per_s: float
    comparison: Comparison

    @classmethod
    def of(cls, timing: Timing) -> Measurement:
        """A timing as it is stored."""
        return cls(
            batch_size=timing.batch_size,
            baseline_ms=timing.baseline_ms,
            candidate_ms=timing.candidate_ms,
            baseline_p50_ms=timing.baseline_p50_ms,
            candidate_p50_ms=timing.candidate_p50_ms,
            throughput_items_per_s=timing.throughput,
            baseline_throughput_items_per_s=timing.baseline_throughput,
            comparison=timing.comparison,
        )


class CorrectnessRecord(Model):
    """How a candidate's outputs compare with those of the plain module."""

    num_cases: int = Field(description="Calls compared: samples, and the least, preferred and largest sizes.")
    max_abs_error: float
    max_rel_error: float = Field(description="Of the largest magnitude of each tensor.")
    quality: float | None = Field(default=None, description="The worst value of the gate's metric.")
    gate: str | None = Field(default=None, description="Metric and least value; None: tolerances by dtype.")
    tolerances: dict[str, float] = {}

    @classmethod
    def of(cls, found: Correctness, gate: str | None, tolerances: dict[str, float]) -> CorrectnessRecord:
        """What was found, with what it was held against."""
        return cls(
            num_cases=found.num_cases,
            max_abs_error=found.max_abs_error,
            max_rel_error=found.max_rel_error,
            quality=found.quality,
            gate=gate,
            tolerances={} if gate else tolerances,
        )


class CandidateRecord(Model):
    """One backend on one graph."""

    schema_version: int = SCHEMA_VERSION
    backend: str = Field(description="Its name, as archives know it.")
    description: str = Field(description="With the options that differ from their defaults.")
    config: dict[str, JsonValue]
    status: Status
    reason: str | None = None
    is_reused: bool = Field(default=False, description="From an earlier tuning of the same thing, not measured anew.")
    build_s: float | None = Field(default=None, description="The build in this process, first runs included.")
    trial_s: float | None = Field(default=None, description="The first build, in a process of its own.")
    peak_host_rss_bytes: int | None = Field(default=None, description="Of that process.")
    log_file: str | None = Field(
        default=None, description="What its builds printed, `build.log` in their folder; None: nothing was built."
    )
    details: dict[str, JsonValue] = {}
    correctness: CorrectnessRecord | None = None
    measurements: list[Measurement] = []


class DecisionRecord(Model):
    """What was chosen for one graph, and why."""

    schema_version: int = SCHEMA_VERSION
    strategy: str
    strategy_description: str
    selected: str = Field(description="Description of the backend; 'eager' is the plain module.")
    reason: str
    batch_size: int | None = Field(default=None, description="At which the choice was made.")
    speedup: float | None = None
    candidates: list[CandidateRecord]
