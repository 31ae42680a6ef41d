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

from perfladder.capturing.plain_calls import time_plain_run
from perfladder.capturing.rounds import Caches, CachesVerdict, judge_caches
from perfladder.errors import RungError
from perfladder.models import Model
from perfladder.stats import Interval, Samples, compare_samples
from perfladder.target import LoadedTarget
from perfladder.timing.timer import StageTimer

if TYPE_CHECKING:
    from perfladder.capturing.evict import Evictor

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

    Up to 100 turns, as many as 20 seconds allow, and at least 10. Short calls are replayed a second time in each, with
    the caches emptied.

    Raises:
        CaptureError: The capture cannot be used.
        RungError: The pipeline is another one than was captured, does not call the stage as it did, or changes its
            state: to put that back for a replay would take from the pipeline what it shares with the stage.
        WorkloadError: The pipeline, or the stage, raised.
    """
    from perfladder.capturing.compare import Encoded, compare_values
    from perfladder.capturing.evict import evictor_for
    from perfladder.capturing.replay import Replay
    from perfladder.capturing.state import read_state
    from perfladder.capturing.types import capture_types

    timer = StageTimer(time.perf_counter_ns, loaded.device)
    replay = Replay(loaded, Path(request.folder), restores_state=False)
    manifest, calls = replay.manifest, replay.manifest.calls
    evictor = evictor_for(calls, loaded.device)
    if manifest.work_digest != loaded.workload.fingerprints.work.digest:
        raise RungError(
            f"Stage {manifest.stage!r} was captured with another workload or target than the one given now: its calls "
            "are not those of this pipeline. Give the workload of the capture, or capture the stage again."
        )
    _refuse_state(manifest.stage, replay.changing_state())

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

    start = time.perf_counter()
    for _ in range(_WARMUPS):
        run_pipeline()
        state = Encoded.of(read_state(replay.site), capture_types())
        replay_all()
    turn_s = (time.perf_counter() - start) / _WARMUPS
    sides = {"pipeline": run_pipeline, "warm": replay_all}
    if evictor is not None:
        sides["evicted"] = partial(replay_all, evictor)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(int(min(_MOST_TURNS, max(_LEAST_TURNS, BUDGET_S / turn_s)))):
        for side in sides if number % 2 == 0 else reversed(sides):
            times[side].append(sides[side]())
    _refuse_state(manifest.stage, compare_values(state, Encoded.of(read_state(replay.site), capture_types())))
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
