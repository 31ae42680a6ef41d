"""What a finding is: a claim that a reader can check."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfladder.models import Model

Kind = Literal[
    "dominant_stage",
    "outside_dominates",
    "no_dominant_stage",
    "cadence_met",
    "cadence_missed",
    "peak_memory_stage",
    "memory_grows",
    "memory_capacity",
    "wider_dtype",
    "compile_churn",
    "host_bound_synchronization",
    "host_bound_dispatch",
    "host_bound_python",
    "device_mostly_idle",
    "transfer_bound",
    "communication_bound",
    "outside_regions",
    "other_threads",
    "replay_faithful",
    "replay_timing_differs",
    "replay_timing_undecided",
    "replay_output_differs",
    "not_replayable",
    "device_bound",
    "dominant_kernels",
    "largest_possible_win",
    "layout_conversions",
    "fusable_operators",
    "kernel_question",
    "kernel_diagnosis",
    "profiler_distorts",
    "throughput_saturated",
    "throughput_grows",
    "concurrency_serialized",
    "concurrency_fails",
]


class Evidence(Model):
    """One number that a finding rests on, and where it stands."""

    metric: str
    value: float
    unit: str
    source: str


class Finding(Model):
    """A claim with its evidence, its uncertainty, what would refute it, and the smallest next experiment."""

    kind: Kind
    rung: str
    claim: str
    stage: str | None = None
    evidence: list[Evidence]
    uncertainty: str
    refuted_by: str
    next_experiment: str
    next_command: str | None = Field(
        default=None, description="The next experiment as a command of perfladder, where there is one."
    )
