"""Rung 3, first half: save what the dominating stage receives and returns in the pipeline. Cost: a few plain runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import Field

from perfladder.capture.store import CallContext, CapturedCall, Manifest, write_capture
from perfladder.capture.values import Encoder, Node
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
            "context": _context(site.owner if site.is_module else None),
            "rng": self.encoder.encode(_rng_states(self.loaded)),
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
        from perfladder.capture.values import Decoder, leaves

        after_encoder = Encoder()
        after = after_encoder.encode({"args": args, "kwargs": kwargs})
        before_decoder, after_decoder = Decoder(self.encoder.storages), Decoder(after_encoder.storages)
        changed = []
        for root in ("args", "kwargs"):
            olds, news = leaves(inputs[root], root), leaves(after[root], root)
            for path in olds:
                if path not in news or not _same_leaf(olds[path], news[path], before_decoder, after_decoder):
                    changed.append(path)
        return changed


def run(context: RungContext, request: CaptureRequest | None = None) -> CaptureResult:
    """Capture the dominating stage in the broad session, before anything there is profiled."""
    stages = context.result(StagesResult)
    if stages is None or stages.dominating is None:
        return CaptureResult(status="not_applicable", reason="No stage dominates, so there is none to replay alone.")
    request = request or CaptureRequest(stage=stages.dominating, folder=str(context.folder))
    return context.broad.call(measure, request, timeout_s=context.workload.timeout_s)


def measure(loaded: LoadedTarget, request: CaptureRequest) -> CaptureResult:
    """Time the stage's calls in a few runs, then save its first, a middle and its last call in one more.

    Raises:
        InputError: The stage does not exist.
        WorkloadError: The workload raised.
    """
    site = resolve_site(loaded.obj, request.stage)
    reference_ms = _reference_ms(loaded, site, request.reference_runs)
    num_calls = min(len(times) for times in reference_ms)
    if num_calls == 0:
        raise RungError(f"Stage {request.stage!r} was not called in a run of the workload, so nothing can be captured.")
    chosen = sorted({0, num_calls // 2, num_calls - 1})
    recorder = _Recorder(loaded, set(chosen), request.max_bytes)
    loaded.prepare_run()
    with instrument([site], recorder):
        loaded.run()
    result = CaptureResult(stage=request.stage, calls_per_run=num_calls, not_stored=recorder.encoder.unsupported)
    if recorder.streams_output:
        reason = f"Stage {request.stage!r} streams its output, so no single call of it can be replayed."
        return result.model_copy(update={"status": "not_applicable", "reason": reason})
    blocking = {path: why for path, why in recorder.encoder.unsupported.items() if path.startswith(("args", "kwargs"))}
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
        call.model_copy(update={"in_pipeline_ms": [times[call.index] for times in reference_ms]}) for call in recorder.calls
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
        message = f"{recorder.num_over_budget} chosen calls were not captured: the limit of {request.max_bytes} bytes was reached."
        warnings.append(ResultWarning(code="CAPTURE_BUDGET_REACHED", message=message))
    return result.model_copy(
        update={
            "folder": request.folder,
            "captured_calls": [call.index for call in calls],
            "input_signature": _signature(calls[0]),
            "mutated_inputs": sorted({path for call in calls for path in call.mutated}),
            "num_bytes": num_bytes,
            "warnings": warnings,
        }
    )


def _reference_ms(loaded: LoadedTarget, site: Site, num_runs: int) -> list[list[float]]:
    """Duration of each call of the stage in unprofiled runs of the pipeline: runs x calls."""
    timer = StageTimer(time.perf_counter_ns, loaded.device)
    runs = []
    for _ in range(num_runs):
        loaded.prepare_run()
        with instrument([site], timer):
            loaded.run()
            loaded.synchronize()
        calls = sorted((call for call in timer.take() if not call.is_item), key=lambda call: call.start_ns)
        runs.append(
            [c.events[0].elapsed_time(c.events[1]) if c.events else c.duration_ns / _NS_PER_MS for c in calls]
        )
    return runs


def _signature(call: CapturedCall) -> dict[str, str]:
    from perfladder.capture.values import leaves

    signature = {}
    for root, node in call.inputs.items():
        for path, leaf in leaves(node, root).items():
            if leaf.tensor is not None:
                signature[path] = f"{leaf.tensor.dtype} {leaf.tensor.size} on {leaf.tensor.device}"
            elif leaf.kind == "plain":
                signature[path] = repr(leaf.value)
    return signature


def _same_leaf(old: Node, new: Node, old_decoder: Any, new_decoder: Any) -> bool:
    import torch

    if old.kind != new.kind:
        return False
    if old.tensor is None or new.tensor is None:
        return old.value == new.value
    left, right = old_decoder.decode({"": old})[""], new_decoder.decode({"": new})[""]
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8) if left.dim() else left.reshape(1).view(torch.uint8),
        right.contiguous().view(torch.uint8) if right.dim() else right.reshape(1).view(torch.uint8),
    )


def _context(module: Any) -> CallContext:
    import torch

    autocast_device = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
    return CallContext(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast_dtype=str(torch.get_autocast_dtype(autocast_device)).removeprefix("torch.") if autocast_device else None,
        training=module.training if module is not None else None,
    )


def _rng_states(loaded: LoadedTarget) -> dict[str, Any]:
    import torch

    states = {"cpu": torch.get_rng_state()}
    if loaded.device.type != "cpu":
        states["device"] = torch.get_device_module(loaded.device).get_rng_state(loaded.device)
    return states


def _is_module(owner: Any) -> bool:
    from torch import nn

    return isinstance(owner, nn.Module)


def _plain_state(site: Site) -> dict[str, Any]:
    """Attributes of a plain object, such as a scheduler's counters; methods of ours among them are left out."""
    return {f"{name}": value for name, value in vars(site.owner).items() if not callable(value)}
