"""What `perfladder tune` found: what was tried, and what the choice does to the whole workload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfladder.models import SCHEMA_VERSION, Model
from perfladder.stats import Comparison, Samples
from perfladder.tuning.tune_request import TuneRequest


class TriedCandidate(Model):
    """One backend on one graph; the report has its samples."""

    description: str = Field(description="The backend, with the options that are not their defaults.")
    status: Literal["kept", "rejected", "not_applicable", "failed"]
    reason: str | None
    is_reused: bool = Field(description="From an earlier tuning of the same thing, not measured anew.")
    plain_p50_ms: float | None
    tuned_p50_ms: float | None
    comparison: Comparison | None = Field(description="With the plain module; None: it was not timed.")
    max_rel_error: float | None = Field(description="Of the module's outputs; None: they were not compared.")
    quality: float | None
    build_s: float | None
    trial_s: float | None
    log_file: str | None = Field(default=None, description="What its builds printed; None: nothing was built.")


class TunedGraph(Model):
    """One form of call of a module."""

    name: str
    inputs: list[str]
    strategy: str
    backends: list[str]
    selected: str | None = Field(description="The backend; `eager` is the plain module; None: nothing was decided.")
    reason: str | None
    candidates: list[TriedCandidate]


class TunedModule(Model):
    """One module that was to be tuned."""

    path: str = Field(description="On the target; empty for the target itself.")
    name: str
    module_type: str
    share: float | None = Field(description="Of the whole time; None: the module was named, not chosen.")
    error: str | None = Field(description="Why it stays as it is.")
    graphs: list[TunedGraph]


class TunedScheduler(Model):
    """One scheduler that was to take its timesteps from the host."""

    path: str
    scheduler_type: str
    status: Literal["kept", "rejected", "not_applicable"]
    reason: str
    num_served: int = Field(default=0, description="Steps of a call whose timestep came from the host.")
    comparison: Comparison | None = Field(
        default=None, description="With the plain scheduler, of the whole workload with its tuned modules."
    )


class OutputComparison(Model):
    """The whole output with the chosen backends, against that of the plain modules."""

    is_right: bool | None = Field(description="None: two plain calls differ already, so that nothing can be said.")
    reason: str | None
    max_abs_error: float
    max_rel_error: float = Field(description="Of the largest magnitude of each tensor.")
    quality: float | None = Field(
        description="Of the gate's metric; None: there is no gate, or nothing differs that it could measure."
    )
    gate: str | None = Field(description="Metric and least value; None: tolerances by dtype.")
    not_compared: list[str] = Field(description="Parts of the output that cannot be compared.")


class BreakEven(Model):
    """After how many calls of the workload the tuning has paid for itself."""

    saved_ms_per_call: float | None
    build_s: float = Field(description="Builds and trials of what was chosen.")
    calls_for_build: int | None = Field(description="That pay for these.")
    tuning_s: float = Field(
        description="This tuning, with what was tried and not chosen; what was reused from an earlier one cost nothing."
    )
    calls_for_tuning: int | None = Field(description="That pay for it all.")
    reason: str | None = Field(description="Why there is no such number.")


class Evidence(Model):
    """The whole workload, tuned against plain, in one process in turns (AB BA AB ..)."""

    plain_ms: Samples
    tuned_ms: Samples
    comparison: Comparison
    output: OutputComparison
    break_even: BreakEven


class TuneWorkloadResult(Model):
    """What was tuned, and whether it is kept."""

    schema_version: int = SCHEMA_VERSION
    workload: str
    device: str
    request: TuneRequest
    status: Literal["kept", "rejected", "dry_run"]
    reason: str
    shapes: Literal["fixed"] = Field(
        default="fixed", description="Sizes are those of the workload's own calls: no axis is taken for the batch."
    )
    modules: list[TunedModule]
    schedulers: list[TunedScheduler] = Field(default=[], description="Of diffusion pipelines.")
    evidence: Evidence | None = Field(description="None: nothing was chosen, or it was a dry run.")
    num_unseen_calls: int = Field(description="Calls of tuned modules that ran as they are, by their form.")
    saved_to: str | None
    report_path: str = Field(description="The whole report of the tuning, with all samples.")
    duration_s: float = Field(description="Of the tuning; what follows it is not counted.")
    notes: list[str] = Field(description="Warnings.")

    @property
    def has_reused(self) -> bool:
        """Whether a candidate is known from an earlier tuning."""
        return any(c.is_reused for module in self.modules for graph in module.graphs for c in graph.candidates)
