import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfladder.trace.model import Category
from perfladder.trace.nesting import _nest_by_counting, _nest_by_scanning


def parents(trace) -> dict[str, str | None]:
    forest = trace.forest
    names = [trace.names[index] for index in forest.name_id]
    return {name: names[parent] if parent >= 0 else None for name, parent in zip(names, forest.parent, strict=True)}


def self_us(trace) -> dict[str, float]:
    forest = trace.forest
    return {trace.names[n]: int(own) / 1000 for n, own in zip(forest.name_id, forest.self_ns, strict=True)}


def test_spans_nest_by_interval(scene) -> None:
    scene.op("inner", 20, 10).op("outer", 0, 100).op("innermost", 22, 3).op("next", 30, 5)
    trace = scene.trace()
    assert parents(trace) == {"outer": None, "inner": "outer", "innermost": "inner", "next": "outer"}
    assert self_us(trace) == {"outer": 85, "inner": 7, "innermost": 3, "next": 5}


def test_threads_and_processes_never_nest_in_each_other(scene) -> None:
    scene.op("a", 0, 100).op("b", 10, 10, tid=2).op("c", 20, 10, pid=7)
    assert parents(scene.trace()) == {"a": None, "b": None, "c": None}


def test_spans_without_duration_belong_to_what_encloses_them(scene) -> None:
    scene.op("a", 0, 10).op("zero", 0, 0).op("b", 0, 5).op("zero in b", 5, 0).op("at the end", 10, 0).op("c", 10, 5)
    expected = {"a": None, "b": "a", "zero": "b", "zero in b": "a", "at the end": "c", "c": None}
    assert parents(scene.trace()) == expected


def test_overlap_without_nesting_is_counted_and_gets_no_parent(scene) -> None:
    scene.op("a", 0, 10).op("b", 5, 10).op("c", 6, 2)
    trace = scene.trace()
    assert parents(trace) == {"a": None, "b": None, "c": "b"}
    assert trace.forest.num_overlaps == 1


def test_bookkeeping_of_the_profiler_is_left_out(scene) -> None:
    scene.op("a", 0, 10).op("profiler::_record_function_enter_new", 1, 5).op("b", 2, 1)
    assert parents(scene.trace()) == {"a": None, "b": "a"}


def test_rounded_absolute_timestamps_still_nest(scene) -> None:
    """A double at 1.7e15 us is a quarter of a microsecond apart: a child may seem to end after its parent."""
    base = 1.7e15
    for index in range(10):
        begin = base + index * 100
        scene.op(f"outer{index}", begin, 10.0)
        scene.op(f"inner{index}", begin + 0.25, 9.9)  # ends 0.15 us late
        scene.op(f"next{index}", begin + 10, 5.0)
    trace = scene.trace()
    found = parents(trace)
    assert trace.resolution_ns == 250
    assert all(found[f"inner{index}"] == f"outer{index}" for index in range(10))
    assert all(found[f"next{index}"] is None for index in range(10))


def test_host_side_holds_no_device_rows(scene) -> None:
    scene.op("a", 0, 10).kernel("k", 1, 5, 3).call("cudaLaunchKernel", 2, 1, 3)
    scene.add("cuda_sync", "Stream Sync", 0, 50).add("python_function", "f", 0, 50)
    categories = set(scene.trace().category[scene.trace().forest.event].tolist())
    assert categories == {Category.CPU_OP, Category.RUNTIME}


@st.composite
def nested_spans(draw) -> list[tuple[int, int]]:
    """Spans that nest, with shared borders, equal spans and empty spans."""
    spans: list[tuple[int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(low, high), max_size=6)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            spans.append((start, end))
            if depth < 4:
                fill(start, end, depth + 1)

    fill(0, 60, 0)
    return sorted(spans, key=lambda span: (span[0], -span[1]))


@settings(max_examples=300, deadline=None)
@given(nested_spans())
def test_counting_and_scanning_agree(spans: list[tuple[int, int]]) -> None:
    start, end = (np.array([span[i] for span in spans], np.int64) for i in (0, 1))
    counted, scanned = _nest_by_counting(start, end), _nest_by_scanning(start, end, 0)
    assert counted is not None
    np.testing.assert_array_equal(counted[0], scanned[0])
    np.testing.assert_array_equal(counted[1], scanned[1])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30))
def test_counting_refuses_what_it_cannot_do(pairs: list[tuple[int, int]]) -> None:
    """Whatever the spans: the vector path either gives the scan's answer or leaves it to the scan."""
    spans = sorted(((low, low + length) for low, length in pairs), key=lambda span: (span[0], -span[1]))
    start, end = (np.array([span[i] for span in spans], np.int64) for i in (0, 1))
    counted, scanned = _nest_by_counting(start, end), _nest_by_scanning(start, end, 0)
    if counted is not None:
        np.testing.assert_array_equal(counted[0], scanned[0])
    else:
        assert scanned[2] > 0


def test_innermost_and_outermost_follow_the_parents(scene) -> None:
    scene.op("x", 0, 100).op("y", 1, 90).op("x", 2, 80).op("z", 3, 5)
    trace = scene.trace()
    forest = trace.forest
    is_x = forest.name_id == trace.names.index("x")
    assert forest.innermost(is_x).tolist() == [0, 0, 2, 2]
    assert forest.outermost(is_x).tolist() == [0, 0, 0, 0]
    is_y = forest.name_id == trace.names.index("y")
    assert forest.outermost(is_x, barrier=is_y).tolist() == [0, -1, 2, 2]
    assert forest.sum_up(np.array([1, 2, 3, 4])).tolist() == [10, 9, 7, 4]


@pytest.mark.parametrize("count", [0, 1])
def test_tiny_traces_work(count) -> None:
    empty = np.zeros(count, np.int64)
    assert _nest_by_counting(empty, empty + 1)[0].tolist() == [-1] * count
