"""What a night of profiling does: the one parameter of the flow `nightly`, and of `perfladder nightly`."""

from __future__ import annotations

from pydantic import Field

from perfladder.ladder import LAST_RUNG
from perfladder.models import Model
from perfladder.nightly.model import Rules


class NightlyConfig(Model):
    """Which workloads to profile, how often each, and when the night is an alarm."""

    workloads: str = Field(description="A folder of workload files (*.yaml, *.yml), or one such file.")
    runs_dir: str = Field(default="runs", description="Where run directories are made; the history is read there too.")
    launches: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Processes that each workload is timed in; `launches` of a file goes first.",
    )
    until: str = Field(default=LAST_RUNG, description="The last rung to climb; kernel families need `kernels`.")
    rules: Rules = Field(default=Rules(), description="When nights count as different.")
    baseline: list[str] = Field(
        default=[],
        description="Runs to compare with, in place of the last good nights: folders, ids, commits, mlflow:RUN_ID or "
        "tag:KEY=VALUE. Each counts for its own workload.",
    )
    takes_second: bool = Field(
        default=True, description="Whether a suspicion is measured a second time; without it there are no alarms."
    )
    second_after_s: float = Field(
        default=60.0, ge=0, le=6 * 3600, description="Pause before the second measurement, for the machine to settle."
    )
    history_nights: int = Field(
        default=400, ge=20, le=5000, description="Nights of each workload, at most, that are read from MLflow."
    )
    tracking_uri: str | None = Field(
        default=None, description="MLflow's address; by default SQLite in the runs folder."
    )
    experiment: str = Field(default="perfladder", min_length=1, description="MLflow's experiment.")
    max_artifact_bytes: int = Field(
        default=256 << 20, gt=0, description="Larger files stay in the run directory and are not uploaded."
    )
