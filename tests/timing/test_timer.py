import threading
import types

import pytest
import torch

from perfladder.instrument import Site, instrument
from perfladder.marks import stage
from perfladder.timing.scenario import scenario_timing
from perfladder.timing.timer import (
    Call,
    RunTiming,
    StageTimer,
    lies_in_own_site,
    merge,
    outside_ms,
    overlap_of,
    resolve_device_times,
    self_ms,
)

CPU = torch.device("cpu")
A, B, C = (Site(name, object()) for name in "abc")


class FakeEvent:
    """A point on the device's time line, in ms."""

    def __init__(self, at_ms, is_reached=True):
        self.at_ms, self.is_reached = at_ms, is_reached

    def query(self):
        return self.is_reached

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def call(site, start_ms, end_ms, parent=None, *, device=None, is_item=False):
    made = Call(site, int(start_ms * 1e6), is_item, parent, end_ns=int(end_ms * 1e6))
    if parent is not None:
        parent.children.append(made)
    if device is not None:
        made.events = tuple(map(FakeEvent, device))
    return made


def run(wall_ms, *calls):
    return RunTiming(0, int(wall_ms * 1e6), list(calls), origin=FakeEvent(0.0))


def total(timing, *calls, on_device=False):
    return self_ms(timing, calls, on_device=on_device)


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(2, 3), (0, 1)], [(0, 1), (2, 3)]),
        ([(0, 5), (1, 2), (4, 6)], [(0, 6)]),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(3, 3)], []),
    ],
)
def test_union_of_spans(spans, merged):
    assert merge(spans) == merged


# One thread


def test_self_time_is_without_what_lies_inside():
    outer = call(A, 0, 10)
    first, second = call(B, 1, 4, outer), call(B, 6, 8, outer)
    timing = run(12, outer, first, second)
    assert timing.self_spans(outer, on_device=False) == [(0, 1), (4, 6), (8, 10)]
    assert total(timing, outer) == 5
    assert total(timing, first, second) == 5
    assert outside_ms(timing, on_device=False) == 2


def test_recursion_is_told():
    outer = call(A, 0, 10)
    middle = call(B, 1, 9, outer)
    inner = call(A, 2, 3, middle)
    assert [lies_in_own_site(c) for c in (outer, middle, inner)] == [False, False, True]


def test_serial_stages_do_not_overlap():
    outer = call(A, 0, 10)
    timing = run(20, outer, call(B, 2, 5, outer), call(C, 10, 14))
    overlap = overlap_of(timing, on_device=False)
    assert overlap.counted_again_ms == 0
    assert overlap.by_pair_ms == {}


# Several threads


def test_overlap_is_what_self_times_and_outside_exceed_the_wall_by():
    calls = [call(A, 0, 10), call(B, 4, 12), call(C, 6, 8)]
    timing = run(15, *calls)
    overlap = overlap_of(timing, on_device=False)
    assert overlap.counted_again_ms == 8
    assert sum(total(timing, c) for c in calls) + outside_ms(timing, on_device=False) - 8 == 15
    assert overlap.by_stage_ms == {"a": 6, "b": 6, "c": 2}
    assert overlap.by_pair_ms == {("a", "b"): 6, ("a", "c"): 2, ("b", "c"): 2}


def test_a_stage_may_overlap_itself():
    timing = run(10, call(A, 0, 6), call(A, 2, 10))
    overlap = overlap_of(timing, on_device=False)
    assert overlap.counted_again_ms == 4
    assert overlap.by_pair_ms == {("a", "a"): 4}


def test_what_a_thread_does_after_the_run_is_not_in_it():
    late = call(A, 6, 30)
    timing = run(10, late)
    assert total(timing, late) == 4
    assert outside_ms(timing, on_device=False) == 6


def test_stages_of_two_threads_keep_their_own_parents(clock):
    timer = StageTimer(clock, CPU)
    inside = threading.Barrier(2, timeout=10)

    def work():
        inside.wait()
        timer.leave(B, timer.enter(B, (), {}), None)
        inside.wait()

    thread = threading.Thread(target=work)
    thread.start()
    outer = timer.enter(A, (), {})
    inside.wait()
    inside.wait()
    timer.leave(A, outer, None)
    thread.join()
    by_site = {c.site.path: c for c in timer.take()}
    assert by_site["b"].parent is None
    assert by_site["a"].children == []


# Streams of a device


def test_a_call_that_is_recorded_into_a_cuda_graph_has_no_events(clock, monkeypatch):
    recorded, noted = [True], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded[-1])
    monkeypatch.setattr(
        "perfladder.timing.timer.timing_event", lambda device: types.SimpleNamespace(record=lambda: noted.append(1))
    )
    timer = StageTimer(clock, torch.device("cuda", 0))
    timer.leave(A, timer.enter(A, (), {}), None)
    recorded.append(False)
    timer.leave(A, timer.enter(A, (), {}), None)
    begun = timer.enter(A, (), {})
    recorded.append(True)
    timer.leave(A, begun, None)
    assert [one.events is None for one in timer.take()] == [True, False, True]
    assert len(noted) == 3


def test_device_spans_come_from_events_and_streams_may_overlap():
    outer = call(A, 0, 1, device=(0, 10))
    side = call(B, 0.1, 0.2, outer, device=(4, 14))
    timing = run(20, outer, side)
    resolve_device_times(timing)
    assert total(timing, outer, on_device=True) == 4, "what the inner one does on its stream is not the outer's own"
    assert total(timing, side, on_device=True) == 10
    assert (outer.device_ms, side.device_ms) == (10, 10)


def test_time_outside_is_what_no_stream_covers():
    timing = run(20, call(A, 0, 1, device=(2, 10)), call(B, 1, 2, device=(6, 12)))
    resolve_device_times(timing)
    assert outside_ms(timing, on_device=True) == 10
    overlap = overlap_of(timing, on_device=True)
    assert overlap.counted_again_ms == 4
    assert overlap.by_pair_ms == {("a", "b"): 4}


def test_event_that_the_device_has_not_reached_ends_with_the_run():
    late = call(A, 0, 1)
    late.events = FakeEvent(2.0), FakeEvent(99.0, is_reached=False)
    timing = run(5, late)
    resolve_device_times(timing)
    assert (late.device_start_ms, late.device_end_ms) == (2.0, 5.0)


# The table


class State:
    sites = (A, B)
    aliases: dict[str, str] = {}


def test_table_has_shares_overlap_and_raw_calls():
    runs = [run(10, call(A, 0, 6), call(B, 4, 8)) for _ in range(3)]
    timing = scenario_timing("default", runs, State(), None, CPU)
    a, b = timing.stages
    assert (a.name, a.share, b.share) == ("a", 0.6, 0.4)
    assert timing.outside_share == 0.2
    assert timing.overlap_ms is not None
    assert timing.overlap_ms.values == [2.0] * 3, "0.6 + 0.4 + 0.2 exceeds 1 by what ran at once"
    assert [(p.first, p.second, p.overlap_ms.values) for p in timing.overlaps] == [("a", "b", [2.0] * 3)]
    assert a.overlap_ms is not None
    assert a.overlap_ms.values == [2.0] * 3
    assert a.call_samples_ms == [6.0] * 3


def test_cost_in_chunks_leaves_the_first_one_out():
    timing = run(30, call(A, 0, 9), call(A, 10, 12), call(B, 12, 19), call(A, 20, 24), call(B, 25, 26))
    timing.item_end_ns = [10_000_000, 20_000_000, 27_000_000]
    stages = {s.name: s for s in scenario_timing("default", [timing], State(), None, CPU).stages}
    assert stages["a"].chunk_self_ms is not None
    assert stages["a"].chunk_self_ms.values == [2.0, 4.0]
    assert stages["b"].chunk_self_ms.values == [7.0, 1.0]


def test_marks_that_were_met_are_stages(clock):
    timer = StageTimer(clock, CPU)
    from perfladder.instrument import any_mark

    with instrument([any_mark()], timer) as state:
        with stage("marked"):
            clock.pass_ms(3)
        clock.pass_ms(1)
    timing = RunTiming(0, clock(), timer.take())
    (only,) = scenario_timing("default", [timing], state, None, CPU).stages
    assert (only.name, only.owner_type, only.share) == ("marked", "perfladder.stage", 0.75)
