"""One side of a comparison, read from its run directories; several of them count as launches of one version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from perfladder.comparing.differences import list_differences
from perfladder.comparing.model import Side
from perfladder.errors import InputError
from perfladder.ladder import load_results
from perfladder.rundir import RunDirectory, RunRecord, read_model
from perfladder.rungs.base import R, RungResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.regions import RegionsResult
from perfladder.target import LoadedInfo
from perfladder.text import clause
from perfladder.timing.launches import merge_launches
from perfladder.timing.results import StagesResult
from perfladder.workload import Fingerprints, Workload, parse_workload


@dataclass(frozen=True)
class MeasuredSide:
    """What was measured of one version.

    Attributes:
        label: What the user named.
        workload: What was run.
        info: What was found when the target was loaded, the first time.
        all_stages: Rung 1 of each run.
        regions: Rung 2 of each run that has it.
        kernels: Rung 4 of each run that has it.
        records: The runs' records; none where the side was measured for the comparison.
        paths: Their folders.
    """

    label: str
    workload: Workload
    info: LoadedInfo
    all_stages: Sequence[StagesResult]
    regions: Sequence[RegionsResult] = ()
    kernels: Sequence[KernelsResult] = ()
    records: Sequence[RunRecord] = ()
    paths: Sequence[Path] = ()

    @cached_property
    def stages(self) -> StagesResult:
        """Rung 1 of all runs in one, launch by launch."""
        return merge_launches(self.all_stages) if len(self.all_stages) > 1 else self.all_stages[0]

    @property
    def fingerprints(self) -> Fingerprints:
        """Made anew from the workload, so that a run of an older perfladder has every field as well."""
        return Fingerprints.of(self.workload, **self.info.git.as_configuration())

    @property
    def summary(self) -> Side:
        """The side as a comparison shows it."""
        wall_ms = self.stages.default.wall_ms
        return Side(
            label=self.label,
            runs=[str(path) for path in self.paths],
            workload=self.workload.name,
            commit=self.info.git.commit,
            is_dirty=self.info.git.dirty,
            device=self.info.device,
            started_at=self.records[0].started_at if self.records else self.stages.started_at,
            num_launches=len(wall_ms.launches),
            num_runs=len(wall_ms.values),
        )


def read_side(paths: Sequence[Path], label: str) -> MeasuredSide:
    """Read the runs of one side.

    Raises:
        InputError: A run was not measured, or several runs of the side are not of one version.
    """
    if not paths:
        raise InputError(f"{label}: no run is given.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise InputError(f"{label}: a run is given twice; each may count once.")
    runs = [_read(path) for path in paths]
    first = runs[0]
    for other in runs[1:]:
        differences = list_differences(_version_of(first), _version_of(other))
        if differences:
            named = "; ".join(f"{d.field} is {d.baseline!r} and {d.candidate!r}" for d in differences[:5])
            raise InputError(
                f"{label}: runs of one side must be of one version, but {first.paths[0]} and {other.paths[0]} differ: "
                f"{named}. Compare them with each other instead."
            )
    run_id = first.records[0].run_id
    return MeasuredSide(
        label=label if len(runs) > 1 or run_id in label else f"{label} ({run_id})",
        workload=first.workload,
        info=first.info,
        all_stages=[stages for run in runs for stages in run.all_stages],
        regions=[regions for run in runs for regions in run.regions],
        kernels=[kernels for run in runs for kernels in run.kernels],
        records=[record for run in runs for record in run.records],
        paths=[path for run in runs for path in run.paths],
    )


def _read(path: Path) -> MeasuredSide:
    run = RunDirectory.open(path)
    results = load_results(run)
    stages = _done(results, StagesResult)
    environment = run.path / "environment.json"
    if stages is None or not stages.scenarios or not environment.is_file():
        failed = results.get("stages")
        why = failed.reason if failed is not None and failed.reason else run.record.error or "it did not come so far"
        raise InputError(
            f"{path} has no stage timing, so there is nothing to compare: {clause(why)}. Run the workload again."
        )
    regions, kernels = _done(results, RegionsResult), _done(results, KernelsResult)
    text = (run.path / "workload.yaml").read_text(encoding="utf-8")
    return MeasuredSide(
        label=str(path),
        workload=parse_workload(yaml.safe_load(text), what=f"{run.path}/workload.yaml"),
        info=read_model(environment, LoadedInfo),
        all_stages=[stages],
        regions=[regions] if regions is not None else [],
        kernels=[kernels] if kernels is not None else [],
        records=[run.record],
        paths=[run.path],
    )


def _version_of(side: MeasuredSide) -> dict[str, object]:
    prints = side.fingerprints
    return {
        "work": prints.work.fields,
        "configuration": prints.configuration.fields,
        "environment": side.info.environment.model_dump(mode="json"),
    }


def _done(results: dict[str, RungResult], kind: type[R]) -> R | None:
    return next((r for r in results.values() if isinstance(r, kind) and r.status == "done"), None)
