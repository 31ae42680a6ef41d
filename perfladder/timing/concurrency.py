"""Latency and throughput with several requests at once: a closed loop of threads, or of tasks where the call is async.

All requests call the same object, as a server with one copy of the model would. Nothing is instrumented, nothing is
seeded between requests (the generators are the process's), and every request has its own copy of the inputs.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from perfladder.models import Model
from perfladder.stats import Samples
from perfladder.target import LoadedTarget
from perfladder.timing.timer import NS_PER_MS, Clock
from perfladder.user_code import consume, user_code

if TYPE_CHECKING:
    import torch

Mode = Literal["threads", "asyncio"]

_MAX_REQUESTS = 10_000
"""Of one level, unless the workload asks for more."""

_MAX_ERRORS_SHOWN = 5
_MAX_ERROR_CHARS = 300


class ConcurrencyRequest(Model):
    """One level: so many requests at once, until so many were begun and the window is long enough."""

    concurrency: int = Field(gt=0)
    num_requests: int = Field(gt=0)
    min_window_s: float = Field(default=1.0, description="Threads that serve short calls take turns in steps of 5 ms.")


class ConcurrencyLevel(Model):
    """How requests fare when `concurrency` of them are always under way. Latencies are of those that succeeded."""

    concurrency: int
    mode: Mode | None = None
    num_requests: int = 0
    num_errors: int = 0
    errors: dict[str, int] = Field(default={}, description="The commonest messages, with their counts.")
    latency_ms: Samples | None = None
    first_output_ms: Samples | None = Field(default=None, description="Until the first item, for streams.")
    wall_s: float | None = Field(default=None, description="From the first request's start to the last one's end.")
    items_per_s: float | None = None
    cpu_cores_used: float | None = Field(default=None, description="CPU time of the process over `wall_s`.")
    failure: str | None = Field(default=None, description="Why the level has no numbers: a crash, or it hung.")


@dataclass(frozen=True)
class Attempt:
    """One request: when it began and ended, in ns, and what it raised."""

    start_ns: int
    end_ns: int
    first_item_ns: int | None = None
    error: str | None = None


def measure_concurrency(
    loaded: LoadedTarget, request: ConcurrencyRequest, *, clock: Clock = time.perf_counter_ns
) -> ConcurrencyLevel:
    """Keep `concurrency` requests under way; each worker makes one request first that is not counted.

    Raises:
        WorkloadError: The call raises also when it is alone.
    """
    import torch

    with torch.no_grad(), loaded.attention():
        with user_code("The workload's call"):
            returned = loaded.new_request()()
        if inspect.isawaitable(returned) or isinstance(returned, AsyncIterator):
            mode: Mode = "asyncio"
            attempts, cpu_s = asyncio.run(_run_tasks(loaded, request, returned, clock))
        else:
            mode = "threads"
            with user_code("The workload's call"):
                consume(returned, clock)
            attempts, cpu_s = _run_threads(loaded, request, clock)
    return level_of(request.concurrency, mode, attempts, loaded.workload.items_per_call, cpu_s)


def level_of(
    concurrency: int, mode: Mode, attempts: list[Attempt], items_per_call: int, cpu_s: float
) -> ConcurrencyLevel:
    """Sum a level up.

    Args:
        concurrency: Requests at once.
        mode: What made them.
        attempts: At least one, in the order in which they ended.
        items_per_call: For the throughput; failed requests make none.
        cpu_s: CPU time that the process spent meanwhile.
    """
    succeeded = [attempt for attempt in attempts if attempt.error is None]
    errors = Counter(attempt.error for attempt in attempts if attempt.error is not None)
    first = [(a.first_item_ns - a.start_ns) / NS_PER_MS for a in succeeded if a.first_item_ns is not None]
    wall_s = (max(a.end_ns for a in attempts) - min(a.start_ns for a in attempts)) / 1e9
    return ConcurrencyLevel(
        concurrency=concurrency,
        mode=mode,
        num_requests=len(attempts),
        num_errors=errors.total(),
        errors=dict(errors.most_common(_MAX_ERRORS_SHOWN)),
        latency_ms=_samples([(a.end_ns - a.start_ns) / NS_PER_MS for a in succeeded]),
        first_output_ms=_samples(first),
        wall_s=wall_s,
        items_per_s=len(succeeded) * items_per_call / wall_s if succeeded and wall_s else None,
        cpu_cores_used=cpu_s / wall_s if wall_s else None,
    )


def _samples(values: list[float]) -> Samples | None:
    return Samples(launches=[values]) if values else None


def _run_threads(loaded: LoadedTarget, request: ConcurrencyRequest, clock: Clock) -> tuple[list[Attempt], float]:
    import torch

    attempts: list[Attempt] = []
    turns: list[_Turns] = []
    ready = threading.Barrier(request.concurrency, action=lambda: turns.append(_Turns(request, clock)))

    def work() -> None:
        with torch.no_grad():
            # A thread's first call makes what libraries keep for each thread.
            _attempt(loaded, clock)
            ready.wait()
            while turns[0].take():
                attempts.append(_attempt(loaded, clock))

    threads = [threading.Thread(target=work, name=f"request-{n}", daemon=True) for n in range(request.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return attempts, turns[0].cpu_s()


class _Turns:
    """Says whether there is a further request to make; shared by the workers of a level, made when they begin."""

    def __init__(self, request: ConcurrencyRequest, clock: Clock) -> None:
        self._request, self._clock = request, clock
        self._taken = itertools.count()
        self._start_ns, self._start_cpu_s = clock(), time.process_time()

    def take(self) -> bool:
        """Take a turn."""
        place = next(self._taken)
        is_long_enough = (self._clock() - self._start_ns) / 1e9 >= self._request.min_window_s
        return place < self._request.num_requests or (not is_long_enough and place < _MAX_REQUESTS)

    def cpu_s(self) -> float:
        """CPU time of the process since the level began."""
        return time.process_time() - self._start_cpu_s


def _attempt(loaded: LoadedTarget, clock: Clock) -> Attempt:
    start_ns = clock()
    try:
        request = loaded.new_request()
        start_ns = clock()
        output = consume(request(), clock)
        wait = _end_on_device(loaded.device)
        wait()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return Attempt(start_ns, clock(), error=_text(error))
    return Attempt(start_ns, clock(), output.item_end_ns[0] if output.item_end_ns else None)


async def _run_tasks(
    loaded: LoadedTarget, request: ConcurrencyRequest, first: Any, clock: Clock
) -> tuple[list[Attempt], float]:
    """All on one loop, the first call too: what the target keeps may belong to the loop it was made on."""
    attempts: list[Attempt] = []

    async def work() -> None:
        while turns.take():
            attempts.append(await _attempt_async(loaded, clock))

    with user_code("The workload's call"):
        await _consume(first, clock)
    await asyncio.gather(*(_attempt_async(loaded, clock) for _ in range(request.concurrency)))
    turns = _Turns(request, clock)
    await asyncio.gather(*(work() for _ in range(request.concurrency)))
    return attempts, turns.cpu_s()


async def _attempt_async(loaded: LoadedTarget, clock: Clock) -> Attempt:
    start_ns = clock()
    try:
        request = loaded.new_request()
        start_ns = clock()
        first_item_ns = await _consume(request(), clock)
        # Elsewhere than on the loop, which the other requests need.
        await asyncio.to_thread(_end_on_device(loaded.device)) if loaded.device.type != "cpu" else None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return Attempt(start_ns, clock(), error=_text(error))
    return Attempt(start_ns, clock(), first_item_ns)


async def _consume(returned: Any, clock: Clock) -> int | None:
    """Run what an async call returned to its end; tells when the first item of a stream came."""
    value = await returned if inspect.isawaitable(returned) else returned
    if not isinstance(value, AsyncIterator):
        return next(iter(consume(value, clock).item_end_ns), None)
    first_ns: int | None = None
    async for _ in value:
        first_ns = first_ns or clock()
    return first_ns


def _end_on_device(device: torch.device) -> Callable[[], None]:
    """Mark the end of this thread's work on its stream; calling the result waits for it, and for nobody else's."""
    if device.type == "cpu":
        return lambda: None
    import torch

    event = torch.Event(device)
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
