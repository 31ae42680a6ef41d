"""`capture` and `StageBenchHarness`: capture a stage of an object that is there, and replay it in a fresh process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfladder.capturing.in_turns import InTurns, InTurnsRequest
from perfladder.capturing.in_turns import measure as measure_in_turns
from perfladder.capturing.store import read_manifest
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import make_empty_folder
from perfladder.in_place import wrap_object
from perfladder.measure_alone import measure_alone
from perfladder.rungs import capture as capture_rung
from perfladder.rungs import harness
from perfladder.rungs.capture import CaptureRequest, CaptureResult
from perfladder.rungs.harness import HarnessRequest, HarnessResult
from perfladder.workload import Workload, WorkloadFile, load_workload, parse_workload

if TYPE_CHECKING:
    from perfladder.kernels.export import ExportResult
    from perfladder.kernels.plan import KernelOptimizationPlan
    from perfladder.kernels.records import StagePlanReplay

Calls = Literal["default", "all"] | Sequence[int]


def capture(
    obj: Any,
    stage: str,
    folder: str | Path,
    *,
    inputs: Mapping[str, Any] | None = None,
    call: str | None = None,
    calls: Calls = "default",
    runs: int = 1,
    warmup_runs: int = 1,
    reference_runs: int | None = None,
    max_bytes: int | None = None,
    redact: bool = False,
    allow_side_effects: bool = False,
    seed: int = 0,
) -> CaptureResult:
    """Save what a stage of an object receives and returns, while the whole object runs in this process.

    Args:
        obj: What to call: a pipeline, a module, any callable, or an object with a method.
        stage: Call site below it, such as `unet`, `vae.decode`, `scheduler.step` or `encoder.layers.3`.
        folder: Where the capture goes; it must not hold anything yet.
        inputs: Keyword arguments of the call.
        call: The method to call, such as `generate`; by default the object itself.
        calls: Which of the stage's calls in a run: `default` (the first, a middle and the last one), `all`, or indices.
        runs: How many runs to capture.
        warmup_runs: Runs before all others, which count for nothing.
        reference_runs: Runs before the captured ones that time the stage's calls in the pipeline; None: 5 to 20, as fit
            into 3 seconds, without those at the begin that do not lie at the level of the rest.
        max_bytes: Limit of the tensors' bytes; None: a quarter of the free disk, 4 GiB at most.
        redact: Replace texts and numbers by meaningless ones of the same form: a capture holds users' prompts and
            pictures.
        allow_side_effects: Also where the stage writes files, starts processes or opens connections.
        seed: Set before every run.

    Returns:
        What was captured; `status` is `not_applicable`, with the reason, where the stage cannot be replayed alone.

    Raises:
        InputError: The stage, a call or an input is wrong, or the folder holds something.
        RungError: The stage was not called.
        WorkloadError: The object raised.
    """
    request = capture_request(
        stage,
        folder,
        calls=calls,
        runs=runs,
        warmup_runs=warmup_runs,
        reference_runs=reference_runs,
        max_bytes=max_bytes,
        redact=redact,
        allow_side_effects=allow_side_effects,
    )
    try:
        return capture_rung.measure(wrap_object(obj, inputs, call=call, seed=seed), request)
    finally:
        _drop_if_empty(Path(request.folder))


def capture_request(stage: str, folder: str | Path, **options: Any) -> CaptureRequest:
    """Check what to capture and where.

    Raises:
        InputError: A value is wrong, or the folder holds something.
    """
    from pydantic import ValidationError

    from perfladder.models import input_error

    path = Path(folder).absolute()
    make_empty_folder(path)
    calls = options.get("calls", "default")
    if not isinstance(calls, (str, Sequence)):
        raise InputError(f"calls: expected 'default', 'all', or indices such as [0, -1], not {calls!r}.")
    options["calls"] = calls if isinstance(calls, str) else list(calls)
    options.setdefault("warmup_runs", 1)
    try:
        return CaptureRequest(stage=stage, folder=str(path), **options)
    except ValidationError as error:
        _drop_if_empty(path)
        raise input_error(error, CaptureRequest, "capture") from error


def _drop_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


class StageBenchHarness:
    """Replays a capture in a process of its own, which loads only the stage.

    Args:
        folder: The capture.
        workload: What the capture was made of: a file, the name of a built-in, or a `Workload`. Its target is built,
            and all but the stage is dropped before anything is moved to the device, if the factory does not move it.
        factory: Instead of a workload a `module:function` or `file.py:function` that returns the stage alone, or the
            object whose method it is.
        factory_args: Arguments of that factory.
        device: With a factory: where to run; by default where the capture was made.
        log_path: Receives what the process prints; by default a temporary file.

    A capture never says what to load: that comes from you.

    Raises:
        InputError: Neither or both of workload and factory are given.
        CaptureError: The folder is no capture, or a damaged one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        workload: str | Path | Workload | WorkloadFile | None = None,
        factory: str | None = None,
        factory_args: Mapping[str, Any] | None = None,
        device: str | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        if (workload is None) == (factory is None):
            raise InputError(
                "Give either the workload that the capture was made of, or a factory (module:function) of the stage."
            )
        self.folder = Path(folder).absolute()
        self.manifest = read_manifest(self.folder)
        self._log_path = None if log_path is None else Path(log_path)
        self._has_pipeline = factory is None
        if factory is not None:
            self._path = self.manifest.method if self.manifest.method not in (None, "__call__") else ""
            fields = {"name": "stage", "target": factory, "target_args": dict(factory_args or {})}
            self._file = WorkloadFile(
                parse_workload({**fields, "device": device or self.manifest.device}, what="factory"), Path.cwd()
            )
            return
        self._path = self.manifest.stage
        if isinstance(workload, Workload):
            self._file = WorkloadFile(workload, Path.cwd())
        else:
            self._file = workload if isinstance(workload, WorkloadFile) else load_workload(str(workload))
        if self._file.workload.nproc > 1:
            raise NotPossibleHereError("nproc: a stage that runs on several ranks cannot be replayed in one process.")

    def run(
        self,
        *,
        repeats: int = 20,
        synthetic: bool = False,
        in_turns: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> HarnessResult:
        """Load the stage in a fresh process, replay every captured call, and judge the replay.

        Args:
            repeats: Timed repeats of each captured call.
            synthetic: Random numbers in place of the captured ones; nothing is then proven.
            in_turns: Where only the time keeps a replay from being faithful, load the whole target in another process,
                and let replays and runs of the pipeline take turns there.
            tell: Receives lines of progress.

        Raises:
            CaptureError: The capture cannot be used on this target.
            InputError: `in_turns` with a factory, which gives the stage alone.
            WorkloadError: The target could not be built, or the stage raised.
        """
        if in_turns and not self._has_pipeline:
            raise InputError("in_turns: a factory gives the stage alone, and no pipeline. Give the workload instead.")
        request = HarnessRequest(folder=str(self.folder), repeats=repeats, path=self._path, synthetic=synthetic)
        result = measure_alone(
            self._file, harness.measure, request, only=self._path, log_path=self._log_path, tell=tell, what="replaying"
        )
        if not in_turns:
            return result

        def take_turns(turns: InTurnsRequest) -> InTurns:
            return measure_alone(
                self._file, measure_in_turns, turns, log_path=self._log_path, tell=tell, what="replaying in turns"
            )

        return harness.decide_in_turns(result, str(self.folder), take_turns)

    def run_with_plan(
        self,
        plan: KernelOptimizationPlan,
        *,
        pairs: int = 20,
        tolerances: Mapping[str, float] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> StagePlanReplay:
        """Replay every captured call in a fresh process with a kernel plan and without, in turns.

        Args:
            plan: Its providers have to be known there: those of the library, of installed packages, or those that the
                factory's own file registers.
            pairs: Timed replays of each side of each call.
            tolerances: Largest accepted error by dtype, relative to the largest magnitude; None: as in tuning.
            tell: Receives lines of progress.

        Raises:
            CaptureError: The capture cannot be used on this target.
            InputError: The stage is no module, or a provider is not known there.
            WorkloadError: The target could not be built, or the stage raised.
        """
        from perfladder.kernels import stage

        request = stage.StagePlanRequest(
            folder=str(self.folder),
            path=self._path,
            plan=plan.model_copy(update={"records": []}).to_dict(),
            pairs=pairs,
            tolerances=dict(tolerances or {}),
        )
        return measure_alone(
            self._file, stage.measure, request, only=self._path, log_path=self._log_path, tell=tell, what="replaying"
        )

    def export(
        self, function: str, folder: str | Path, *, limit: int = 8, tell: Callable[[str], None] = lambda _: None
    ) -> ExportResult:
        """Replay the captured calls in a fresh process, and write a benchmark folder of one function called inside.

        Args:
            function: Its name, such as `linear` or `Tensor.matmul`.
            folder: Where to; it must not hold anything yet.
            limit: Forms of call at most, those with most calls first.
            tell: Receives lines of progress.

        Raises:
            CaptureError: The capture cannot be used on this target.
            InputError: There is no such function, the stage is no module, or the folder holds something.
            RungError: The stage makes no call of it whose inputs can be written.
            WorkloadError: The target could not be built, or the stage raised.
        """
        from perfladder.kernels import export

        request = export.ExportRequest(
            capture=str(self.folder),
            folder=str(Path(folder).absolute()),
            function=function,
            path=self._path,
            limit=limit,
        )
        make_empty_folder(Path(request.folder))
        try:
            return measure_alone(
                self._file,
                export.measure,
                request,
                only=self._path,
                log_path=self._log_path,
                tell=tell,
                what="replaying",
            )
        finally:
            _drop_if_empty(Path(request.folder))


def capture_workload(
    file: WorkloadFile, request: CaptureRequest, *, tell: Callable[[str], None] = lambda _: None
) -> CaptureResult:
    """Capture a stage of a workload in a process of its own.

    Raises:
        NotPossibleHereError: The workload runs on several ranks.
        PerfladderError: As `capture`.
    """
    if file.workload.nproc > 1:
        raise NotPossibleHereError("nproc: a stage that runs on several ranks cannot be captured alone.")
    try:
        return measure_alone(file, capture_rung.measure, request, tell=tell, what="capturing")
    finally:
        _drop_if_empty(Path(request.folder))
