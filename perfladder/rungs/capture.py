"""Rung 3, first half: save what the dominating stage receives and returns in the pipeline. Cost: a few plain runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from perfladder.capture.compare import Encoded, compare_values
from perfladder.capture.records import not_rebuildable, record_types
from perfladder.capture.store import MANIFEST, TENSORS, CallContext, CapturedCall, Manifest, write_capture
from perfladder.capture.values import Encoder, Node, leaves
from perfladder.errors import RungError
from perfladder.instrument import Observer, Site, instrument, resolve_site
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.stages import StagesResult, StageTimer
from perfladder.target import LoadedTarget

_NS_PER_MS = 1e6


class CaptureRequest(Model):
    """Which stage, which of its calls, and how much may be stored."""

    stage: str
    folder: str
    reference_runs: int = Field(default=5, gt=0, description="Runs that time the stage's calls, as the reference.")
    max_bytes: int = Field(default=4 << 30, gt=0)


class CaptureResult(RungResult):
    """Which calls were captured, or why the stage cannot be replayed alone."""

    rung: str = "capture"
    stage: str | None = None
    folder: str | None = None
    calls_per_run: int = 0
    captured_calls: list[int] = []
    input_signature: dict[str, str] = {}
    mutated_inputs: list[str] = []
    num_bytes: int = 0
    not_stored: dict[str, str] = {}


class _Recorder(Observer):
    """Copies the inputs of the chosen calls before they run, and their outputs after."""

    def __init__(self, loaded: LoadedTarget, chosen: set[int], max_bytes: int) -> None:
        self.loaded = loaded
        self.chosen = chosen
        self.max_bytes = max_bytes
        self.encoder = Encoder()
        self.calls: list[CapturedCall] = []
        self.num_seen = 0
        self.num_over_budget = 0
        self.streams_output = False

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Encode the inputs of a chosen call, with all that surrounds it."""
        index, self.num_seen = self.num_seen, self.num_seen + 1
        if index not in self.chosen:
            return None
        if sum(storage.nbytes for storage in self.encoder.storages) > self.max_bytes:
            self.num_over_budget += 1
            return None
        return index, {
            "values": (args, kwargs),
            "inputs": self.encoder.encode({"args": args, "kwargs": kwargs}),
            "context": _context(site.owner if _is_module(site.owner) else None),
            "rng": self.encoder.encode(rng_states(self.loaded)),
            "owner_state": {} if _is_module(site.owner) else self.encoder.encode(_plain_state(site)),
        }

    def leave(self, site: Site, token: tuple[int, dict[str, Any]] | None, result: Any) -> None:
        """Encode what the call returned, and see which inputs it changed in place."""
        if token is None:
            return
        index, draft = token
        args, kwargs = draft.pop("values")
        draft["mutated"] = self._mutated(draft["inputs"], args, kwargs)
        self.calls.append(CapturedCall(index=index, output=self.encoder.encode({"output": result})["output"], **draft))

    def enter_item(self, site: Site) -> None:
        """A stage that streams its output cannot be replayed as one call."""
        self.streams_output = True

    def _mutated(self, inputs: dict[str, Node], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        encoder = Encoder()
        after = Encoded(encoder.encode({"args": args, "kwargs": kwargs}), encoder.storages)
        return sorted(compare_values(Encoded(inputs, self.encoder.storages), after))


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
    """Time the stage's calls in a few runs, then save its first, a middle and its last call in one more.

    Raises:
        InputError: The stage does not exist.
        WorkloadError: The workload raised.
    """
    site = resolve_site(loaded.obj, request.stage)
    reference_ms, unobservable = _reference_ms(loaded, site, request.reference_runs)
    if unobservable:
        return CaptureResult(
            status="not_applicable", stage=request.stage, reason=f"Stage {request.stage!r}: {unobservable}."
        )
    num_calls = min(len(times) for times in reference_ms)
    if num_calls == 0:
        raise RungError(f"Stage {request.stage!r} was not called in a run of the workload, so nothing can be captured.")
    chosen = sorted({0, num_calls // 2, num_calls - 1})
    recorder = _Recorder(loaded, set(chosen), request.max_bytes)
    loaded.prepare_run()
    with instrument([site], recorder):
        loaded.run()
    recorder.calls.sort(key=lambda call: call.index)
    result = CaptureResult(stage=request.stage, calls_per_run=num_calls, not_stored=recorder.encoder.unsupported)
    if recorder.streams_output:
        reason = f"Stage {request.stage!r} streams its output or is awaited, so no single call of it can be replayed."
        return result.model_copy(update={"status": "not_applicable", "reason": reason})
    types = record_types()
    blocking = {path: why for call in recorder.calls for path, why in not_rebuildable(call.inputs, types).items()}
    if not recorder.calls:
        raise RungError(
            f"Stage {request.stage!r} was called in earlier runs, but not in the one that was to be captured."
        )
    if blocking:
        listed = "; ".join(f"{path}: {why}" for path, why in blocking.items())
        reason = f"Stage {request.stage!r} cannot be replayed alone. {listed}."
        return result.model_copy(update={"status": "not_applicable", "reason": reason})
    return _write(loaded, request, site, recorder, reference_ms, result)


def _write(
    loaded: LoadedTarget,
    request: CaptureRequest,
    site: Site,
    recorder: _Recorder,
    reference_ms: list[list[float]],
    result: CaptureResult,
) -> CaptureResult:
    import torch

    from perfladder import __version__

    calls = [
        call.model_copy(update={"in_pipeline_ms": [times[call.index] for times in reference_ms]})
        for call in recorder.calls
    ]
    manifest = Manifest(
        perfladder_version=__version__,
        torch_version=torch.__version__,
        stage=request.stage,
        owner_type=site.owner_type,
        device=str(loaded.device),
        work_digest=loaded.workload.fingerprints.work.digest,
        calls_per_run=result.calls_per_run,
        calls=calls,
        num_storages=0,
        sha256={},
    )
    num_bytes = write_capture(Path(request.folder), manifest, recorder.encoder.storages)
    warnings = []
    if recorder.num_over_budget:
        count = recorder.num_over_budget
        message = f"{count} chosen calls were not captured: the limit of {request.max_bytes} bytes was reached."
        warnings.append(ResultWarning(code="CAPTURE_BUDGET_REACHED", message=message))
    return result.model_copy(
        update={
            "folder": request.folder,
            "artifacts": {"manifest": MANIFEST, "tensors": TENSORS},
            "captured_calls": [call.index for call in calls],
            "input_signature": _signature(calls[0]),
            "mutated_inputs": sorted({path for call in calls for path in call.mutated}),
            "num_bytes": num_bytes,
            "warnings": warnings,
        }
    )


def _reference_ms(loaded: LoadedTarget, site: Site, num_runs: int) -> tuple[list[list[float]], str | None]:
    """Duration of each call of the stage in unprofiled runs of the pipeline: runs x calls; or why it cannot be seen."""
    timer = StageTimer(time.perf_counter_ns, loaded.device)
    runs = []
    for _ in range(num_runs):
        loaded.prepare_run()
        with instrument([site], timer) as state:
            if site.path in state.unobservable:
                return [], state.unobservable[site.path]
            loaded.run()
            loaded.synchronize()
        calls = sorted((call for call in timer.take() if not call.is_item), key=lambda call: call.start_ns)
        runs.append([c.events[0].elapsed_time(c.events[1]) if c.events else c.duration_ns / _NS_PER_MS for c in calls])
    return runs, None


def _signature(call: CapturedCall) -> dict[str, str]:
    signature = {}
    for root, node in call.inputs.items():
        for path, leaf in leaves(node, root).items():
            if leaf.tensor is not None:
                signature[path] = f"{leaf.tensor.dtype} {leaf.tensor.size} on {leaf.tensor.device}"
            elif leaf.kind == "plain":
                signature[path] = repr(leaf.value)
    return signature


def _context(module: Any) -> CallContext:
    import torch

    autocast_device = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
    return CallContext(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast_dtype=str(torch.get_autocast_dtype(autocast_device)).removeprefix("torch.")
        if autocast_device
        else None,
        training=module.training if module is not None else None,
    )


def rng_states(loaded: LoadedTarget) -> dict[str, Any]:
    """The state of every generator that a stage may draw from without being handed it."""
    import numpy as np
    import torch

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": [version, np.array(numbers, dtype=np.uint64), gauss],
        "numpy": [name, keys, int(position), int(has_gauss), float(cached)],
    }
    if loaded.device.type != "cpu":
        states["device"] = torch.get_device_module(loaded.device).get_rng_state(loaded.device)
    return states


def _is_module(owner: Any) -> bool:
    from torch import nn

    return isinstance(owner, nn.Module)


def _plain_state(site: Site) -> dict[str, Any]:
    """Attributes of a plain object, such as a scheduler's counters; methods of ours among them are left out."""
    return {name: value for name, value in getattr(site.owner, "__dict__", {}).items() if not callable(value)}
