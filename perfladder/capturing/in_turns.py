"""Replays and runs of the pipeline in turns, in the process of the whole target: the machine's speed is that of both.

For replays that alone did not take as long, or could not tell. A process, or a few seconds, on a shared machine may be
half as fast as another; what takes turns sees the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from perfladder.capturing.nodes import forms_of, leaves_of
from perfladder.capturing.plain_calls import time_plain_run
from perfladder.capturing.rounds import Caches, CachesVerdict, judge_caches
from perfladder.errors import RungError
from perfladder.models import Model
from perfladder.progress import Progress
from perfladder.stats import Interval, Samples, compare_samples
from perfladder.target import LoadedTarget
from perfladder.timing.timer import StageTimer

if TYPE_CHECKING:
    from perfladder.capturing.evict import Evictor
    from perfladder.capturing.replay import Replay
    from perfladder.capturing.store import CapturedCall

_MOST_TURNS: Final = 100
_LEAST_TURNS: Final = 10
"""What a comparison of pairs needs."""
BUDGET_S: Final = 20.0
_WARMUPS: Final = 2


class InTurnsRequest(Model):
    """Which capture."""

    folder: str


class InTurns(CachesVerdict):
    """Milliseconds of all captured calls together, turn by turn, and what replays take over the pipeline."""

    pipeline_ms: Samples
    replayed_ms: Samples
    evicted_ms: Samples | None = Field(default=None, description="With the caches emptied before each call.")


def measure(loaded: LoadedTarget, request: InTurnsRequest) -> InTurns:
    """Run the pipeline and replay the captured calls in turns, in the order AB BA AB ..

    Up to 100 turns, as many as 20 seconds allow, and at least 10 however long they take. Short calls are replayed a
    second time in each, with the caches emptied.

    Raises:
        CaptureError: The capture cannot be used.
        RungError: The pipeline does not call the stage as often, or with inputs of the same form, as when it was
            captured, or changes its state: to put that back for a replay would take from the pipeline what it shares
            with the stage.
        WorkloadError: The pipeline, or the stage, raised.
    """
    from perfladder.capturing.compare import compare_values
    from perfladder.capturing.evict import evictor_for
    from perfladder.capturing.replay import Replay

    timer = StageTimer(time.perf_counter_ns, loaded.device)
    replay = Replay(loaded, Path(request.folder), restores_state=False)
    manifest, calls = replay.manifest, replay.manifest.calls
    evictor = evictor_for(calls, loaded.device)
    _refuse_state(manifest.stage, replay.changing_state())
    _refuse_other_inputs(loaded, replay)

    def run_pipeline() -> float:
        plain = time_plain_run(loaded, replay.site, timer)
        if isinstance(plain, str):
            raise RungError(f"Stage {manifest.stage!r}: {plain}.")
        if len(plain) != manifest.calls_per_run or any(call.index >= len(plain) for call in calls):
            raise RungError(
                f"The pipeline called stage {manifest.stage!r} {len(plain)} times in a run, and "
                f"{manifest.calls_per_run} times when it was captured. Capture it again with the inputs of now."
            )
        return sum(plain[call.index].duration_ms for call in calls)

    def replay_all(emptied: Evictor | None = None) -> float:
        return sum(replay.time_ms(call, emptied) for call in calls)

    sides = {"pipeline": run_pipeline, "warm": replay_all}
    if evictor is not None:
        sides["evicted"] = partial(replay_all, evictor)
    start = time.perf_counter()
    for _ in range(_WARMUPS):
        for side in sides.values():
            side()
    turn_s = (time.perf_counter() - start) / _WARMUPS
    state = replay.state()
    times: dict[str, list[float]] = {side: [] for side in sides}
    num_turns = int(min(_MOST_TURNS, max(_LEAST_TURNS, BUDGET_S / turn_s)))
    for number in range(num_turns):
        loaded.tell(Progress(label="replaying in turns", num_done=number, num_total=num_turns))
        for name in sides if number % 2 == 0 else reversed(sides):
            times[name].append(sides[name]())
    _refuse_state(manifest.stage, compare_values(state, replay.state()))
    samples = {side: Samples(launches=[values]) for side, values in times.items()}
    ratios: dict[Caches, tuple[float, Interval]] = {"warm": _ratio(samples["warm"], samples["pipeline"])}
    if "evicted" in samples:
        ratios["evicted"] = _ratio(samples["evicted"], samples["pipeline"])
    return InTurns(
        **dict(judge_caches(ratios)),
        pipeline_ms=samples["pipeline"],
        replayed_ms=samples["warm"],
        evicted_ms=samples.get("evicted"),
    )


def _refuse_other_inputs(loaded: LoadedTarget, replay: Replay) -> None:
    """Calls that are given something else may take another time."""
    from perfladder.capturing.encode import Encoder
    from perfladder.capturing.recorder import Recorder

    captured = {call.index: _forms(call) for call in replay.manifest.calls}
    recorder = Recorder(loaded, lambda index: index in captured, Encoder())
    recorder.record_run(replay.site)
    for call in recorder.calls:
        here, there = _forms(call), captured[call.index]
        if here != there:
            path = min(path for path in {*here, *there} if here.get(path) != there.get(path))
            raise RungError(
                f"The pipeline gives stage {replay.manifest.stage!r} other inputs than when it was captured: {path} of "
                f"call {call.index} is {here.get(path, 'not there')}, and was {there.get(path, 'not there')}. Capture "
                "it again with the inputs of now."
            )


def _forms(call: CapturedCall) -> dict[str, str]:
    """Of the inputs but for plain fractions: no call takes longer for another one."""
    leaves = leaves_of(call.inputs)
    return forms_of({path: leaf for path, leaf in leaves.items() if not isinstance(leaf.value, float)})


def _refuse_state(stage: str, changing: Collection[str]) -> None:
    """No state is put back: that would part the stage from what the pipeline shares with it."""
    if changing:
        names = ", ".join(sorted(changing)[:3])
        raise RungError(
            f"Stage {stage!r} has a state that changes from call to call or run to run ({names}). Judge its time by "
            "replays alone, on a machine that nobody shares."
        )


def _ratio(replayed: Samples, pipeline: Samples) -> tuple[float, Interval]:
    found = compare_samples(replayed, pipeline, interleaved=True)
    if found.speedup is None or found.interval is None:
        raise RungError(f"Replays and runs of the pipeline cannot be compared: {found.reason}")
    return found.speedup, found.interval
