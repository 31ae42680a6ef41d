"""Calls that are recorded and replayed; those marked `gpu` record real CUDA graphs."""

import copy
import gc
import types
import weakref
from dataclasses import replace

import pytest
import torch
from cpu_graphs import OperatorLane
from flat_calls import Mlp, Nested, call_of, make_request, nested_call
from threads import at_once
from torch import nn

import perfladder as pl
from perfladder import _torch_private
from perfladder.backend.cuda_lane import CudaLane
from perfladder.backend.flat import FlatModule
from perfladder.backend.graphed_call import GraphedCall, graphed
from perfladder.errors import InputError
from perfladder.profiling.graph_off import without_graphs
from perfladder.tuning.module import control_of


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def lane(request):
    return OperatorLane() if request.param == "cpu" else CudaLane(torch.device("cuda", 0))


def on(lane, module, folder, *calls, batch_sizes=()):
    """A request whose module and samples lie where the lane is."""
    moved = [pl.tuning.tree.map_tensors(call, lambda t: t.to(lane.device)) for call in calls]
    request = make_request(folder, copy.deepcopy(module).to(lane.device), *moved, batch_sizes=batch_sizes)
    return replace(request, device=lane.device)


def rows(count, lane, start=0):
    return torch.linspace(start, start + 1, count * 8, device=lane.device).view(count, 8)


def test_a_size_is_replayed_from_its_second_call_on_and_right(lane, tmp_path):
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)), call_of(rows(4, lane)), batch_sizes=(2, 4))
    call = GraphedCall(request, lane)
    kept = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            for start in range(3):
                for count in (2, 4):
                    x = rows(count, lane, start)
                    kept.append((call(x), request.forward(x)))
    assert (call.num_graphs, call.why_not) == (2, None)
    assert call._sizes.num_replays == 2 * 9 - 2
    for found, right in kept:
        torch.testing.assert_close(found, right)


def test_weights_that_are_changed_in_place_are_seen(lane, tmp_path):
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    with torch.no_grad():
        for _ in range(3):
            call(x)
        request.module.layers[2].bias += 7
        torch.testing.assert_close(call(x), request.forward(x))
    assert call.num_graphs == 1


def test_nested_results_are_put_together(lane, tmp_path):
    request = on(lane, Nested(), tmp_path, nested_call(2), nested_call(4), batch_sizes=(2, 4))
    call = GraphedCall(request, lane)
    for batch in (2, 4, 2, 4, 2):
        args, kwargs = pl.tuning.tree.map_tensors(nested_call(batch), lambda t: t.to(lane.device))
        with torch.no_grad():
            result, expected = call(*args, **kwargs), request.forward(*args, **kwargs)
        assert result["again"] is result["hidden"]
        assert result["parts"][1] is kwargs["options"]["mask"]
        torch.testing.assert_close(result["hidden"], expected["hidden"])
    assert call.num_graphs == 2


class Waits(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x * 3


class ChangesInput(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class Nothing(nn.Module):
    def forward(self, x):
        return {"same": x}


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.count


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Waits(), "permitted when stream is capturing"),
        (ChangesInput(), "`x` is changed in place"),
        (Counts(), "changes its own buffer `count` at each call"),
        (Nothing(), "no tensor that it computes"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(lane, tmp_path, module, says):
    request = on(lane, module, tmp_path, call_of(rows(2, lane)))
    call, twin = GraphedCall(request, lane), copy.deepcopy(request.module)
    for start in (1, -9, 1, -9):
        x = rows(2, lane, start)
        other = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(call(x), twin(other))
        torch.testing.assert_close(x, other)
    assert call.num_graphs == 0
    assert says in call.why_not
    assert "\n" not in call.why_not
    if lane.device.type == "cuda":  # what failed leaves torch's allocator and random numbers as they were
        torch.cuda.empty_cache()
        torch.randn(2, device=lane.device)


def test_a_size_that_cannot_be_recorded_leaves_others_their_graphs(lane, tmp_path):
    class WaitsAtFour(nn.Module):
        def forward(self, x):
            return x * (x.sum().item() if len(x) == 4 else 3.0)

    request = on(lane, WaitsAtFour(), tmp_path, call_of(rows(2, lane)), call_of(rows(4, lane)), batch_sizes=(2, 4))
    call = GraphedCall(request, lane)
    with torch.no_grad():
        for start in range(4):
            for count in (2, 4):
                x = rows(count, lane, start)
                torch.testing.assert_close(call(x), request.forward(x))
    assert (call.num_graphs, call.why_not) == (1, None)
    assert call._sizes.num_replays == 3
    assert list(call._sizes.unfit) == [((4, 8),)]


@pytest.mark.parametrize("how", ["parameter", "data", "state dict", "module"])
def test_weights_that_others_replace_are_seen(lane, tmp_path, how):
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    call, x, layer = GraphedCall(request, lane), rows(2, lane), request.module.layers[0]
    with torch.no_grad():
        for _ in range(3):
            before = call(x)
        other = layer.weight * 3
        if how == "parameter":
            layer.weight = nn.Parameter(other)
        elif how == "data":
            layer.weight.data = other
        elif how == "module":  # as adapters are put in
            request.module.layers[0] = nn.Sequential(layer, nn.Linear(16, 16, device=lane.device))
        else:
            layer.load_state_dict({"weight": other, "bias": layer.bias + 1}, assign=True)
        for _ in range(3):
            torch.testing.assert_close(call(x), request.forward(x))
    assert not torch.allclose(call(x), before)
    assert (call.num_graphs, call._sizes.num_captures) == (1, 2)


def test_a_result_on_another_device_is_no_part_of_a_graph(lane, tmp_path):
    other = "meta" if lane.device.type == "cpu" else "cpu"

    class Sizes(nn.Module):
        def forward(self, x):
            return x * 2, torch.full((2,), len(x), device=other)

    request = on(lane, Sizes(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    with torch.no_grad():
        for _ in range(3):
            doubled, size = call(x)
    torch.testing.assert_close(doubled, x * 2)
    assert size.device.type == other
    assert call.why_not == f"a result is on {other}, where a replay computes nothing"


def test_a_sparse_result_is_no_part_of_a_graph(tmp_path):
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    lane = OperatorLane()
    request = on(lane, Sparse(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    for _ in range(3):
        torch.testing.assert_close(call(x).to_dense(), x)
    assert call.why_not.startswith("a result is torch.sparse_coo")


def test_a_graph_for_which_memory_runs_out_is_done_without(tmp_path):
    class Full(OperatorLane):
        def record(self, work):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation.")

    lane = Full()
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), request.forward(x))
    assert call.why_not.startswith("CUDA out of memory")


def test_what_a_module_keeps_while_it_is_recorded_stays_with_the_graph(lane, tmp_path):
    class Caches(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None or len(self.table) < len(x):
                self.table = torch.arange(len(x) * 8, device=x.device).view(-1, 8) + 1.0
            return x * self.table[: len(x)]

    request = on(lane, Caches(), tmp_path, call_of(rows(2, lane)), call_of(rows(64, lane)), batch_sizes=(2, 64))
    request.module.table = None
    call = GraphedCall(request, lane)
    with torch.no_grad():
        for count in (2, 2, 2, 64, 64, 2, 64):
            x = rows(count, lane)
            held = [torch.full((2, 8), -1.0, device=lane.device) for _ in range(8)]  # takes memory that was freed
            torch.testing.assert_close(call(x), x * (torch.arange(count * 8, device=lane.device).view(-1, 8) + 1.0))
            del held
    assert call.num_graphs == 2


def test_the_tensors_of_the_call_that_was_learned_from_are_let_go(tmp_path):
    request = on(OperatorLane(), Nested(), tmp_path, nested_call(2))
    args, kwargs = nested_call(2)
    flat = FlatModule(request, args, kwargs)
    tensors = flat.tensors
    with torch.no_grad():
        expected = flat(*tensors)
        flat.forget_call()
        torch.testing.assert_close(flat(*tensors), expected)
    assert not [part for part in flat._parts if isinstance(part, torch.Tensor)]


def test_memory_of_graphs_is_given_back_with_the_last_reference(lane, tmp_path):
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    call = GraphedCall(request, lane)
    with torch.no_grad():
        for _ in range(2):
            call(rows(2, lane))
    (graph,) = call._sizes._graphs._kept.values()
    there = weakref.ref(graph)
    gc.disable()
    try:
        del call, graph
        assert there() is None
    finally:
        gc.enable()


class PlayedGraph:
    """Notes what is done with it."""

    made = []

    def __init__(self):
        self.done, self.end_fails = [], not PlayedGraph.made
        PlayedGraph.made.append(self)

    def capture_begin(self, **options):
        assert not gc.isenabled()
        self.done.append("begin")

    def capture_end(self):
        self.done.append("end")
        if self.end_fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def reset(self):
        self.done.append("reset")


@pytest.fixture
def played(monkeypatch):
    """Recordings of which the first one ends badly."""
    ended = []
    monkeypatch.setattr(PlayedGraph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: ended.append(where), raising=False)
    monkeypatch.setattr(_torch_private, "_failed_recordings", [])
    lane = CudaLane.__new__(CudaLane)
    lane.device = torch.device("cpu", 0)
    return lane, ended


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (ValueError("first line\nsecond line"), RuntimeError, "cannot be recorded: first line$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_recording_that_fails_is_ended_and_torch_is_put_right(played, error, raised, says):
    lane, ended = played

    def work(stream):
        assert stream == 5
        raise error

    with pytest.raises(raised, match=says):
        lane.record(work)
    failed, good = PlayedGraph.made
    assert (failed.done, good.done) == (["begin", "end", "reset"], ["begin", "end"])
    assert ended == [(0, (0, 7))]
    assert _torch_private._failed_recordings == [failed]
    assert gc.isenabled()
    assert lane.record(lambda stream: None).done == ["begin", "end"]


def test_memory_that_earlier_calls_left_is_given_back_for_a_recording(played, monkeypatch):
    lane, _ = played
    PlayedGraph.made.append(None)  # so that none ends badly
    given_back, tensors = [], []

    def empty_cache():
        given_back.append([there() for there in tensors])

    def work(stream):
        if not tensors:
            left = torch.ones(8)
            tensors.append(weakref.ref(left))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert lane.record(work) is PlayedGraph.made[2]
    assert given_back == [[None]], "what failed is gone by then"


def test_a_cache_that_grows_is_no_part_of_a_graph(lane, tmp_path):
    class Decoder(nn.Module):
        def forward(self, x, cache):
            keys, _ = cache.update(x[:, None], x[:, None], 0)
            return keys.sum((1, 2))

    transformers = pytest.importorskip("transformers")
    x = torch.ones(2, 3, 8, device=lane.device)
    request = on(lane, Decoder(), tmp_path, call_of(x, transformers.DynamicCache()))
    call, cache = GraphedCall(request, lane), transformers.DynamicCache()
    with torch.no_grad():
        for turn in (1, 2, 3):
            torch.testing.assert_close(call(x, cache), torch.full((2, 8), 3.0 * turn, device=lane.device))
            assert cache.get_seq_length() == 3 * turn
    assert "another tensor in the place of `cache" in call.why_not


@pytest.mark.gpu
def test_a_value_on_the_host_is_no_part_of_a_graph(tmp_path):
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    lane = CudaLane(torch.device("cuda", 0))
    module, x = Scaled(), rows(2, lane)
    request = replace(make_request(tmp_path, module, call_of(x, torch.tensor(2.0))), device=lane.device)
    call = GraphedCall(request, lane)
    for factor in (2.0, 3.0, 4.0):
        torch.testing.assert_close(call(x, torch.tensor(factor)), x * factor)
    assert "`factor` is on the CPU" in call.why_not


def test_threads_get_their_own_results(lane, tmp_path):
    request = on(lane, Mlp(), tmp_path, call_of(rows(1, lane)), call_of(rows(2, lane)), batch_sizes=(1, 2))
    call, wrong = GraphedCall(request, lane), []

    def work(number):
        for turn in range(30):
            x = rows(1 + (number + turn) % 2, lane, number * 10 + turn)
            with torch.no_grad():
                if not torch.allclose(call(x), request.forward(x), atol=1e-5):
                    wrong.append((number, turn))

    at_once(4, work)
    assert not wrong
    assert call.num_graphs == 2


def test_inside_a_graph_of_somebody_else_there_is_none_of_ours(tmp_path):
    lane = OperatorLane()
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    lane.others_record = True
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), request.forward(x))
    assert call.num_graphs == 0


def test_tuned_modules_can_run_without_their_graphs_for_a_while(lane, tmp_path, monkeypatch):
    monkeypatch.setattr("perfladder.backend.graphed_call.CudaLane", lambda device: lane)
    monkeypatch.setattr("perfladder.backend.eager.why_no_graphs", lambda device: None)
    monkeypatch.setattr(pl.config, "cache_dir", tmp_path / "cache")
    strategy = pl.OneBackendStrategy(pl.backend.TorchEagerBackend(cuda_graphs=True))
    wrapper = pl.Module(Mlp().to(lane.device).eval(), strategy=strategy.enable_performance_validation("diagnostic"))
    pl.tune(wrapper, [(row,) for row in rows(4, lane)], [1, 2])
    call, x = control_of(wrapper).chosen[0].call, rows(2, lane)
    with torch.no_grad():
        expected, replays = wrapper(x), call._sizes.num_replays
        with without_graphs([wrapper]) as changed:
            assert changed == [call]
            torch.testing.assert_close(wrapper(x), expected)
        assert call._sizes.num_replays == replays > 0
        with without_graphs([nn.Linear(2, 2)]) as changed:
            assert changed == []
        wrapper(x)
        assert call._sizes.num_replays == replays + 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("backend", [pl.backend.TorchEagerBackend, pl.backend.TorchInductorJitBackend])
@pytest.mark.parametrize("options", [{}, {"memory_format": "channels_last"}])
def test_backends_record_their_samples(tmp_path, backend, options):
    lane = CudaLane(torch.device("cuda", 0))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Dropout(0.5), nn.Conv2d(8, 3, 3))
    request = on(lane, module, tmp_path, call_of(torch.randn(2, 3, 16, 16)))
    # A sequence calls its argument `input`.
    built = backend(cuda_graphs=True, **options).build(request)
    assert built.details["num_cuda_graphs"] == 1, built.details
    for _ in range(3):
        x = torch.randn(2, 3, 16, 16, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(built.call(x), request.forward(x), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_random_numbers_of_replays_are_those_of_the_seed(tmp_path):
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    lane = CudaLane(torch.device("cuda", 0))
    request = on(lane, Noisy(), tmp_path, call_of(rows(2, lane)))
    call, x = GraphedCall(request, lane), rows(2, lane)
    for _ in range(3):
        call(x)
    assert call.num_graphs == 1
    results = []
    for one in (call, request.forward):
        torch.manual_seed(5)
        results += [torch.stack([one(x), one(x)])]
    torch.testing.assert_close(*results)


def test_on_a_cpu_there_are_no_cuda_graphs():
    backend = pl.backend.TorchEagerBackend(cuda_graphs=True)
    assert backend.why_not(torch.device("cpu")) == "CUDA graphs need an NVIDIA GPU, and this is cpu"
    assert pl.backend.TorchInductorJitBackend(cuda_graphs=True).why_not(torch.device("cpu"))
    with pytest.raises(InputError, match="cuda_graphs"):
        pl.backend.TorchInductorJitBackend(cuda_graphs="yes please")


def test_calls_that_a_graph_is_not_for_run_as_they_are(tmp_path):
    class Scaled(Mlp):
        def forward(self, x, scale):
            return x * scale

    lane = OperatorLane()
    x = rows(2, lane)
    request = make_request(tmp_path, Scaled(), call_of(x, 2.0), strict=False)
    call = GraphedCall(request, lane)
    with torch.no_grad():
        for scale in (3.0, 2.0, 2.0, 3.0, 2.0):
            torch.testing.assert_close(call(x, scale), x * scale)
        assert call(x.to("meta"), 2.0).device.type == "meta"
    assert (call.num_graphs, call._sizes.num_replays) == (1, 2)


def test_samples_are_recorded_without_gradients(tmp_path, monkeypatch):
    class Watches(Mlp):
        seen = []

        def forward(self, x):
            self.seen.append(torch.is_grad_enabled())
            return super().forward(x)

    lane = OperatorLane()
    monkeypatch.setattr("perfladder.backend.graphed_call.CudaLane", lambda device: lane)
    request = on(lane, Watches(), tmp_path, call_of(rows(2, lane)))
    Watches.seen.clear()
    graphed(pl.backend.TorchEagerBackend().build(request), request)
    assert set(Watches.seen) == {False}


def test_details_tell_how_many_or_why_none(tmp_path, monkeypatch):
    lane = OperatorLane()
    monkeypatch.setattr("perfladder.backend.graphed_call.CudaLane", lambda device: lane)
    request = on(lane, Mlp(), tmp_path, call_of(rows(2, lane)))
    built = pl.backend.TorchEagerBackend().build(request)
    assert graphed(built, request).details == {"num_cuda_graphs": 1}
    waits = on(lane, Waits(), tmp_path, call_of(rows(2, lane)))
    details = graphed(pl.backend.TorchEagerBackend().build(waits), waits).details
    assert details["num_cuda_graphs"] == 0
    assert "capturing" in details["no_cuda_graph"]
