"""`perfladder ncu CAPTURE`: look at one kernel of a captured stage, with a run around the capture or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from perfladder.capturing.script import read_constants
from perfladder.capturing.store import Manifest, read_manifest
from perfladder.device_lock import device_lock
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.ladder import load_results, rung_named
from perfladder.nsight.preflight import check_machine, nvidia_gpu
from perfladder.nsight.question import heaviest_kernel
from perfladder.report import build_report, write_report
from perfladder.rundir import RunDirectory
from perfladder.rungs import ncu
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.workload import WorkloadFile

_RUNG = "ncu"


class _Around(NamedTuple):
    """The run that a capture lies in, with what its rung 4 has seen."""

    run: RunDirectory | None
    kernels: KernelsResult | None
    trace: Path | None


def profile_capture(
    capture: str | Path,
    *,
    workload: WorkloadFile | None = None,
    factory: str | None = None,
    kernel: str | None = None,
    call: int | None = None,
    launch_skip: int | None = None,
    to: str | Path | None = None,
    limit_s: float = 600.0,
    options: Mapping[str, object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> NcuResult:
    """Run ncu on the replay of one captured call.

    Args:
        capture: Its folder. In a run's folder the result becomes rung 5 of that run.
        workload: What was captured: its target must be the one that the capture's script builds.
        factory: Instead of it a `module:function` that returns the stage alone.
        kernel: A name as in rung 4, or the function's alone; None: the heaviest kernel of the run's rung 4.
        call: Which captured call; None: that of rung 4, or the middle one.
        launch_skip: Launches of that function to leave out; None: as rung 4's trace tells.
        to: Folder for the report; by default the run's `5-ncu`, else `<capture>-ncu`.
        limit_s: After so long ncu is ended, with all it has started.
        options: Further fields of `KernelFilter`: `launch_count`, `sections`, `clock_control`, `cache_control`.
        tell: Receives lines of progress.

    Raises:
        InputError: What was asked for is not there, or is communication.
        CaptureError: The capture or its script cannot be used.
        PerfladderError: ncu failed.
    """
    capture = Path(capture).absolute()
    manifest = read_manifest(capture)
    _require_same_target(capture, manifest, workload, factory)
    around = _around(capture)
    name = kernel or _heaviest(around)
    folder = _folder(capture, around, to)
    request = ncu.request_for(
        around.kernels,
        name,
        capture=capture,
        folder=folder,
        trace=around.trace,
        launch_skip=launch_skip,
        call_index=call,
        factory=factory,
        limit_s=limit_s,
        options=options,
    )
    gpu = nvidia_gpu(int(manifest.device.partition(":")[2] or 0))
    with device_lock(gpu.uuid if gpu and gpu.uuid else manifest.device, tell=tell):
        result = ncu.profile_kernel(request, check_machine(gpu), tell=tell)
    _keep(folder, around, result, is_in_run=to is None)
    return result


def _require_same_target(capture: Path, manifest: Manifest, workload: WorkloadFile | None, factory: str | None) -> None:
    """A capture never says what to load: its script's target must be what the user names."""
    if (workload is None) == (factory is None):
        raise InputError(
            "Give either the workload that the capture was made of, or a factory (module:function) of the stage."
        )
    values = read_constants(capture)
    if workload is None:
        return
    if workload.workload.nproc > 1:
        raise NotPossibleHereError("nproc: a stage that runs on several ranks cannot be replayed in one process.")
    own = (workload.workload.target, workload.workload.target_args, str(workload.base_dir.resolve()))
    its = tuple(values.get(key) for key in ("TARGET", "TARGET_ARGS", "BASE_DIR"))
    if own != its:
        raise InputError(
            f"workload: its target is {own[0]} in {own[2]}, and the script of {capture} builds {its[0]} in {its[2]}, "
            f"or with other arguments. Give the workload that was captured ({manifest.stage}), or --factory."
        )


def _around(capture: Path) -> _Around:
    if not (capture.parent / "run.json").is_file():
        return _Around(None, None, None)
    run = RunDirectory.open(capture.parent)
    kernels = load_results(run).get("kernels")
    if not isinstance(kernels, KernelsResult) or kernels.status != "done":
        return _Around(run, None, None)
    folder = next(entry.folder for entry in run.record.rungs if entry.name == "kernels")
    trace = kernels.artifacts.get("trace")
    return _Around(run, kernels, run.path / folder / trace if trace else None)


def _heaviest(around: _Around) -> str:
    share = heaviest_kernel(around.kernels) if around.kernels is not None else None
    if share is None:
        raise InputError(
            "kernel: give its name, as in --kernel vectorized_elementwise_kernel. Only in a run whose rung 4 has seen "
            "kernels of a GPU is there a heaviest one to take."
        )
    return share.name


def _folder(capture: Path, around: _Around, to: str | Path | None) -> Path:
    if to is None and around.run is not None:
        rung = rung_named(_RUNG)
        return around.run.rung_folder(rung.number, rung.name)
    folder = Path(to).absolute() if to is not None else capture.with_name(f"{capture.name}-ncu")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"to: {folder} cannot be made: {error.strerror}. Name another one.") from error
    return folder


def _keep(folder: Path, around: _Around, result: NcuResult, *, is_in_run: bool) -> None:
    """Write the result; in a run also into its record and its report."""
    from perfladder.files import write_atomically

    if around.run is None or not is_in_run:
        write_atomically(folder / f"{_RUNG}.json", result.model_dump_json(indent=1))
        return
    around.run.write_result(folder, _RUNG, result, result.status, result.reason)
    write_report(build_report(around.run.path), around.run.path)
