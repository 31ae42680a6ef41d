"""The tuning report: what was tuned, with which candidates, what each of them measured, and what was chosen and why.

It is written again whenever something has ended, so that a tuning that was interrupted leaves what it had found.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, JsonValue

from perfladder.environment import Environment
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.stats import Interval, Verdict
from perfladder.tuning.config import TuningSettings
from perfladder.tuning.observe import HardwareSummary

CandidateStatus = Literal["kept", "rejected", "not_applicable", "failed", "reused"]
_MAX_MESSAGE_BYTES: Final = 1024
_CUT: Final = " ..."


def _short_message(value: object) -> object:
    """At most 1 KiB of UTF-8; what is no text in it (a path, say) is escaped."""
    if not isinstance(value, str):
        return value
    data = value.encode(errors="backslashreplace")
    if len(data) > _MAX_MESSAGE_BYTES:
        data = data[: _MAX_MESSAGE_BYTES - len(_CUT)]
        return data.decode(errors="ignore") + _CUT
    return data.decode()


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: they are unknown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


Message = Annotated[str, BeforeValidator(_short_message)]
Finite = Annotated[float | None, BeforeValidator(_finite)]
Details = Annotated[dict[str, JsonValue], BeforeValidator(_finite)]


class ErrorReport(Model):
    """What ended a tuning, or the tuning of one module."""

    type: str = Field(description="Name of its class.")
    message: Message = Field(description="At most 1 KiB.")

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Describe an exception."""
        return cls(type=type(error).__name__, message=str(error))


class TensorRow(Model):
    """One tensor among inputs or outputs."""

    access_path: str = Field(description="As code reaches it: `options['mask']`.")
    semantic_path: str = Field(description="As explicit shapes name it: `('options', 'mask')`.")
    shape: list[int | str] = Field(description="A name stands for an axis that varied: `batch0`, `dim1`.")
    min_shape: list[int]
    max_shape: list[int]
    dtype: str


class ValueRow(Model):
    """One input that is no tensor."""

    access_path: str
    semantic_path: str
    value: Message = Field(description="As Python writes it.")


class StrategyReport(Model):
    """How the backend was chosen."""

    name: str
    description: str
    backends: list[str] = Field(description="In the order in which they were tried.")


class MeasurementReport(Model):
    """A candidate against eager at one batch size, in interleaved pairs."""

    batch_size: int
    speedup: Finite = Field(description="Baseline over candidate, above 1 is faster.")
    interval: Interval | None = Field(default=None, description="Of the speedup, 95 %.")
    candidate_p50_ms: Finite = None
    baseline_p50_ms: Finite = None
    throughput_items_per_s: Finite = Field(default=None, description="Of the candidate.")
    num_pairs: int
    verdict: Verdict


class CorrectnessReport(Model):
    """A candidate's outputs against eager's."""

    is_correct: bool
    num_samples: int = Field(description="Recorded samples that were compared.")
    max_abs_error: Finite = Field(default=None, description="None: not compared, or not finite; the reason tells.")
    max_rel_error: Finite = Field(default=None, description="Over the largest value of eager's output.")
    tolerance: Finite = Field(default=None, description="What the gate allowed, in the terms that the reason names.")
    checked_shapes: list[str] = Field(default=[], description="Such as `min`, `opt`, `max`.")
    reason: Message | None = None


class CandidateReport(Model):
    """One backend with one configuration."""

    backend: str
    config: Details = {}
    status: CandidateStatus = Field(
        description="`kept`: correct, and fast enough to be chosen; `reused`: kept, with a build that was there "
        "already; `rejected`: wrong or not faster; `not_applicable`: cannot serve here; `failed`: did not build or run."
    )
    reason: Message = Field(description="Why it has this status.")
    build_s: Finite = None
    log_file: str | None = Field(default=None, description="What the build printed.")
    details: Details = Field(default={}, description="What the backend tells of itself.")
    measurements: list[MeasurementReport] = []
    correctness: CorrectnessReport | None = None


class GraphReport(Model):
    """One way in which a module was called."""

    name: str
    inputs: list[TensorRow]
    others: list[ValueRow] = Field(default=[], description="Inputs that are no tensors.")
    outputs: list[TensorRow]
    num_samples: int
    strategy: StrategyReport
    candidates: list[CandidateReport] = []
    selected: str | None = Field(default=None, description="The chosen backend; None: not chosen yet, or no tuning.")
    reason: Message | None = Field(default=None, description="Why that one.")


class ModuleReport(Model):
    """One module."""

    path: str
    module_type: str
    num_parameters: int
    num_layers: int
    precisions: list[str]
    device: str
    state: str
    error: ErrorReport | None = None
    graphs: list[GraphReport] = []


class TuningReport(Model):
    """One call of `tune`."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    created_at: str
    duration_s: float | None = Field(default=None, description="None: it has not ended, or was killed.")
    environment: Environment
    config: TuningSettings
    error: ErrorReport | None = None
    modules: list[ModuleReport] = []
    hardware: HardwareSummary | None = Field(default=None, description="None: `hardware_metrics` was off.")


_current: TuningReport | None = None


def write_report(path: Path, report: TuningReport) -> None:
    """Write a report, so that a reader finds the one before or this one; it is the current one from now on.

    Raises:
        NotPossibleHereError: The file cannot be written; the report is the current one all the same.
    """
    global _current
    _current = report
    _write(path, report)


def current_report() -> TuningReport:
    """The last report of this process.

    Raises:
        InputError: Nothing was tuned.
    """
    if _current is None:
        raise InputError("Nothing was tuned in this process, so there is no report: call tune() first.")
    return _current


def snapshot_tuning_data(path: str | Path | None = None) -> TuningReport:
    """The last report of this process, also written to a file if one is given.

    Raises:
        InputError: Nothing was tuned.
        NotPossibleHereError: The file cannot be written.
    """
    report = current_report()
    if path is not None:
        _write(Path(path), report)
    return report


def _write(path: Path, report: TuningReport) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, report.model_dump_json(indent=1))
    except OSError as error:
        raise NotPossibleHereError(
            f"The tuning report {path} cannot be written: {error}. Set config.tuning_data_output_path to another."
        ) from error
