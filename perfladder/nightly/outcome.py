"""How a night ended: one row for each workload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfladder.models import SCHEMA_VERSION, Model
from perfladder.nightly.model import NightVerdict
from perfladder.nightly.words import alarm_of

REGRESSION_EXIT_CODE = 1
_SOME_FAILED_EXIT_CODE = 5


class WorkloadNight(Model):
    """What became of one workload."""

    source: str = Field(description="Its file.")
    workload: str | None = Field(default=None, description="Its name; None where the file could not be read.")
    status: Literal["judged", "failed"]
    verdict: NightVerdict | None = None
    run_dir: str | None = None
    second_run_dir: str | None = None
    error: str | None = Field(default=None, description="Why it failed, or why there is no second measurement.")
    exit_code: int = 0
    mlflow_run_id: str | None = None

    @property
    def is_regression(self) -> bool:
        """Whether it is an alarm."""
        return self.verdict is not None and self.verdict.kind == "regression"


class NightlyOutcome(Model):
    """All that a night has found."""

    schema_version: int = SCHEMA_VERSION
    started_at: str
    runs_dir: str
    history_from: str = Field(description="Where earlier nights were read.")
    workloads: list[WorkloadNight]

    @property
    def regressions(self) -> list[WorkloadNight]:
        """The alarms."""
        return [row for row in self.workloads if row.is_regression]

    @property
    def failures(self) -> list[WorkloadNight]:
        """The workloads that could not be judged."""
        return [row for row in self.workloads if row.status == "failed"]

    @property
    def exit_code(self) -> int:
        """1 for a regression; else, where some workloads failed, 5; where all did, the first one's own code."""
        if self.regressions:
            return REGRESSION_EXIT_CODE
        if not self.failures:
            return 0
        return self.failures[0].exit_code if len(self.failures) == len(self.workloads) else _SOME_FAILED_EXIT_CODE

    @property
    def message(self) -> str:
        """One line that says how the night ended, the alarms first."""
        parts = [f"regression: {alarm_of(row.verdict)}" for row in self.regressions if row.verdict is not None]
        parts += [f"failed: {row.workload or row.source}: {_first_line(row.error)}" for row in self.failures]
        judged = len(self.workloads) - len(self.failures) - len(self.regressions)
        return " | ".join([*parts, f"{judged} of {len(self.workloads)} workloads without a regression"])


def _first_line(text: str | None) -> str:
    return (text or "").split("\n", 1)[0]
