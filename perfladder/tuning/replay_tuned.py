"""A tuned module alone, on the inputs it really got in the pipeline: what comes of each call, and how fast.

It runs in a process that has tuned nothing: the module is what its archive makes of it, as in every later process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from perfladder.errors import NotPossibleHereError
from perfladder.models import Model
from perfladder.progress import Progress
from perfladder.stats import MIN_PAIRS, Comparison, Samples, compare_samples
from perfladder.target import LoadedTarget
from perfladder.tuning.tune_request import GateChoice
from perfladder.tuning.tune_result import OutputComparison

if TYPE_CHECKING:
    from perfladder.capturing.replay import Replay
    from perfladder.capturing.store import CapturedCall
    from perfladder.tuning.control import ModuleControl
    from perfladder.tuning.quality import QualityGate

_WARMUPS = 3


class TunedReplayRequest(Model):
    """Which capture to replay, on which module of a workload that loads an archive."""

    folder: str
    path: str
    has_whole_gate: bool = Field(
        default=False, description="The whole output has a gate, so that a lossy module's own may be as it is."
    )
    pairs: int = Field(default=20, ge=MIN_PAIRS, description="Rounds of all captured calls, of each side.")


class WholeOutputRequest(Model):
    """Compare the whole output of a workload that loads an archive with that of its plain modules and schedulers."""

    quality: GateChoice | None = Field(default=None, description="None: tolerances by dtype, as in tuning.")


class TunedCall(Model):
    """One captured call, replayed with the plain and with the tuned module, each against what came of it then."""

    index: int
    run: int = 0
    plain_reason: str | None = Field(description="Why the plain module's replay is not as in the pipeline.")
    reason: str | None = Field(description="Why the tuned one's is not.")
    max_abs_error: float
    max_rel_error: float = Field(description="Of the largest magnitude of each tensor.")
    quality: float | None = Field(
        description="Of the gate's metric; None: there is no gate, or nothing differs that it could measure."
    )


class TunedReplay(Model):
    """What the archive makes of one module."""

    path: str
    is_right: bool | None = Field(description="None: the plain module alone is not as in the pipeline either.")
    reason: str | None = Field(description="Why it is not right, or why that cannot be told.")
    gate: str | None = Field(default=None, description="Metric and least value; None: tolerances by dtype.")
    calls: list[TunedCall] = []
    plain_ms: Samples | None = Field(default=None, description="Rounds of all captured calls.")
    tuned_ms: Samples | None = None
    comparison: Comparison | None = Field(default=None, description="In turns; None: it was not timed.")

    @property
    def max_rel_error(self) -> float | None:
        """The largest of all calls."""
        return max((call.max_rel_error for call in self.calls), default=None)


def measure(loaded: LoadedTarget, request: TunedReplayRequest) -> TunedReplay:
    """Replay each captured call on both sides: compare what comes of it with the pipeline, then time them in turns.

    Raises:
        CaptureError: The capture cannot be used.
        NotPossibleHereError: The archive does not serve that module.
        WorkloadError: The module raised when it was replayed.
    """
    from perfladder.capturing.replay import Replay
    from perfladder.object_parts import attribute_at
    from perfladder.tuning.module import Module, control_of

    module = attribute_at(loaded.obj, request.path, field_name="path")
    if not isinstance(module, Module):
        raise NotPossibleHereError(f"{request.path or 'the target'} is not served by the archive of the workload.")
    control = control_of(module)
    gate = _gate_of(request, control)
    with Replay(loaded, Path(request.folder), path=request.path) as replay:
        calls = [_compare(replay, call, control, gate) for call in replay.manifest.calls]
        found = TunedReplay(
            path=request.path, is_right=True, reason=None, gate=gate.demand if gate else None
        ).model_copy(update={"calls": calls, **_verdict(calls, control)})
        if found.is_right is False:
            return found
        sides = _time(replay, control, request.pairs)
    comparison = compare_samples(*sides, interleaved=True)
    return found.model_copy(update={"plain_ms": sides[0], "tuned_ms": sides[1], "comparison": comparison})


def measure_whole(loaded: LoadedTarget, request: WholeOutputRequest) -> OutputComparison:
    """Compare the whole output with the archive's modules and with the plain ones, in one process.

    Raises:
        WorkloadError: The workload raised.
    """
    from perfladder.tuning.quality import QualityGate
    from perfladder.tuning.timesteps import host_timesteps_in
    from perfladder.tuning.tune_evidence import Sides, compare_outputs
    from perfladder.tuning.wrap import wrapped_in

    gate = QualityGate(request.quality.metric, request.quality.minimum) if request.quality else None
    hosts = host_timesteps_in(loaded.obj).values()
    return compare_outputs(Sides(loaded, wrapped_in(loaded.obj), hosts), gate)


def _gate_of(request: TunedReplayRequest, control: ModuleControl) -> QualityGate | None:
    """As candidates are judged: a lossy one by its own output only where the whole output has no gate."""
    from perfladder.tuning.candidates import DEFAULT_GATE
    from perfladder.tuning.quality import QualityGate

    if not any(chosen.backend is not None and chosen.backend.is_lossy for chosen in control.chosen):
        return None
    return QualityGate("cosine", -1.0) if request.has_whole_gate else DEFAULT_GATE


def _show(control: ModuleControl, *, tuned: bool) -> None:
    if tuned:
        control.activate()
    else:
        control.deactivate()


def _compare(replay: Replay, call: CapturedCall, control: ModuleControl, gate: QualityGate | None) -> TunedCall:
    from perfladder.tuning.whole_output import compare_output

    differences = []
    for tuned in (False, True):
        _show(control, tuned=tuned)
        made = replay.replay(call)
        found = replay.found(call, made)
        differences.append(compare_output(replay.expected(call), found, gate if tuned else None))
    plain, other = differences
    return TunedCall(
        index=call.index,
        run=call.run,
        plain_reason=plain.reason,
        reason=other.reason,
        max_abs_error=other.max_abs_error,
        max_rel_error=other.max_rel_error,
        quality=other.quality,
    )


def _verdict(calls: list[TunedCall], control: ModuleControl) -> dict[str, object]:
    """Plain replays first: where these are not as in the pipeline, a difference proves nothing."""
    for call in calls:
        if call.plain_reason is not None:
            what = f"call {call.index}, replayed on the plain module, is not as in the pipeline: {call.plain_reason}"
            return {"is_right": None, "reason": what}
    for call in calls:
        if call.reason is not None:
            return {"is_right": False, "reason": f"call {call.index}: {call.reason}"}
    if control.num_unseen_calls:
        why, count = control.num_unseen_calls.most_common(1)[0]
        return {"is_right": False, "reason": f"{count} replayed calls ran on the plain module. {why}"}
    return {}


def _time(replay: Replay, control: ModuleControl, pairs: int) -> tuple[Samples, Samples]:
    """Milliseconds of rounds of all captured calls, plain and tuned."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARMUPS + pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            _show(control, tuned=side == 1)
            round_ms = sum(replay.time_ms(call) for call in replay.manifest.calls)
            if number >= _WARMUPS:
                times[side].append(round_ms)
        label = f"replaying {replay.manifest.stage or 'the target'}, plain and tuned"
        replay.loaded.tell(Progress(label=label, num_done=number, num_total=_WARMUPS + pairs))
    _show(control, tuned=True)
    return Samples(launches=[times[0]]), Samples(launches=[times[1]])
