"""Rung 3, isolated harness: does the stage, alone in a fresh process on captured inputs, behave as in the pipeline?"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from perfladder.capture.compare import Encoded, compare_values
from perfladder.capture.records import not_rebuildable, record_types
from perfladder.capture.store import CapturedCall, Manifest, read_manifest, read_storages
from perfladder.capture.values import Decoder, Encoder, Node, leaves
from perfladder.errors import CaptureError, RungError
from perfladder.instrument import Site, resolve_site
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.stats import Interval, Samples, bootstrap_interval, ratio_of_medians
from perfladder.target import LoadedTarget, user_code

_NS_PER_MS = 1e6
_WARMUP_REPEATS = 3
TIMING_TOLERANCE = 0.05
"""A replay is faithful in time if its ratio to the pipeline is within 1 +- this, not if its interval is outside."""


class HarnessRequest(Model):
    """Which capture to replay, and how often."""

    folder: str
    repeats: int = Field(default=20, gt=0, description="Timed repeats of each captured call.")


class Parity(Model):
    """How far a replayed output is from the captured one."""

    verdict: Literal["exact", "within_tolerance", "different"]
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    differing: dict[str, str] = {}


class CallReplay(Model):
    """One captured call, replayed."""

    index: int
    parity: Parity
    second_replay_differs: bool
    in_pipeline_ms: Samples
    replayed_ms: Samples


class HarnessResult(RungResult):
    """Whether the replay stands for the stage in the pipeline."""

    rung: str = "harness"
    stage: str | None = None
    signature: dict[str, str] = {}
    calls: list[CallReplay] = []
    parity: Literal["exact", "within_tolerance", "different"] | None = None
    timing_ratio: float | None = Field(default=None, description="Replayed over in-pipeline time, medians.")
    timing_ratio_interval: Interval | None = None
    is_timing_faithful: bool | None = Field(default=None, description="None where the interval cannot tell.")
    is_faithful: bool | None = Field(default=None, description="Same output and same duration; None if undecided.")
    unfaithful_because: list[str] = []


class Replay:
    """The stage of a capture on a loaded target: restores each call's inputs and state, and makes the call.

    Raises:
        CaptureError: The capture is damaged or holds what cannot be rebuilt.
        InputError: The target has no such stage.
    """

    def __init__(self, loaded: LoadedTarget, folder: Path) -> None:
        self.loaded = loaded
        self.manifest: Manifest = read_manifest(folder)
        self.site: Site = resolve_site(loaded.obj, self.manifest.stage)
        if self.site.owner_type != self.manifest.owner_type:
            raise CaptureError(
                f"{folder} was captured from a {self.manifest.owner_type}, but {self.manifest.stage!r} is a "
                f"{self.site.owner_type} here."
            )
        self.storages = read_storages(folder, self.manifest)
        self._decoder = Decoder(self.storages, device=loaded.device, types=record_types())

    def prepare(self, call: CapturedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the call's inputs in new memory and restore generators and state; not part of the timed time."""
        values = self._decoder.decode(call.inputs)
        self._restore_state(call)
        _restore_rng(self._decoder.decode(call.rng), self.loaded)
        self.loaded.synchronize()
        return values["args"], values["kwargs"]

    @contextlib.contextmanager
    def settings(self, call: CapturedCall) -> Iterator[None]:
        """The call's own grad mode, inference mode, autocast and train/eval flag."""
        import torch

        context, module = call.context, self.site.owner
        was_training = getattr(module, "training", None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(user_code(f"Replaying {self.manifest.stage}"))
            # In this order: entering inference_mode(False) would switch gradients on.
            stack.enter_context(torch.inference_mode(context.inference_mode))
            stack.enter_context(torch.set_grad_enabled(context.grad_enabled))
            stack.enter_context(self.loaded.attention())
            if context.autocast_dtype:
                dtype = getattr(torch, context.autocast_dtype)
                stack.enter_context(torch.autocast(self.loaded.device.type, dtype=dtype))
            if context.training is not None and context.training != was_training:
                module.train(context.training)
                stack.callback(module.train, was_training)
            yield

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the stage."""
        function = self.site.owner if self.site.is_module else getattr(self.site.owner, str(self.site.method))
        return function(*args, **kwargs)

    def replay(self, call: CapturedCall) -> Any:
        """Restore and call once, untimed."""
        args, kwargs = self.prepare(call)
        with self.settings(call):
            output = self.call(args, kwargs)
            self.loaded.synchronize()
        return output

    def time_ms(self, call: CapturedCall, repeats: int) -> list[float]:
        """Time repeats of one call, by device events where there is a device."""
        samples = []
        for _ in range(repeats):
            args, kwargs = self.prepare(call)
            with self.settings(call):
                samples.append(self._time_once(args, kwargs))
        return samples

    def _time_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if self.loaded.device.type == "cpu":
            start = time.perf_counter_ns()
            self.call(args, kwargs)
            return (time.perf_counter_ns() - start) / _NS_PER_MS
        import torch

        begin, end = (torch.Event(self.loaded.device, enable_timing=True) for _ in range(2))
        begin.record()
        self.call(args, kwargs)
        end.record()
        self.loaded.synchronize()
        return float(begin.elapsed_time(end))

    def _restore_state(self, call: CapturedCall) -> None:
        """Put a plain object's attributes back as they were; what could not be stored stays as it is here."""
        restorable = {name: node for name, node in call.owner_state.items() if not not_rebuildable({name: node}, {})}
        if restorable:
            vars(self.site.owner).update(self._decoder.decode(restorable))


def run(context: RungContext, request: HarnessRequest | None = None) -> HarnessResult:
    """Replay the capture in a process that has done nothing else."""
    captured = context.result(CaptureResult)
    if captured is None or captured.folder is None:
        reason = next((r.reason for r in context.results.values() if isinstance(r, CaptureResult)), None)
        return HarnessResult(status="not_applicable", reason=reason or "There is no capture to replay.")
    request = request or HarnessRequest(folder=str(context.folder.parent / captured.folder))
    return context.replay.call(measure, request, timeout_s=context.workload.timeout_s)


def measure(loaded: LoadedTarget, request: HarnessRequest) -> HarnessResult:
    """Replay each captured call: compare its output twice, then time it.

    Raises:
        CaptureError: The capture cannot be used.
        WorkloadError: The stage raised when it was replayed.
    """
    replay = Replay(loaded, Path(request.folder))
    if not replay.manifest.calls:
        raise RungError(f"{request.folder} holds no call.")
    calls = [_replay_call(replay, call, request.repeats) for call in replay.manifest.calls]
    replayed = np.sum([call.replayed_ms.values for call in calls], axis=0)
    in_pipeline = np.sum([call.in_pipeline_ms.values for call in calls], axis=0)
    interval = bootstrap_interval(ratio_of_medians, replayed.tolist(), in_pipeline.tolist())
    ratio = float(np.median(replayed) / np.median(in_pipeline))
    is_timing_faithful = judge_timing(ratio, interval)
    verdicts = [call.parity.verdict for call in calls]
    parity = next(v for v in ("different", "within_tolerance", "exact") if v in verdicts)
    reasons = _reasons(calls, ratio, is_timing_faithful)
    return HarnessResult(
        stage=replay.manifest.stage,
        signature=_output_signature(replay.manifest),
        calls=calls,
        parity=parity,
        timing_ratio=ratio,
        timing_ratio_interval=interval,
        is_timing_faithful=is_timing_faithful,
        is_faithful=False if reasons else is_timing_faithful,
        unfaithful_because=reasons,
        warnings=_version_warnings(replay.manifest),
    )


def judge_timing(ratio: float, interval: Interval) -> bool | None:
    """Whether a replay takes as long as the pipeline's calls did; None if the samples cannot tell."""
    if abs(ratio - 1) <= TIMING_TOLERANCE:
        return True
    is_outside = interval.low > 1 + TIMING_TOLERANCE or interval.high < 1 - TIMING_TOLERANCE
    return False if is_outside else None


def _replay_call(replay: Replay, call: CapturedCall, repeats: int) -> CallReplay:
    first = compare(call.output, replay.replay(call), replay)
    second = compare(call.output, replay.replay(call), replay)
    replay.time_ms(call, _WARMUP_REPEATS)
    return CallReplay(
        index=call.index,
        parity=first,
        second_replay_differs=second != first,
        in_pipeline_ms=Samples(launches=[call.in_pipeline_ms]),
        replayed_ms=Samples(launches=[replay.time_ms(call, repeats)]),
    )


def compare(captured: Node, output: Any, replay: Replay) -> Parity:
    """Compare a replayed output with the captured one, leaf by leaf."""
    encoder = Encoder()
    replayed = Encoded(encoder.encode({"output": output}), encoder.storages)
    expected = Encoded({"output": captured}, replay.storages)
    differences = compare_values(expected, replayed, names=("in the pipeline", "in the replay"))
    is_accepted = all(difference.is_within_tolerance for difference in differences.values())
    return Parity(
        verdict="exact" if not differences else "within_tolerance" if is_accepted else "different",
        max_abs_error=max((d.max_abs_error for d in differences.values()), default=0.0),
        max_rel_error=max((d.max_rel_error for d in differences.values()), default=0.0),
        differing={path: difference.reason for path, difference in differences.items()},
    )


def _reasons(calls: list[CallReplay], ratio: float, is_timing_faithful: bool | None) -> list[str]:
    reasons = []
    different = [call for call in calls if call.parity.verdict == "different"]
    if different:
        where = "; ".join(
            f"call {c.index}: {p} {why}" for c in different for p, why in list(c.parity.differing.items())[:3]
        )
        reasons.append(f"The replayed output differs from the pipeline's ({where}).")
    if any(call.second_replay_differs for call in calls):
        reasons.append(
            "A second replay gives another output than the first: the stage keeps state that was not captured."
        )
    if is_timing_faithful is False:
        change = "faster" if ratio < 1 else "slower"
        reasons.append(
            f"Alone it is {abs(1 - ratio):.0%} {change} than in the pipeline: caches, allocator state or clocks differ "
            "there."
        )
    return reasons


def _output_signature(manifest: Manifest) -> dict[str, str]:
    return {
        path: f"{leaf.tensor.dtype} {leaf.tensor.size}" if leaf.tensor else leaf.kind
        for path, leaf in leaves(manifest.calls[0].output, "output").items()
    }


def _version_warnings(manifest: Manifest) -> list[ResultWarning]:
    import torch

    if manifest.torch_version == torch.__version__:
        return []
    message = f"Captured with torch {manifest.torch_version}, replayed with {torch.__version__}."
    return [ResultWarning(code="TORCH_VERSION_DIFFERS", message=message)]


def _restore_rng(states: dict[str, Any], loaded: LoadedTarget) -> None:
    import torch

    torch.set_rng_state(states["cpu"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(tuple(states["numpy"]))
    if "device" in states and loaded.device.type != "cpu":
        torch.get_device_module(loaded.device).set_rng_state(states["device"], loaded.device)
