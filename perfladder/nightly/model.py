"""A night of a workload as its history keeps it, and what is said of it: the models of `night.json`."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, JsonValue

from perfladder.comparing.model import Difference
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.stats import Interval
from perfladder.workload import Metric

VerdictKind = Literal["ok", "suspected", "regression", "improvement", "no_baseline_yet", "undecided"]
KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
PartOfRun = Literal["stage", "family"]


class Rules(Model):
    """When nights count as different."""

    last_good: int = Field(default=30, ge=2, le=400, description="Good nights that the baseline's level comes from.")
    min_nights: int = Field(default=10, ge=5, le=100, description="Good nights that a first verdict needs.")
    noise_nights: int = Field(default=60, ge=10, le=400, description="Nights, at most, that the noise is taken from.")
    min_effect: float = Field(default=0.01, ge=0, lt=1, description="Relative change below which none counts.")
    nights_to_confirm: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Nights that must show a slowdown before it is an alarm; the second measurement comes on top.",
    )


class Night(Model):
    """One measurement of a workload in one night, as small as its history needs it."""

    schema_version: int = SCHEMA_VERSION
    workload: str
    run_id: str
    run_dir: str
    started_at: str
    metric: Metric
    unit: Literal["ms", "bytes"]
    launches: list[float] = Field(
        min_length=1, description="The metric in each process launch, as a time or a size: less is better."
    )
    stages_ms: dict[str, float] = Field(default={}, description="Own time of each stage: median of launch medians.")
    families_us: dict[str, float] = Field(default={}, description="Kernel families in one profiled call of a stage.")
    replayed_stage: str | None = Field(default=None, description="The stage that `families_us` are of.")
    commit: str | None = None
    is_dirty: bool = False
    work: str = Field(description="Digest of what is done; other work is another history.")
    machine: dict[str, JsonValue] = Field(default={}, description="Hardware; another one is another history.")
    software: dict[str, JsonValue] = Field(default={}, description="Versions, driver, threads, settings.")
    disturbances: list[str] = Field(default=[], description="Codes of warnings on the machine's state.")
    second_of: str | None = Field(default=None, description="Run id of the measurement that this one repeats.")
    verdict: VerdictKind | None = None
    changed_at: str | None = Field(
        default=None, description="Run id of the first night of the change that the verdict is about."
    )
    is_accepted: bool = Field(default=False, description="Whether the level since this night was accepted as good.")
    mlflow_run_id: str | None = None

    @property
    def value(self) -> float:
        """The night's level: the median of its launches."""
        ordered, half = sorted(self.launches), len(self.launches) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Moved(Model):
    """A stage or a kernel family whose time is not what it was."""

    part: PartOfRun
    name: str
    unit: Literal["ms", "us"]
    before: float = Field(description="Typical value of the baseline's nights.")
    after: float = Field(description="Typical value of the nights of the change.")
    ratio: float = Field(description="After over before; above 1 is slower.")
    interval: Interval | None = Field(default=None, description="Of the ratio; None where too few nights have it.")


class CommitRange(Model):
    """Where a change came in, as far as nights can tell."""

    last_good: str | None = Field(description="Commit of the last night before the change.")
    first_changed: str | None = Field(description="Commit of its first night.")
    last_good_run: str
    first_changed_run: str
    first_changed_at: str
    is_dirty: bool = Field(default=False, description="Whether a side had uncommitted changes.")

    @property
    def told(self) -> str:
        """In words."""
        if self.last_good is None or self.first_changed is None:
            return "no commits are known"
        if self.last_good == self.first_changed:
            return f"commit {self.last_good[:12]} before and after: the code of the workload's repository is the same"
        return f"commits {self.last_good[:12]}..{self.first_changed[:12]}"


class NightVerdict(Model):
    """What is said of one workload's night."""

    workload: str
    run_id: str
    kind: VerdictKind
    reason: str
    is_new: bool = Field(default=True, description="False where an earlier night has told of the same regression.")
    metric: Metric
    unit: Literal["ms", "bytes"]
    value: float
    second_value: float | None = Field(default=None, description="Of the second measurement.")
    baseline: float | None = None
    num_baseline_nights: int = 0
    ratio: float | None = Field(
        default=None, description="Of the nights of the change to the baseline; tonight's else."
    )
    interval: Interval | None = Field(default=None, description="Of the ratio, 95 %.")
    noise: float | None = Field(default=None, description="Relative; standard deviation of a night's level.")
    detectable: float | None = Field(
        default=None, description="Relative; a step of this size is suspicious in half of first nights."
    )
    window: int | None = Field(default=None, description="Nights that the verdict looks at together.")
    commits: CommitRange | None = None
    causes: list[Difference] = Field(default=[], description="What else changed when the level did.")
    moved: list[Moved] = []
    disturbances: list[str] = []
    split_because: list[Difference] = Field(default=[], description="Why older nights do not count.")
    next_step: str | None = None


class NightRecord(Model):
    """`night.json` of a run directory."""

    schema_version: int = SCHEMA_VERSION
    night: Night
    verdict: NightVerdict | None = None
