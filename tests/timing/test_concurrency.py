import asyncio
import threading

import pytest

from perfladder.errors import WorkloadError
from perfladder.timing.concurrency import Attempt, ConcurrencyRequest, level_of, measure_concurrency

MS = 1_000_000


def attempt(start_ms, end_ms, **fields):
    return Attempt(start_ms * MS, end_ms * MS, **fields)


# Arithmetic


def test_throughput_counts_what_succeeded_over_the_whole_window():
    attempts = [attempt(0, 10), attempt(0, 20), attempt(10, 15, error="ValueError: no"), attempt(15, 50)]
    level = level_of(2, "threads", attempts, items_per_call=4, cpu_s=0.1)
    assert (level.num_requests, level.num_errors, level.errors) == (4, 1, {"ValueError: no": 1})
    assert level.wall_s == pytest.approx(0.05)
    assert level.items_per_s == pytest.approx(3 * 4 / 0.05)
    assert level.cpu_cores_used == pytest.approx(2)
    assert level.latency_ms is not None
    assert level.latency_ms.values == [10, 20, 35]
    assert level.first_output_ms is None


def test_first_output_is_timed_from_the_requests_start():
    level = level_of(1, "asyncio", [attempt(5, 20, first_item_ns=9 * MS)], items_per_call=1, cpu_s=0)
    assert level.first_output_ms is not None
    assert level.first_output_ms.values == [4]


def test_level_on_which_all_fail_has_no_latency():
    level = level_of(2, "threads", [attempt(0, 1, error="E: x")] * 3, items_per_call=1, cpu_s=0)
    assert (level.latency_ms, level.items_per_s, level.num_errors) == (None, None, 3)


def test_only_the_commonest_errors_are_kept():
    attempts = [attempt(0, 1, error=f"E: {number % 7}") for number in range(20)]
    level = level_of(1, "threads", attempts, items_per_call=1, cpu_s=0)
    assert len(level.errors) == 5
    assert level.num_errors == 20


# Behaviour


def measure(loaded, concurrency, num_requests=8, **fields):
    request = ConcurrencyRequest(concurrency=concurrency, num_requests=num_requests, min_window_s=0, **fields)
    return measure_concurrency(loaded, request)


class Counted:
    """Notes how many calls are inside at once."""

    def __init__(self, parties):
        self.inside = self.most = self.calls = 0
        self.lock = threading.Lock()
        self.together = threading.Barrier(parties)
        self.is_alone = True

    def __call__(self):
        with self.lock:
            self.calls += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        if not self.is_alone:
            self.together.wait(timeout=10)
        self.is_alone = False
        with self.lock:
            self.inside -= 1


def test_so_many_threads_call_the_object_at_once(wrap):
    target = Counted(parties=4)
    level = measure(wrap(target), 4)
    assert (level.mode, level.num_requests, level.num_errors) == ("threads", 8, 0)
    assert target.most == 4
    assert target.calls == 1 + 4 + 8, "one alone, one of each worker that is not counted, and the level's own"


def test_coroutine_is_awaited_on_one_loop(wrap):
    loops, most, inside = set(), [0], [0]

    async def call():
        loops.add(id(asyncio.get_running_loop()))
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        await asyncio.sleep(0)
        inside[0] -= 1

    level = measure(wrap(call), 3)
    assert (level.mode, level.num_requests, level.num_errors) == ("asyncio", 8, 0)
    assert len(loops) == 1
    assert most == [3]


def test_async_stream_has_a_first_output(wrap):
    async def call():
        for item in range(3):
            await asyncio.sleep(0)
            yield item

    level = measure(wrap(call), 2)
    assert level.mode == "asyncio"
    assert level.first_output_ms is not None
    assert level.first_output_ms.summary.n == 8


def test_stream_is_consumed_on_its_thread(wrap):
    level = measure(wrap(lambda: iter([1, 2, 3])), 2)
    assert level.mode == "threads"
    assert level.first_output_ms is not None


def test_errors_under_concurrency_are_counted(wrap):
    calls = iter(range(100))

    def call():
        if next(calls) >= 5:
            raise RuntimeError("not reentrant")

    level = measure(wrap(call), 2)
    assert level.num_requests == 8
    assert level.num_errors == level.errors["RuntimeError: not reentrant"] == 6


def test_exit_in_a_request_is_an_error_of_it(wrap):
    calls = iter(range(100))

    async def call():
        if next(calls) >= 3:
            raise asyncio.CancelledError

    assert measure(wrap(call), 2).num_errors == 8


def test_call_that_raises_alone_is_the_workloads_error(wrap):
    def call():
        raise ValueError("no")

    with pytest.raises(WorkloadError, match="no"):
        measure(wrap(call), 2)


def test_requests_have_inputs_of_their_own(wrap):
    def call(items):
        items.append(1)
        return len(items)

    loaded = wrap(call, inputs={"items": []})
    assert [loaded.new_request()() for _ in range(3)] == [1, 1, 1]


def test_requests_run_without_gradients(wrap):
    import torch

    seen = set()
    measure(wrap(lambda: seen.add((threading.current_thread().name, torch.is_grad_enabled()))), 2)
    assert {enabled for _, enabled in seen} == {False}


def test_level_goes_on_until_its_window_is_long_enough(wrap, clock):
    loaded = wrap(lambda: clock.pass_ms(10))
    request = ConcurrencyRequest(concurrency=1, num_requests=2, min_window_s=0.1)
    level = measure_concurrency(loaded, request, clock=clock)
    assert level.num_requests == 10
    assert level.latency_ms is not None
    assert level.latency_ms.values == [10.0] * 10
    assert level.items_per_s == pytest.approx(100)
