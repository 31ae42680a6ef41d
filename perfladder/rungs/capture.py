"""Rung 3, first half: save what the dominating stage receives and returns in the pipeline. Cost: a few plain runs."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, StrictInt

from perfladder.capturing.decode import not_rebuildable
from perfladder.capturing.encode import Encoder
from perfladder.capturing.nodes import forms_of, leaves_of
from perfladder.capturing.plain_calls import PlainCall, time_plain_run
from perfladder.capturing.script import SCRIPT, write_script
from perfladder.capturing.store import MANIFEST, TENSORS, CapturedCall, Manifest, write_capture
from perfladder.capturing.types import capture_types
from perfladder.capturing.yardstick import Yardstick
from perfladder.environment import take_snapshot
from perfladder.errors import InputError, NotPossibleHereError, RungError
from perfladder.instrument import Site
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.cost import CostEstimate
from perfladder.rungs.stages import StagesResult
from perfladder.sites import resolve_site
from perfladder.steady import warmup_end
from perfladder.target import LoadedTarget
from perfladder.timing.timer import StageTimer

if TYPE_CHECKING:
    from perfladder.capturing.recorder import Recorder

_MAX_BYTES = 4 << 30
_DISK_SHARE = 4
_LEAST_REFERENCE_RUNS, _MOST_REFERENCE_RUNS = 5, 20
_REFERENCE_BUDGET_S = 3.0


class CaptureRequest(Model):
    """Which stage, which of its calls, and how much may be stored."""

    stage: str
    folder: str
    calls: Literal["default", "all"] | Annotated[list[StrictInt], Field(min_length=1)] = Field(
        default="default", description="Indices in a run; `default` is the first, a middle and the last one."
    )
    runs: int = Field(default=1, gt=0, description="How many runs are captured.")
    warmup_runs: int = Field(
        default=0, ge=0, description="Runs before those; rung 1 has warmed the process up already."
    )
    reference_runs: int | None = Field(
        default=None,
        gt=0,
        description="Runs that time the stage's calls, as the reference; None: 5 to 20, as fit into 3 seconds, without "
        "those at the begin that do not lie at the level of the rest.",
    )
    max_bytes: int | None = Field(
        default=None, gt=0, description="Limit of the tensors' bytes; None: a quarter of the free disk, 4 GiB at most."
    )
    redact: bool = Field(default=False, description="Replace texts and numbers by meaningless ones of the same form.")
    allow_side_effects: bool = Field(
        default=False, description="Also where the stage writes files, starts processes or opens connections."
    )


class CaptureResult(RungResult):
    """Which calls were captured, or why the stage cannot be replayed alone."""

    rung: str = "capture"
    stage: str | None = None
    folder: str | None = None
    calls_per_run: int = 0
    captured_calls: list[int] = Field(default=[], description="Indices in their run, run after run.")
    input_signature: dict[str, str] = {}
    mutated_inputs: list[str] = []
    changed_state: list[str] = Field(default=[], description="Parts of the stage's own state that its calls changed.")
    num_bytes: int = 0
    max_bytes: int | None = Field(default=None, description="The limit that was in force.")
    is_redacted: bool = False
    side_effects: list[str] = Field(default=[], description="What the captured calls did to the outside.")
    not_stored: dict[str, str] = {}


def estimate(context: RungContext) -> CostEstimate:
    """Plain runs; how large the stage's inputs are is not known before they are seen."""
    stages = context.result(StagesResult)
    if stages is None or stages.dominating is None:
        return CostEstimate(basis="no stage to capture")
    run_ms = stages.default.wall_ms.summary.p50
    runs = _reference_runs_in(run_ms) + 1
    return CostEstimate(time_s=runs * run_ms / 1000, basis=f"{runs} plain runs of {run_ms:.3g} ms, and writing")


def run(context: RungContext, request: CaptureRequest | None = None) -> CaptureResult:
    """Capture the dominating stage in the broad session, before anything there is profiled."""
    stages = context.result(StagesResult)
    if stages is None or stages.dominating is None:
        return CaptureResult(status="not_applicable", reason="No stage dominates, so there is none to replay alone.")
    request = request or CaptureRequest(stage=stages.dominating, folder=str(context.folder))
    result = context.broad.call(measure, request, timeout_s=context.workload.timeout_s)
    # Relative to the run, so that a run directory can be moved.
    return result.model_copy(update={"folder": context.folder.name}) if result.folder else result


def measure(loaded: LoadedTarget, request: CaptureRequest) -> CaptureResult:
    """Time the stage's calls in a few runs, then save the chosen ones in one more, or in several.

    Raises:
        InputError: The stage, or a chosen call, does not exist.
        RungError: The stage was not called.
        WorkloadError: The workload raised.
    """
    # This brings torch, which the ladder's own process does without.
    from perfladder.capturing.recorder import Recorder

    site = resolve_site(loaded.obj, request.stage, field_name="stage")
    result = CaptureResult(stage=request.stage, max_bytes=_limit_of(request), is_redacted=request.redact)
    for _ in range(request.warmup_runs):
        loaded.prepare_run()
        loaded.run()
    reference = _reference(loaded, site, request.reference_runs)
    if isinstance(reference, str):
        return _refused(result, f"Stage {request.stage!r}: {reference}.")
    num_calls = min(map(len, reference.runs))
    if num_calls == 0:
        raise RungError(f"Stage {request.stage!r} was not called in a run of the workload, so nothing can be captured.")
    chosen = choose_calls(request.calls, num_calls)
    encoder = Encoder(max_bytes=result.max_bytes, redact=request.redact)
    recorder = Recorder(loaded, lambda index: chosen is None or index in chosen, encoder, redact=request.redact)
    for number in range(request.runs):
        recorder.record_run(site, number)
    result = result.model_copy(update={"calls_per_run": num_calls, "not_stored": encoder.unsupported})
    if reason := _not_replayable(request, recorder, result):
        effects = list(dict.fromkeys(what for call in recorder.calls for what in call.side_effects))
        return _refused(result.model_copy(update={"side_effects": effects}), reason)
    return _write(loaded, request, site, recorder, reference, result)


def choose_calls(wanted: Literal["default", "all"] | Sequence[int], num_calls: int) -> set[int] | None:
    """Indices of the calls of a run to capture; None is all of them.

    Raises:
        InputError: There is no such call.
    """
    if wanted == "all":
        return None
    if wanted == "default":
        return {0, num_calls // 2, num_calls - 1}
    if bad := [index for index in wanted if not -num_calls <= index < num_calls]:
        raise InputError(f"calls: the stage is called {num_calls} times a run, so there is no call {bad[0]}.")
    return {index % num_calls for index in wanted}


def _limit_of(request: CaptureRequest) -> int:
    if request.max_bytes is not None:
        return request.max_bytes
    folder = Path(request.folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return int(min(_MAX_BYTES, shutil.disk_usage(there).free / _DISK_SHARE))


def _refused(result: CaptureResult, reason: str) -> CaptureResult:
    return result.model_copy(update={"status": "not_applicable", "reason": reason})


def _not_replayable(request: CaptureRequest, recorder: Recorder, result: CaptureResult) -> str | None:
    """Why the stage cannot be replayed alone, as far as its calls in the pipeline tell."""
    stage = f"Stage {request.stage!r}"
    if recorder.streams_output:
        return f"{stage} streams its output or is awaited, so no single call of it can be replayed."
    if not recorder.calls and recorder.num_over_budget:
        return (
            f"{stage}: one call alone needs more than the limit of {result.max_bytes} bytes. Allow more (max_bytes), "
            "free disk space, or use a smaller shape."
        )
    if not recorder.calls and recorder.num_raised:
        return f"{stage}: the chosen calls raised, though the pipeline went on, so there is nothing to compare with."
    if not recorder.calls:
        raise RungError(f"{stage} was called in earlier runs, but not in the one that was to be captured.")
    types = capture_types()
    blocking = {path: why for call in recorder.calls for path, why in not_rebuildable(call.inputs, types).items()}
    if blocking:
        return f"{stage} cannot be replayed alone. {'; '.join(f'{path}: {why}' for path, why in blocking.items())}."
    if recorder.changed_weights:
        names = list(recorder.changed_weights)
        return f"{stage} cannot be replayed alone: it changes its own weights ({', '.join(names[:3])}; {len(names)})."
    effects = dict.fromkeys(what for call in recorder.calls for what in call.side_effects)
    if effects and not request.allow_side_effects:
        return (
            f"{stage} is not replayed: each call {'; '.join(list(effects)[:5])}, and so would each repeat. "
            "Allow it (allow_side_effects) if that does no harm."
        )
    return None


def _write(
    loaded: LoadedTarget,
    request: CaptureRequest,
    site: Site,
    recorder: Recorder,
    reference: _Reference,
    result: CaptureResult,
) -> CaptureResult:
    import torch

    from perfladder import __version__

    calls = [
        _with_reference(call, [run[call.index] for run in reference.runs])
        for call in sorted(recorder.calls, key=lambda call: (call.run, call.index))
        if all(call.index < len(run) for run in reference.runs)
    ]
    first, calls = recorder.without_repeated_state(calls)
    snapshot = take_snapshot()
    manifest = Manifest(
        perfladder_version=__version__,
        torch_version=torch.__version__,
        stage=request.stage,
        owner_type=site.owner_type,
        method=site.method,
        device=str(loaded.device),
        work_digest=loaded.workload.fingerprints.work.digest,
        calls_per_run=result.calls_per_run,
        calls=calls,
        owner_state=first,
        storages=recorder.encoder.storages,
        num_storages=0,
        is_redacted=request.redact,
        yardstick_ms=reference.yardstick_ms,
        load_average_1m=snapshot.load_average_1m,
        sm_clock_mhz=next((device.sm_clock_mhz for device in snapshot.devices), None),
        sha256={},
    )
    num_bytes = _write_folder(Path(request.folder), manifest, recorder, loaded)
    warnings = []
    if recorder.num_over_budget:
        count = recorder.num_over_budget
        message = f"{count} chosen calls were not captured: the limit of {result.max_bytes} bytes was reached."
        warnings.append(ResultWarning(code="CAPTURE_BUDGET_REACHED", message=message))
    if recorder.num_raised:
        message = f"{recorder.num_raised} chosen calls raised, though the pipeline went on; they were left out."
        warnings.append(ResultWarning(code="CAPTURED_CALLS_RAISED", message=message))
    if request.redact:
        message = "Texts and numbers were replaced, so the replay's output cannot be compared with the pipeline's."
        warnings.append(ResultWarning(code="CAPTURE_REDACTED", message=message))
    return result.model_copy(
        update={
            "folder": request.folder,
            "artifacts": {"manifest": MANIFEST, "tensors": TENSORS, "script": SCRIPT},
            "captured_calls": [call.index for call in calls],
            "input_signature": forms_of(leaves_of(calls[0].inputs)),
            "mutated_inputs": sorted({path for call in calls for path in call.mutated}),
            "changed_state": sorted({path for call in calls for path in call.state_after}),
            "side_effects": list(dict.fromkeys(what for call in calls for what in call.side_effects)),
            "num_bytes": num_bytes,
            "warnings": warnings,
        }
    )


def _write_folder(folder: Path, manifest: Manifest, recorder: Recorder, loaded: LoadedTarget) -> int:
    """Write all files of the capture, the manifest last; of one that cannot be written nothing stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_script(folder, manifest, loaded.workload, loaded.base_dir)
        return write_capture(folder, manifest, recorder.encoder.blocks)
    except BaseException as error:
        for name in (MANIFEST, TENSORS, SCRIPT):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise NotPossibleHereError(f"The capture cannot be written to {folder}: {error.strerror}.") from error
        raise


class _Reference(NamedTuple):
    """Each call of the stage in plain runs of the pipeline, runs x calls, and the yardstick beside each run."""

    runs: list[list[PlainCall]]
    yardstick_ms: list[float]

    def steady(self) -> _Reference:
        """Without the runs at the begin that do not lie at the level of the rest, if that can be told."""
        totals = [sum(call.duration_ms for call in run) for run in self.runs]
        if min(totals) <= 0:
            return self
        end = warmup_end(totals, limit=len(totals) // 2)
        begin = end.index if end.is_steady else 0
        return _Reference(self.runs[begin:], self.yardstick_ms[begin:])


def _reference(loaded: LoadedTarget, site: Site, num_runs: int | None) -> _Reference | str:
    """Time the stage's calls in plain runs; or tell why they cannot be seen."""
    timer, yardstick = StageTimer(time.perf_counter_ns, loaded.device), Yardstick()
    reference = _Reference([], [])
    start, wanted = time.perf_counter(), num_runs
    while wanted is None or len(reference.runs) < wanted:
        reference.yardstick_ms.append(yardstick.time_ms())
        plain = time_plain_run(loaded, site, timer)
        if isinstance(plain, str):
            return plain
        reference.runs.append(plain)
        mean_ms = 1000 * (time.perf_counter() - start) / len(reference.runs)
        wanted = num_runs or _reference_runs_in(mean_ms)
    return reference if num_runs is not None else reference.steady()


def _reference_runs_in(run_ms: float) -> int:
    """How many runs of that length are the reference."""
    return int(min(_MOST_REFERENCE_RUNS, max(_LEAST_REFERENCE_RUNS, 1000 * _REFERENCE_BUDGET_S / max(run_ms, 1e-3))))


def _with_reference(call: CapturedCall, plain: Sequence[PlainCall]) -> CapturedCall:
    leads = [one.host_lead_ms for one in plain if one.host_lead_ms is not None]
    return call.model_copy(update={"in_pipeline_ms": [one.duration_ms for one in plain], "host_lead_ms": leads})
