"""How engines of TensorRT are run: memory, profiles, CUDA graphs, threads. The engine is a stand-in that computes by
torch at the addresses it is given; those marked `gpu` record real CUDA graphs of it.
"""

import pytest
import torch
from flat_calls import Nested, make_request, nested_call
from threads import at_once
from trt_stand_in import CpuLane, opened

from perfladder.backend.cuda_graphs import BoundedCache
from perfladder.backend.cuda_lane import CudaLane
from perfladder.backend.flat import FlatCall, FlatModule, learned_form
from perfladder.backend.trt_runner import TensorRTRunner
from perfladder.errors import InputError, TuningError


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def lane(request):
    return CpuLane() if request.param == "cpu" else CudaLane(torch.device("cuda", 0))


DOUBLING = [{"x": ((1, 4), (4, 4), (8, 4))}]


def doubling(lane, profiles=DOUBLING, max_graphs=2, policy="lru"):
    engine, record, inside = opened(
        lambda x: (x * 2,), {"x": torch.float32}, {"y": torch.float32}, profiles, lambda x: [x], lane
    )
    return TensorRTRunner(engine, record, lane, max_graphs=max_graphs, policy=policy), inside


def rows(count, lane, start=0.0):
    return torch.arange(count * 4, dtype=torch.float32, device=lane.device).view(count, 4) + start


def test_inputs_are_read_and_results_written_where_they_are(lane):
    run, inside = doubling(lane)
    x = rows(2, lane)
    (y,) = run([x])
    assert torch.equal(y, x * 2)
    assert inside.contexts[0].ran_at == [{"x": x.data_ptr(), "y": y.data_ptr()}]
    assert (y.dtype, y.device) == (torch.float32, lane.device)


def test_a_size_is_replayed_from_its_second_call_on(lane):
    run, inside = doubling(lane)
    seen = [(run([rows(2, lane, start)])[0], start) for start in (0.0, 10.0, 20.0, 30.0)]
    assert (run.num_captures, run.num_replays, run.num_graphs) == (1, 3, 1)
    assert len(inside.contexts) == 2
    # Results of replays are the caller's own: the next replay leaves them as they are.
    for y, start in seen:
        assert torch.equal(y, rows(2, lane, start) * 2)


def test_each_graph_has_a_context_of_its_own_in_one_scratch_memory(lane):
    run, inside = doubling(lane)
    for _ in range(2):
        for count in (1, 2):
            run([rows(count, lane)])
    run([rows(5, lane)])
    assert [context.shapes["x"] for context in inside.contexts] == [(5, 4), (1, 4), (2, 4)]
    assert len({context.scratch for context in inside.contexts}) == 1
    assert torch.equal(run([rows(1, lane, 7.0)])[0], rows(1, lane, 7.0) * 2)


def test_without_graphs_nothing_is_recorded(lane):
    run, inside = doubling(lane, max_graphs=0)
    for start in range(3):
        assert torch.equal(run([rows(3, lane, start)])[0], rows(3, lane, start) * 2)
    assert run.num_captures == run.num_replays == 0
    assert len(inside.contexts) == 1


def test_the_profile_nearest_to_a_call_serves_it(lane):
    profiles = [{"x": ((1, 4), (8, 4), (8, 4))}, {"x": ((2, 4), (2, 4), (3, 4))}]
    run, inside = doubling(lane, profiles, max_graphs=0)
    used = []
    for count in (1, 2, 3, 8):
        assert torch.equal(run([rows(count, lane)])[0], rows(count, lane) * 2)
        used.append(inside.contexts[0].active_optimization_profile)
    assert used == [0, 1, 1, 0]
    assert inside.contexts[0].num_switches == 2


def test_a_shape_outside_every_profile_names_the_input_and_the_ranges(lane):
    run, _ = doubling(lane, [{"x": ((1, 4), (2, 4), (3, 4))}, {"x": ((6, 4), (6, 4), (6, 4))}])
    with pytest.raises(
        InputError, match=r"`x` has shape \[5, 4\].*built for \[1, 4\]\.\.\[3, 4\], \[6, 4\]\.\.\[6, 4\]"
    ):
        run([rows(5, lane)])


def test_shapes_that_no_profile_has_together_are_named(lane):
    engine, record, _ = opened(
        lambda x, y: (x + y,),
        {"x": torch.float32, "y": torch.float32},
        {"z": torch.float32},
        [{"x": ((size,),) * 3, "y": ((size,),) * 3} for size in (1, 2)],
        lambda x, y: [x],
        lane,
    )
    run = TensorRTRunner(engine, record, lane, max_graphs=0, policy="lru")
    with pytest.raises(InputError, match=r"no profile of the engine has `x` \[1\], `y` \[2\] together"):
        run([torch.ones(1, device=lane.device), torch.ones(2, device=lane.device)])


def test_the_graph_used_longest_ago_makes_room(lane):
    run, _ = doubling(lane, max_graphs=1)
    for count in (1, 1, 2, 2):
        run([rows(count, lane)])
    assert (run.num_graphs, run.num_captures) == (1, 2)
    run([rows(1, lane)])
    assert run.num_captures == 3


def test_the_graph_used_least_makes_room_only_for_one_used_more(lane):
    run, _ = doubling(lane, max_graphs=1, policy="lfu")
    for count in (1, 1, 1, 2, 2, 2):
        run([rows(count, lane)])
    assert run.num_captures == 1
    run([rows(2, lane)])
    assert (run.num_graphs, run.num_captures) == (1, 2)


@pytest.mark.parametrize(("policy", "left"), [("lru", {"b", "c"}), ("lfu", {"a", "c"})])
def test_policies_of_the_cache(policy, left):
    cache = BoundedCache(2, policy)
    for key in "aaabb":
        cache.get(key)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("b" if policy == "lru" else "a")
    assert not cache.wants("c")
    for _ in range(4):
        cache.get("c")
    assert cache.wants("c")
    cache.put("c", 3)
    assert {key for key in "abc" if key in cache} == left


def test_the_cache_counts_a_bounded_number_of_sizes():
    cache = BoundedCache(1, "lfu")
    cache.put("kept", 1)
    cache.get("kept")
    for number in range(5000):
        cache.get(number)
    assert len(cache._calls) <= 1024
    assert cache.get("kept") == 1


def test_results_of_unknown_sizes_get_memory_when_they_are_known(lane):
    engine, record, _ = opened(
        lambda x: (x[x > 0], x + 1),
        {"x": torch.float32},
        {"positive": torch.float32, "next": torch.float32},
        [{"x": ((0,), (4,), (8,))}],
        lambda x: [(-1,), x],
        lane,
    )
    run = TensorRTRunner(engine, record, lane, max_graphs=2, policy="lru")
    kept = []
    for values in ([1.0, -1.0, 2.0], [3.0, 4.0, -5.0], [-1.0, -2.0, -3.0]):
        kept.append(run([torch.tensor(values, device=lane.device)]))
    assert [positive.tolist() for positive, _ in kept] == [[1.0, 2.0], [3.0, 4.0], []]
    assert kept[0][1].tolist() == [2.0, 0.0, 3.0]
    assert run.num_captures == 0


def test_numbers_flags_and_empty_tensors_go_in_and_out(lane):
    engine, record, _ = opened(
        lambda x, count, flags: (x * count, count + 1, ~flags),
        {"x": torch.float32, "count": torch.int64, "flags": torch.bool},
        {"scaled": torch.float32, "next": torch.int64, "turned": torch.bool},
        [{"x": ((0, 2), (2, 2), (4, 2)), "count": ((),) * 3, "flags": ((0,), (2,), (4,))}],
        lambda x, count, flags: [x, count, flags],
        lane,
    )
    run = TensorRTRunner(engine, record, lane, max_graphs=2, policy="lru")
    for size in (3, 0, 3, 0, 3):
        x = torch.ones(size, 2, device=lane.device)
        flags = torch.arange(size, device=lane.device) > 0
        count = torch.tensor(3 + size, device=lane.device)
        scaled, following, turned = run([x, count, flags])
        assert torch.equal(scaled, x * count)
        assert (following.shape, following.dtype, following.item()) == ((), torch.int64, 4 + size)
        assert torch.equal(turned, ~flags)
    assert run.num_captures == 2


def test_a_part_of_a_tensor_is_moved_to_an_aligned_address(lane):
    run, inside = doubling(lane)
    part = rows(3, lane)[1:]
    (y,) = run([part])
    assert torch.equal(y, part * 2)
    assert inside.contexts[0].ran_at[0]["x"] % 64 == 0
    assert inside.contexts[0].ran_at[0]["x"] != part.data_ptr()


def test_four_threads_get_their_own_results(lane):
    run, _ = doubling(lane, max_graphs=2, policy="lfu")
    wrong = []

    def work(number):
        for call in range(40):
            x = rows(1 + (number + call) % 4, lane, number * 1000.0 + call)
            if not torch.equal(run([x])[0], x * 2):
                wrong.append((number, call))

    at_once(4, work)
    assert not wrong
    assert run.num_graphs <= 2


def test_a_call_that_cannot_be_recorded_runs_without_a_graph(lane, caplog):
    run, inside = doubling(lane)
    inside.can_be_recorded = False
    for start in range(4):
        assert torch.equal(run([rows(2, lane, start)])[0], rows(2, lane, start) * 2)
    assert run.num_replays == 0
    assert [record.message for record in caplog.records] == [
        "Calls of [2, 4] run without a CUDA graph: the engine's runtime says that it cannot be recorded"
    ]


def test_another_dtype_is_refused(lane):
    run, _ = doubling(lane)
    with pytest.raises(InputError, match=r"`x` is torch\.float64, but the engine was built for torch\.float32"):
        run([rows(2, lane).double()])


def test_an_engine_that_fails_is_an_error(lane):
    run, inside = doubling(lane)
    inside.works = False
    with pytest.raises(TuningError, match="the engine failed to run"):
        run([rows(2, lane)])


def test_while_somebody_else_records_there_is_no_graph_of_ours():
    lane = CpuLane()
    run, inside = doubling(lane)
    lane.others_record = True
    for start in range(3):
        assert torch.equal(run([rows(2, lane, start)])[0], rows(2, lane, start) * 2)
    assert run.num_captures == 0
    lane.others_record = False
    run([rows(3, lane)])
    # What their graph holds is never set to anything else.
    assert [context.shapes["x"] for context in inside.contexts] == [(2, 4), (3, 4)]


def test_nested_results_and_arguments_that_are_passed_on_are_put_together(tmp_path):
    lane, module = CpuLane(), Nested()
    request = make_request(tmp_path, module, nested_call(2), nested_call(4), batch_sizes=(2, 4))
    args, kwargs = nested_call(2)
    flat = FlatModule(request, args, kwargs)
    inputs = {f"input_{number}": tensor.dtype for number, tensor in enumerate(flat.tensors)}
    ranges = [{name: ((1, *t.shape[1:]), t.shape, (8, *t.shape[1:])) for name, t in zip(inputs, flat.tensors)}]  # noqa: B905

    def sizes(x, *others):
        return [x, x[:1]]

    @torch.no_grad()
    def function(*tensors):
        return flat(*tensors)

    outputs = {"hidden": torch.float32, "sum": torch.float32}
    engine, record, _ = opened(function, inputs, outputs, ranges, sizes, lane)
    run = TensorRTRunner(engine, record, lane, max_graphs=2, policy="lfu")
    call = FlatCall(request, flat.inputs, run, learned_form(request, *nested_call(2)))
    for batch in (2, 3, 3, 3):
        args, kwargs = nested_call(batch)
        with torch.no_grad():
            result, expected = call(*args, **kwargs), request.forward(*args, **kwargs)
        assert result["again"] is result["hidden"]
        assert result["parts"][1] is kwargs["options"]["mask"]
        torch.testing.assert_close(result["hidden"], expected["hidden"])
        torch.testing.assert_close(result["parts"][0], expected["parts"][0])
    assert run.num_replays == 2


@pytest.mark.gpu
def test_calls_of_several_streams_wait_for_each_other_on_the_device():
    lane = CudaLane(torch.device("cuda", 0))
    run, _ = doubling(lane, max_graphs=2)
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(100_000)
            x = rows(1 + turn % 4, lane, float(turn))
            results.append((run([x])[0], x * 2))
    torch.cuda.synchronize()
    assert all(torch.equal(found, right) for found, right in results)


@pytest.mark.gpu
def test_a_call_inside_a_graph_of_the_users_is_replayed_with_it():
    lane = CudaLane(torch.device("cuda", 0))
    run, _ = doubling(lane)
    x = rows(2, lane)
    run([x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = run([x])
    run([rows(5, lane)])
    x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
