"""What a proof of a tuning is asked for, what each of its steps found, and how it ended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfladder.comparing.interleave import PAIRS
from perfladder.comparing.model import Verdict
from perfladder.comparing.runs import MIN_EFFECT
from perfladder.ladder import LAST_RUNG
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.rundir import RunStatus
from perfladder.rungs.base import RungResult
from perfladder.stats import Interval
from perfladder.text import clause
from perfladder.timing.results import MetricValue
from perfladder.tuning.replay_tuned import TunedReplay
from perfladder.tuning.tune_request import TuneRequest
from perfladder.tuning.tune_result import OutputComparison, TuneWorkloadResult
from perfladder.workload import Metric

OUTCOME_FILE = "proof.json"
REPORT_FILE = "report.md"
ARCHIVE = "tuned.ait"

ProofVerdict = Literal["kept", "rejected"]


class ProofSettings(Model):
    """How far to profile, how to tune, and how much to measure for the verdict."""

    until: str = Field(default=LAST_RUNG, description="The last rung to climb, before and after the tuning.")
    tune: TuneRequest = Field(default=TuneRequest(), description="Which modules, which backends, and what is kept.")
    pairs: int = Field(default=PAIRS, gt=0, description="Runs of each side in each pair of processes.")
    launches: int | None = Field(
        default=None, gt=0, description="Pairs of processes; None: as the workload says, by default 6."
    )
    min_effect: float = Field(default=MIN_EFFECT, ge=0, description="Relative change below which none counts.")


class ProfileStep(RungResult):
    """The ladder, climbed on the plain or on the tuned workload, as a run of its own."""

    rung: str = "profile"
    run_dir: str | None = None
    run_id: str | None = None
    exit_code: int | None = Field(default=None, description="Of that run; 5: one of its rungs failed.")
    metric: MetricValue | None = None


class TuneStep(RungResult):
    """The tuning, and the archive that it wrote."""

    rung: str = "tune"
    tuning: TuneWorkloadResult | None = None
    archive_sha256: str | None = Field(default=None, description="None: nothing was worth an archive.")


class ModuleReplay(Model):
    """One tuned module's replay, and the capture that it rests on."""

    module: str
    capture: str | None = Field(description="Folder of the capture; None: there is none.")
    is_from_profile: bool = Field(description="Whether the capture is the profile run's.")
    replay: TunedReplay


class ReplayStep(RungResult):
    """What the archive does in processes that have tuned nothing: each module on captured inputs, and the whole."""

    rung: str = "replay"
    modules: list[ModuleReplay] = []
    output: OutputComparison | None = Field(default=None, description="Of the whole workload; None: not compared.")

    @property
    def why_not_right(self) -> str | None:
        """Why the archive is not proven to be right; None if it is."""
        for one in self.modules:
            if not one.replay.is_right:
                what = "is wrong" if one.replay.is_right is False else "cannot be judged"
                return f"The replay of {one.module or 'the target'} {what}: {clause(one.replay.reason)}."
        if self.output is not None and self.output.is_right is False:
            return f"The whole output is not right with the archive: {clause(self.output.reason)}."
        return None


class CompareStep(RungResult):
    """The whole workload, tuned against plain, in pairs of processes that took turns."""

    rung: str = "compare"
    metric_name: Metric | None = None
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    speedup: float | None = Field(default=None, description="Plain over tuned: above 1 is faster.")
    interval: Interval | None = Field(default=None, description="Of the speedup, 95 %.")


class StepSummary(Model):
    """One step, as the outcome lists it."""

    name: str
    status: str
    reason: str | None
    duration_s: float | None
    is_reused: bool = False


class ProofOutcome(Model):
    """`proof.json`: whether the tuning is kept, and what that rests on."""

    schema_version: int = SCHEMA_VERSION
    run_dir: str
    run_id: str
    workload: str
    device: str | None
    status: RunStatus
    exit_code: int
    verdict: ProofVerdict
    reason: str
    speedup: float | None = Field(description="Of the whole workload; None: it was not compared.")
    interval: Interval | None
    modules: dict[str, str] = Field(description="What was chosen, by module or scheduler.")
    archive: str | None = Field(description="In the run's folder; None: nothing is kept.")
    archive_sha256: str | None
    saved_to: str | None = Field(default=None, description="The copy that was asked for.")
    plain_run: str | None
    tuned_run: str | None
    steps: list[StepSummary]
