"""Nights on disk: what the history keeps of a run directory, in its `night.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from pydantic import JsonValue

from perfladder.comparing.differences import OF_THE_MACHINE
from perfladder.comparing.profiled import family_times
from perfladder.comparing.runs import OUTSIDE, metric_samples
from perfladder.comparing.sides import MeasuredSide, read_side
from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.nightly.model import Night, NightRecord, NightVerdict
from perfladder.rundir import RunDirectory, read_model
from perfladder.stats import Samples

NIGHT_FILE = "night.json"
_MAX_FAMILIES = 30

Tell = Callable[[str], None]


def night_of(run_dir: Path, *, second_of: str | None = None) -> Night:
    """What a history keeps of a finished run.

    Args:
        run_dir: The run's folder.
        second_of: Run id of the measurement that this one repeats.

    Raises:
        InputError: The run has no stage timing, or its metric was not measured.
    """
    side = read_side([run_dir], str(run_dir))
    samples = metric_samples(side)
    if samples is None:
        raise InputError(f"{run_dir} has no {side.workload.metric}, so the night has no level. Read its report.")
    launches = [median(launch) for launch in samples.launches if launch]
    if not launches or min(launches) <= 0 or not all(map(math.isfinite, launches)):
        raise InputError(f"{run_dir}: {side.workload.metric} is not above 0 in every launch, so nights have no ratio.")
    prints, record = side.workload.fingerprints, side.records[0]
    kernels = side.kernels[0] if side.kernels else None
    return Night(
        workload=side.workload.name,
        run_id=record.run_id,
        run_dir=str(run_dir.resolve()),
        started_at=record.started_at,
        metric=side.workload.metric,
        unit="bytes" if side.workload.metric == "peak_memory" else "ms",
        launches=launches,
        stages_ms=_stage_times(side),
        families_us=dict(list(family_times(kernels).items())[:_MAX_FAMILIES]) if kernels is not None else {},
        replayed_stage=kernels.stage if kernels is not None else None,
        commit=side.info.git.commit,
        is_dirty=side.info.git.dirty,
        work=prints.work.digest,
        machine=_machine(side),
        software=_software(side),
        disturbances=sorted({warning.code for warning in side.stages.warnings if warning.code in OF_THE_MACHINE}),
        second_of=second_of,
        mlflow_run_id=record.mlflow_run_id,
    )


def write_night(night: Night, verdict: NightVerdict | None = None) -> NightRecord:
    """Write a night into its run directory, with what was said of it."""
    if verdict is not None:
        changed_at = verdict.commits.first_changed_run if verdict.commits is not None else None
        night = night.model_copy(update={"verdict": verdict.kind, "changed_at": changed_at})
    record = NightRecord(night=night, verdict=verdict)
    with RunDirectory.open(Path(night.run_dir)).writing():
        write_atomically(Path(night.run_dir) / NIGHT_FILE, record.model_dump_json(indent=1))
    return record


def accept(run_dir: Path) -> Night:
    """Take the level since a night for good: nights before it, or before its regression began, are no baseline then.

    Raises:
        InputError: The run is no night.
    """
    record = read_record(run_dir)
    if record.night.second_of is not None:
        raise InputError(
            f"{run_dir} is a second measurement. Accept the run that it repeats: {record.night.second_of}."
        )
    night = record.night.model_copy(update={"is_accepted": True})
    with RunDirectory.open(run_dir).writing():
        write_atomically(run_dir / NIGHT_FILE, record.model_copy(update={"night": night}).model_dump_json(indent=1))
    return night


def read_record(run_dir: Path) -> NightRecord:
    """Read the night of a run directory.

    Raises:
        InputError: It has none, or a damaged one.
    """
    path = run_dir / NIGHT_FILE
    if not path.is_file():
        raise InputError(f"{run_dir} is no night: it has no {NIGHT_FILE}. `perfladder nightly --history` lists nights.")
    record = read_model(path, NightRecord)
    # A runs folder may have been moved, or be seen from a container.
    return record.model_copy(update={"night": record.night.model_copy(update={"run_dir": str(run_dir.resolve())})})


def read_history(runs_dir: Path, workload: str, tell: Tell = lambda _: None) -> list[Night]:
    """All nights of a workload below a runs folder, second measurements too; one that cannot be read is told."""
    nights = []
    for path in runs_dir.glob(f"{workload}/*/{NIGHT_FILE}"):
        try:
            nights.append(read_record(path.parent).night)
        except InputError as error:
            tell(f"A night is left out: {error}")
    return in_order(nights)


def workloads_with_nights(runs_dir: Path) -> list[str]:
    """Names of the workloads that have nights below a runs folder."""
    return sorted({path.parent.parent.name for path in runs_dir.glob(f"*/*/{NIGHT_FILE}")})


def in_order(nights: Iterable[Night]) -> list[Night]:
    """Nights by time, each once."""
    return sorted(
        {night.run_id: night for night in nights}.values(), key=lambda night: (night.started_at, night.run_id)
    )


def _stage_times(side: MeasuredSide) -> dict[str, float]:
    scenario = side.stages.default
    samples = {stage.name: stage.cost_ms for stage in scenario.stages} | {OUTSIDE: scenario.outside_ms}
    return {name: value for name, found in samples.items() if (value := _median_of_launches(found)) > 0}


def _median_of_launches(samples: Samples) -> float:
    return median([median(launch) for launch in samples.launches if launch] or [0.0])


def _machine(side: MeasuredSide) -> dict[str, JsonValue]:
    environment = side.info.environment
    return {
        "cpu": environment.cpu,
        "num_cpus": environment.num_cpus,
        "device": side.info.device.partition(":")[0],
        "devices": [device.name for device in environment.devices],
    }


def _software(side: MeasuredSide) -> dict[str, JsonValue]:
    """All else that may change a time without a commit: versions, settings, the workload file's own configuration."""
    kept = ("python", "packages", "system", "torch_threads", "thread_variables", "driver", "accelerator_runtime")
    found: dict[str, JsonValue] = side.info.environment.model_dump(mode="json", include=set(kept))
    prints = side.workload.fingerprints
    return found | {
        "device_uuids": [device.uuid for device in side.info.environment.devices],
        "attention_backend": side.info.attention_backend,
        "configuration": prints.configuration.fields,
        "protocol": prints.protocol.fields,
    }
