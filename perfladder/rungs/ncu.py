"""Rung 5, Nsight Compute: why is that one kernel slow? Cost: ncu on the replay script, which repeats the kernel.

Optional: it starts where a finding names one reproducible kernel question, or where somebody asks for a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from perfladder.capturing.script import SCRIPT, nvtx_range, read_constants
from perfladder.capturing.store import read_manifest
from perfladder.errors import InputError, RungError, WorkloadError
from perfladder.models import Model, ResultWarning, input_error
from perfladder.nsight.command import KernelFilter, ncu_command
from perfladder.nsight.diagnosis import Diagnosis, Verdict, diagnose
from perfladder.nsight.names import function_name, is_same_kernel
from perfladder.nsight.output import Told, read_output, tail
from perfladder.nsight.preflight import Gpu, Preflight, check_machine, nvidia_gpu
from perfladder.nsight.process import run_guarded
from perfladder.nsight.question import launch_index, open_question, refuse_communication
from perfladder.nsight.report import MetricRow, NcuReport, ReportedLaunch
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.cost import CostEstimate
from perfladder.rungs.kernels import KernelsResult
from perfladder.text import near_names
from perfladder.timing.results import StagesResult

REPORT_FILE: Final = "kernel.ncu-rep"
LOG_FILE: Final = "ncu.log"
PRINTED_FILE: Final = "ncu-replay.log"
_VALUES_FILE: Final = ".values.json"
_READ_LIMIT_S: Final = 120.0
_NCU_S: Final = 30.0
"""Seen for a few launches with the usual sections; a kernel of seconds takes longer."""
_NO_QUESTION: Final = (
    "No finding names one kernel whose slowness is still unexplained. To look at one all the same: "
    "perfladder ncu CAPTURE --kernel NAME."
)


class NcuRequest(Model):
    """Which kernel of which captured call, and how ncu runs."""

    capture: str
    folder: str = Field(description="Where the report goes.")
    kernel: str = Field(min_length=1, description="Name as in rung 4, or the function's name alone.")
    call_index: int
    chosen: KernelFilter
    known_kernels: list[str] = Field(default=[], description="What rung 4 has seen, for a message.")
    factory: str | None = Field(default=None, description="module:factory of the stage alone, for the replay script.")
    limit_s: float = Field(default=600.0, gt=0, description="After so long ncu and all it has started are ended.")


class ProfiledLaunch(Model):
    """One launch, with what its metrics say."""

    index: int
    name: str
    demangled_name: str
    is_asked_kernel: bool | None = Field(
        description="Whether it is the asked instantiation; None where two spellings of its name differ too much."
    )
    nvtx_ranges: list[str] = []
    diagnosis: Diagnosis


class NcuResult(RungResult):
    """What limits one kernel. Durations of ncu are in `values` only: it repeats the kernel, with caches emptied."""

    rung: str = "ncu"
    stage: str | None = None
    call_index: int | None = None
    kernel: str | None = Field(default=None, description="As it was asked for.")
    chosen: KernelFilter | None = None
    command: list[str] = []
    preflight: Preflight | None = None
    launches: list[ProfiledLaunch] = []
    verdict: Verdict | None = Field(default=None, description="Of all launches; undecided where they differ.")
    statement: str | None = None
    values: list[MetricRow] = Field(default=[], description="Keyed by launch, section, metric and unit.")


def estimate(context: RungContext) -> CostEstimate:
    """ncu starts the replay script anew, and repeats the chosen launches once for each group of metrics."""
    stages = context.result(StagesResult)
    load_s = sum(context.info.load_s.values())
    return CostEstimate(
        time_s=load_s + _NCU_S,
        memory_bytes=stages.peak_device_reserved_bytes if stages is not None else None,
        basis=f"loading again ({load_s:.3g} s), and about {_NCU_S:g} s for ncu to start and to repeat a few launches",
    )


def run(context: RungContext, request: NcuRequest | None = None) -> NcuResult:
    """Profile the kernel that rung 4 leaves a question about; nothing else of the ladder runs meanwhile."""
    captured, kernels = context.result(CaptureResult), context.result(KernelsResult)
    if captured is None or captured.folder is None or kernels is None:
        return NcuResult(status="not_applicable", reason="There is no kernel of a replay to look at.")
    if kernels.kind != "kernels":
        reason = "Rung 4 has seen operators of a CPU, and Nsight Compute profiles kernels of an NVIDIA GPU."
        return NcuResult(status="not_applicable", reason=reason)
    if request is None:
        question = open_question(kernels)
        if question is None:
            return NcuResult(status="skipped", reason=_NO_QUESTION, stage=kernels.stage)
        request = request_for(
            kernels,
            question.name,
            capture=context.folder.parent / captured.folder,
            folder=context.folder,
            trace=_trace_of(kernels, context.folder.parent),
            limit_s=context.workload.timeout_s,
        )
    # The other processes hold memory and contexts of the device, and no rung comes after this one.
    context.free_device()
    return profile_kernel(request, check_machine(_gpu_of(context)), tell=context.tell)


def request_for(
    kernels: KernelsResult | None,
    kernel: str,
    *,
    capture: Path,
    folder: Path,
    trace: Path | None = None,
    launch_skip: int | None = None,
    call_index: int | None = None,
    factory: str | None = None,
    limit_s: float = 600.0,
    options: Mapping[str, object] | None = None,
) -> NcuRequest:
    """Choose the launches: the captured call of rung 4, or the middle one, and the kernel's first launch in it.

    Args:
        kernels: What rung 4 has seen, if it was climbed.
        kernel: Its name there, or the function's alone.
        capture: The capture whose replay script is run.
        folder: Where the report goes.
        trace: Rung 4's, which knows the order of launches.
        launch_skip: Launches of that function to leave out first; None: as the trace tells, else none.
        call_index: Which captured call.
        factory: For the replay script.
        limit_s: After so long ncu is ended.
        options: Further fields of `KernelFilter`.

    Raises:
        CaptureError: The capture or its script cannot be used.
        InputError: The kernel communicates, or the call was not captured.
    """
    refuse_communication(kernel)
    manifest = read_manifest(capture)
    there = [call.index for call in manifest.calls]
    if not there:
        raise InputError(f"{capture} holds no call.")
    if call_index is None:
        call_index = kernels.call_index if kernels and kernels.call_index in there else there[len(there) // 2]
    if call_index not in there:
        raise InputError(f"call: there is no call {call_index}; captured are {', '.join(map(str, there))}.")
    if launch_skip is None:
        launch_skip = (launch_index(trace, kernel) if trace is not None else None) or 0
    chosen = {
        "function": function_name(kernel),
        "nvtx_range": nvtx_range(manifest.stage),
        "launch_skip": launch_skip,
        **(options or {}),
    }
    return NcuRequest(
        capture=str(capture),
        folder=str(folder),
        kernel=kernel,
        call_index=call_index,
        chosen=_checked(chosen),
        known_kernels=[share.name for share in kernels.by_kernel] if kernels else [],
        factory=factory,
        limit_s=limit_s,
    )


def _checked(fields: Mapping[str, object]) -> KernelFilter:
    try:
        return KernelFilter.model_validate(fields)
    except ValidationError as error:
        raise input_error(error, KernelFilter, "ncu") from error


def profile_kernel(
    request: NcuRequest, preflight: Preflight, *, tell: Callable[[str], None] = lambda _: None
) -> NcuResult:
    """Run ncu on the replay script, read its report, and judge each launch.

    Raises:
        CaptureError: The capture's script is not the one that this perfladder writes.
        InputError: No launch fitted.
        RungError: ncu crashed, took too long, or wrote no report that can be read.
        WorkloadError: The replay failed.
    """
    capture, folder = Path(request.capture), Path(request.folder)
    read_constants(capture)
    manifest = read_manifest(capture)
    result = NcuResult(
        stage=manifest.stage,
        call_index=request.call_index,
        kernel=request.kernel,
        chosen=request.chosen,
        preflight=preflight,
    )
    if not manifest.device.startswith("cuda"):
        reason = f"The capture was made on {manifest.device}, and Nsight Compute profiles kernels of NVIDIA GPUs."
        return result.model_copy(update={"status": "not_applicable", "reason": reason})
    if preflight.obstacle is not None:
        return result.model_copy(update={"status": "not_applicable", "reason": preflight.why_not})
    assert preflight.ncu_path is not None
    report, log, printed = (folder / name for name in (REPORT_FILE, LOG_FILE, PRINTED_FILE))
    for path in (report, log, printed):
        path.unlink(missing_ok=True)
    command = ncu_command(preflight.ncu_path, request.chosen, report, log, _program(request))
    result = result.model_copy(update={"command": command, "artifacts": {"log": LOG_FILE, "printed": PRINTED_FILE}})
    tell(f"ncu on {request.chosen.function}, up to {request.limit_s:g} s")
    code = run_guarded(command, limit_s=request.limit_s, log_path=printed)
    told = read_output(log, printed, has_report=report.is_file())
    if told.obstacle is not None:
        return _refused(result, preflight, told)
    if code is None:
        raise RungError(
            f"ncu did not finish within {request.limit_s:g} s and was ended, with all it had started. Ask for fewer "
            f"launches or sections, or allow more time. It printed last: {tail(log)}."
        )
    if told.matched_nothing or not report.is_file():
        raise _why_no_report(request, told, code, log, printed)
    return _judged(result, request, _read(report, preflight), told, code)


def _program(request: NcuRequest) -> list[str]:
    """The replay script, with nothing of it measured but the one marked call."""
    options = ["--nvtx", "--calls", str(request.call_index), "--json"]
    options += ["--factory", request.factory] if request.factory else []
    return [sys.executable, str(Path(request.capture) / SCRIPT), *options]


def _refused(result: NcuResult, preflight: Preflight, told: Told) -> NcuResult:
    """What only showed when the counters were asked for."""
    assert told.obstacle is not None
    reason = f"ncu says: {'; '.join(told.errors[:3]) or told.obstacle}."
    if told.obstacle == "counters_in_use" and preflight.holders:
        reason += f" Running here: {', '.join(preflight.holders)}."
    found = preflight.stopped_by(told.obstacle, reason)
    return result.model_copy(update={"status": "not_applicable", "reason": found.why_not, "preflight": found})


def _why_no_report(request: NcuRequest, told: Told, code: int, log: Path, printed: Path) -> Exception:
    if told.has_application_failed:
        return WorkloadError(f"The replay failed under ncu. It printed last: {tail(printed)}.")
    if told.matched_nothing:
        seen = list(dict.fromkeys([*map(function_name, told.seen), *map(function_name, request.known_kernels)]))
        skipped = f" after the first {request.chosen.launch_skip}" if request.chosen.launch_skip else ""
        return InputError(
            f"kernel: no launch of {request.chosen.function!r}{skipped} in call {request.call_index} of the replay. "
            f"{near_names(request.chosen.function, seen, 'kernels')}"
        )
    said = f"It says: {'; '.join(told.errors[:3])}." if told.errors else f"It printed last: {tail(log)}."
    how = f"ended with code {code}" if code <= 128 else f"was ended by signal {code - 128}"
    return RungError(f"ncu {how} and wrote no report. {said}")


def _read(report: Path, preflight: Preflight) -> NcuReport:
    """Read the report in a process of its own: a fault of native code costs this rung only."""
    output, printed = report.with_name(_VALUES_FILE), report.with_name(".reader.log")
    command = [sys.executable, "-P", "-m", "perfladder.nsight.report", str(report), str(output)]
    command += [preflight.reader_folder] if preflight.reader_folder else []
    try:
        code = run_guarded(command, limit_s=_READ_LIMIT_S, log_path=printed)
        if code != 0:
            how = "did not finish" if code is None else f"ended with code {code}"
            raise RungError(f"The reader of {report} {how}: {tail(printed)}.")
        return NcuReport.model_validate_json(output.read_bytes())
    finally:
        output.unlink(missing_ok=True)
        printed.unlink(missing_ok=True)


def _judged(result: NcuResult, request: NcuRequest, report: NcuReport, told: Told, code: int) -> NcuResult:
    launches = [_profiled(request, launch, report) for launch in report.launches]
    # Another instantiation of the function is another kernel: it says nothing where the asked one is there as well.
    own = [launch for launch in launches if launch.is_asked_kernel] or launches
    verdict, statement = overall([launch.diagnosis for launch in own])
    return result.model_copy(
        update={
            "launches": launches,
            "values": report.values,
            "verdict": verdict,
            "statement": statement,
            "artifacts": {"report": REPORT_FILE, **result.artifacts},
            "warnings": _warnings(request, launches, told, code),
        }
    )


def _profiled(request: NcuRequest, launch: ReportedLaunch, report: NcuReport) -> ProfiledLaunch:
    return ProfiledLaunch(
        **launch.model_dump(),
        is_asked_kernel=is_same_kernel(request.kernel, launch.demangled_name),
        diagnosis=diagnose(report.metrics_of(launch.index)),
    )


def overall(diagnoses: Sequence[Diagnosis]) -> tuple[Verdict, str]:
    """One verdict over several launches: theirs where they agree."""
    verdicts = {diagnosis.verdict for diagnosis in diagnoses}
    if len(verdicts) == 1:
        return diagnoses[0].verdict, diagnoses[0].statement
    counts = ", ".join(f"{name} {sum(d.verdict == name for d in diagnoses)}" for name in sorted(verdicts))
    return "undecided", f"What limits it is undecided: its launches differ ({counts})."


def _warnings(request: NcuRequest, launches: Sequence[ProfiledLaunch], told: Told, code: int) -> list[ResultWarning]:
    found = []
    if len(launches) < request.chosen.launch_count or code != 0 or told.errors:
        said = f" ncu says: {'; '.join(told.errors[:3])}." if told.errors else ""
        message = f"{len(launches)} of {request.chosen.launch_count} launches are in the report.{said}"
        found.append(ResultWarning(code="NCU_INCOMPLETE", message=message))
    others = [launch.demangled_name for launch in launches if launch.is_asked_kernel is not True]
    if others:
        message = (
            f"{len(others)} of {len(launches)} profiled launches may be another instantiation of "
            f"{request.chosen.function}: {others[0][:200]}. Compare the names; --launch-skip chooses another launch."
        )
        found.append(ResultWarning(code="NCU_OTHER_INSTANTIATION", message=message))
    return found


def _trace_of(kernels: KernelsResult, run_folder: Path) -> Path | None:
    name = kernels.artifacts.get("trace")
    return next((path for path in run_folder.glob(f"*-kernels/{name}")), None) if name else None


def _gpu_of(context: RungContext) -> Gpu | None:
    """The GPU that the workload ran on; None leaves it to the driver, which says if there is none."""
    index = int(context.info.device.partition(":")[2] or 0)
    devices = context.info.environment.devices
    if context.info.environment.accelerator != "cuda" or index >= len(devices) or nvidia_gpu(0) is None:
        return None
    major, _, minor = (devices[index].capability or "0.0").partition(".")
    return Gpu(name=devices[index].name, capability=(int(major), int(minor)))
