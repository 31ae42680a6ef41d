import pytest

from perfladder.timing.cadence import cadence_of, num_stalls
from perfladder.timing.timer import RunTiming
from perfladder.workload import Media

MEDIA = Media(frames_per_chunk=4, fps=100, margin_ms=5)


def streamed(*arrivals_ms, start_ms=0, end_ms=None):
    last = max([*arrivals_ms, start_ms]) if end_ms is None else end_ms
    return RunTiming(int(start_ms * 1e6), int(last * 1e6), [], [int(ms * 1e6) for ms in arrivals_ms])


@pytest.mark.parametrize(
    ("arrivals", "stalls"),
    [
        ([10], 0),
        ([10, 50, 90], 0),
        ([10, 51, 91], 1),
        ([500, 540, 580], 0),
        ([10, 20, 30, 170], 1),
        ([10, 20, 30, 130], 0),
        ([0, 100, 200, 300], 3),
    ],
)
def test_stall_is_a_chunk_that_is_not_there_when_the_viewer_needs_it(arrivals, stalls):
    assert num_stalls(arrivals, 40.0) == stalls


def test_first_chunk_counts_from_the_start_and_raw_gaps_are_kept():
    cadence = cadence_of([streamed(110, 130, 191, start_ms=100)], MEDIA)
    assert cadence is not None
    assert cadence.first_chunk_ms.values == [10.0]
    assert cadence.chunk_samples_ms == [10.0, 20.0, 61.0]
    assert (cadence.num_late_chunks, cadence.num_stalls) == (1, 1)
    assert cadence.headroom_ms == pytest.approx(35 - cadence.chunk_ms.p95)
    assert cadence.chunk_ms.p99 > cadence.chunk_ms.p95


def test_late_chunks_need_not_stall_a_viewer_who_has_some_in_store():
    cadence = cadence_of([streamed(1, 2, 3, 60)], MEDIA)
    assert cadence is not None
    assert (cadence.num_late_chunks, cadence.num_stalls) == (1, 0)


def test_runs_that_streamed_nothing_are_chunks_only_with_media():
    whole = RunTiming(0, 30_000_000, [])
    assert cadence_of([whole], None) is None
    cadence = cadence_of([whole, whole], MEDIA)
    assert cadence is not None
    assert (cadence.chunks_per_run, cadence.chunk_samples_ms, cadence.num_stalls) == (1, [30.0, 30.0], 0)
