"""Replays and runs of the pipeline in turns, in the process of the whole target: the machine's speed is that of both.

For replays whose time could not be judged alone. A process, or a few seconds, on a shared machine may be half as fast
as another; what takes turns sees the same.
"""

from __future__ import annotations

import time
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

_MOST_TURNS: Final = 40
_LEAST_TURNS: Final = 8
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

    Up to 40 turns, as many as 20 seconds allow, and at least 8. Short calls are replayed a second time in each, with
    the caches emptied.

    Raises:
        CaptureError: The capture cannot be used.
        RungError: The stage was not called as often as when it was captured.
        WorkloadError: The pipeline, or the stage, raised.
    """
    from perfladder.capturing.evict import evictor_for
    from perfladder.capturing.replay import Replay

    timer = StageTimer(time.perf_counter_ns, loaded.device)
    with Replay(loaded, Path(request.folder)) as replay:
        calls = replay.manifest.calls
        evictor = evictor_for(calls, loaded.device)

        def run_pipeline() -> float:
            plain = time_plain_run(loaded, replay.site, timer)
            if isinstance(plain, str) or len(plain) <= max(call.index for call in calls):
                raise RungError(f"Stage {replay.manifest.stage!r} was not called as it was when it was captured.")
            return sum(plain[call.index].duration_ms for call in calls)

        def replay_all(emptied: Evictor | None = None) -> float:
            return sum(replay.time_ms(call, emptied) for call in calls)

        start = time.perf_counter()
        for _ in range(_WARMUPS):
            run_pipeline()
            replay.note_changes()  # the pipeline may have changed more of the stage's state than a replay does
            replay_all()
        turn_s = (time.perf_counter() - start) / _WARMUPS
        sides = {"pipeline": run_pipeline, "warm": replay_all}
        if evictor is not None:
            sides["evicted"] = partial(replay_all, evictor)
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(int(min(_MOST_TURNS, max(_LEAST_TURNS, BUDGET_S / turn_s)))):
            for side in sides if number % 2 == 0 else reversed(sides):
                times[side].append(sides[side]())
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


def _ratio(replayed: Samples, pipeline: Samples) -> tuple[float, Interval]:
    found = compare_samples(replayed, pipeline, interleaved=True)
    if found.speedup is None or found.interval is None:
        raise RungError(f"Replays and runs of the pipeline cannot be compared: {found.reason}")
    return found.speedup, found.interval
