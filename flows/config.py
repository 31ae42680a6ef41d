"""The parameters of the flows."""

from __future__ import annotations

from pydantic import Field, JsonValue

from perfladder.comparing.interleave import PAIRS
from perfladder.comparing.runs import MIN_EFFECT
from perfladder.ladder import LAST_RUNG
from perfladder.models import Model
from perfladder.tuning.proof_model import ProofSettings
from perfladder.tuning.tune_request import TuneRequest
from perfladder.variations import Runner
from perfladder.workload import Workload


class ProfilePipelineConfig(Model):
    """What to profile, how far, and where the record of it goes."""

    workload: Workload | str = Field(description="A workload, the path of a workload file, or a built-in name.")
    base_dir: str | None = Field(default=None, description="Where the relative paths of a `Workload` start.")
    source: str | None = Field(default=None, description="What to call the workload's origin in the record.")
    runs_dir: str = Field(default="runs", description="Folder that run directories are made in.")
    until: str = Field(default=LAST_RUNG, description="The last rung to climb.")
    resume: str | None = Field(
        default=None, description="An unfinished run to go on with: a folder, an id, or 'latest' of the workload."
    )
    tracking_uri: str | None = Field(
        default=None, description="MLflow's address; by default SQLite in the runs folder."
    )
    experiment: str = Field(default="perfladder", min_length=1, description="MLflow's experiment.")
    max_artifact_bytes: int = Field(default=256 << 20, gt=0, description="Larger files stay in the run directory only.")


class SweepConfig(Model):
    """Which workloads to climb, in which variations, and by what."""

    workloads: list[Workload | str] = Field(min_length=1, description="As in `ProfilePipelineConfig`.")
    base_dir: str | None = Field(default=None, description="Where the relative paths of a `Workload` start.")
    vary: dict[str, list[JsonValue]] = Field(
        default={}, description="Fields of the workload, which may be dotted, each with its values: all combinations."
    )
    runner: Runner = Field(default="threads", description="What starts the climbs.")
    at_once: int = Field(default=1, ge=1, le=1024, description="Climbs at once, of threads or a local cluster.")
    address: str | None = Field(default=None, description="A Ray or Dask cluster; by default a local one.")
    gpus_per_member: int = Field(default=0, ge=0, description="GPUs that Ray reserves for each climb.")
    runs_dir: str = "runs"
    until: str = Field(default=LAST_RUNG, description="The last rung to climb.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow's address; by default SQLite in the runs folder."
    )
    experiment: str = Field(default="perfladder", min_length=1)
    max_artifact_bytes: int = Field(default=256 << 20, gt=0, description="Larger files stay in the run directory only.")


class TunePipelineConfig(Model):
    """What to tune, how, how much to measure for the verdict, and where the record of it goes."""

    workload: Workload | str = Field(
        description="A plain workload, the path of a workload file, or a built-in name; it must load no archive."
    )
    base_dir: str | None = Field(default=None, description="Where the relative paths of a `Workload` start.")
    source: str | None = Field(default=None, description="What to call the workload's origin in the record.")
    runs_dir: str = Field(default="runs", description="Folder of run directories; tunings are in `tunings` in it.")
    until: str = Field(default=LAST_RUNG, description="The last rung to climb, before and after the tuning.")
    tune: TuneRequest = Field(
        default=TuneRequest(), description="Which modules and backends, and what has to be shown to keep them."
    )
    pairs: int = Field(default=PAIRS, gt=0, description="Runs of each side in each pair of processes.")
    launches: int | None = Field(
        default=None, gt=0, description="Pairs of processes; None: as the workload says, by default 6."
    )
    min_effect: float = Field(default=MIN_EFFECT, ge=0, description="Relative change below which none counts.")
    resume: str | None = Field(
        default=None,
        description="An unfinished tuning run to go on with: a folder, an id, or 'latest' of the workload.",
    )
    tracking_uri: str | None = Field(
        default=None, description="MLflow's address; by default SQLite in the runs folder."
    )
    experiment: str = Field(default="perfladder", min_length=1, description="MLflow's experiment.")
    max_artifact_bytes: int = Field(
        default=256 << 20, gt=0, description="Larger files stay in the run directory only, but for a kept archive."
    )

    @property
    def settings(self) -> ProofSettings:
        """What the engine is asked for."""
        return ProofSettings(
            until=self.until, tune=self.tune, pairs=self.pairs, launches=self.launches, min_effect=self.min_effect
        )


class CompareRunsConfig(Model):
    """Which runs to compare, and where the comparison goes."""

    baseline: list[str] | str = Field(
        description="A run's folder, its id, latest, a workload, a commit, mlflow:RUN_ID or tag:KEY=VALUE; or several."
    )
    candidate: list[str] | str = Field(description="The same for the other version.")
    runs_dir: str = Field(default="runs", description="Folder that run directories are in.")
    to: str | None = Field(default=None, description="Folder for the comparison; None: one of its own in runs_dir.")
    min_effect: float = Field(default=MIN_EFFECT, ge=0, description="Relative change below which none counts.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow's address; by default SQLite in the runs folder."
    )
    experiment: str = Field(default="perfladder", min_length=1, description="MLflow's experiment.")
