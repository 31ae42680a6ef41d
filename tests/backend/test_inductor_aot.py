"""Inductor ahead of time: the exported program has all sizes of the graph, and its file serves as the module does."""

import functools

import pytest
import torch
from flat_calls import Conv, Mlp, Nested, assert_right, call_of, make_request, nested_call
from torch import nn

import perfladder as pl
from perfladder.backend import TorchInductorAotBackend
from perfladder.backend.exported import FlatBuild, exported, flat_module
from perfladder.errors import ArchiveError, InputError, TuningError
from perfladder.tuning.module import control_of


@pytest.fixture
def request_of(tmp_path):
    return functools.partial(make_request, tmp_path)


def exported_sizes(request):
    """The sizes of all inputs of the exported program."""
    program, facts = exported(flat_module(request), request.graph)
    nodes = {node.name: node for node in program.graph.nodes}
    shapes = [nodes[name].meta["val"].shape for name in program.graph_signature.user_inputs]
    ranges = {str(symbol): (int(found.lower), int(found.upper)) for symbol, found in program.range_constraints.items()}
    return [[size if isinstance(size, int) else str(size) for size in shape] for shape in shapes], ranges, facts


def test_stated_ranges_are_those_of_the_program(request_of):
    height, width = pl.DynamicDim("height", 8, 64), pl.DynamicDim("width", 16, 48, 20)
    request = request_of(Conv(), call_of(torch.randn(1, 3, 32, 32)), dynamic_shapes={"image": (1, 3, height, width)})
    ([one, channels, first, second],), ranges, facts = exported_sizes(request)
    assert (one, channels) == (1, 3)
    assert (ranges[first], ranges[second]) == ((8, 64), (16, 48))
    assert facts["dynamic_axes"] == {"height": [8, 64], "width": [16, 48]}


def test_axes_of_one_label_are_one_dimension(request_of):
    request = request_of(Nested(), nested_call(2), nested_call(4), batch_sizes=(2, 4))
    (x, ids, mask), ranges, _ = exported_sizes(request)
    assert x[0] == ids[0] == mask[0]
    assert list(ranges.values()) == [(2, 4)]


class Guided(nn.Module):
    """Takes two entries for each sample, as inputs doubled for classifier-free guidance."""

    def forward(self, latents, prompt):
        return latents.repeat(2, 1) * prompt


def test_an_axis_with_several_entries_for_each_sample_is_a_multiple_of_the_batch(request_of):
    calls = [call_of(torch.randn(size, 4), torch.randn(2 * size, 4)) for size in (2, 3)]
    request = request_of(Guided(), *calls, batch_sizes=(2, 3))
    request.graph.extend_max_batch_size(8)
    (latents, prompt), ranges, _ = exported_sizes(request)
    assert prompt[0] == f"2*{latents[0]}"
    assert ranges[latents[0]] == (2, 8)


class OnlyEven(nn.Module):
    def forward(self, x):
        return x + torch.nn.functional.interpolate(x[..., ::2], scale_factor=2)


class Fixed(nn.Module):
    def forward(self, x):
        return x * torch.ones(1, 1, 8)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Large(nn.Module):
    def forward(self, x):
        return x.mean(-1) if x.shape[-1] > 5 else x.sum(-1)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls += 1
        return x * 2


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OnlyEven(), "shape constraint: the code takes multiples of 2 as size only. Next: state sizes"),
        (Fixed(), "shape constraint: the code works with size = 8 only. Next: state sizes"),
        (Large(), "shape constraint: the code takes size from 6 to 8 only"),
        (Branching(), "data-dependent control flow: .* at `return x if"),
        (Counting(), "changes its own buffer `num_calls` at each call"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_fails_with_its_reason(request_of, module, reason):
    shapes = {"x": (1, 1, pl.DynamicDim("size", 4, 8))}
    request = request_of(module, call_of(torch.ones(1, 1, 8)), dynamic_shapes=shapes)
    with pytest.raises(TuningError, match=reason):
        TorchInductorAotBackend().build(request)
    assert FlatBuild.read(request.folder) is None


def test_a_size_that_the_exporter_built_in_is_named(request_of, monkeypatch):
    """As it does with dimensions that it may fix as it likes."""
    monkeypatch.setattr(torch.export, "Dim", lambda name, min, max: torch.export.dynamic_shapes.Dim.AUTO)
    shapes = {"x": (1, 1, pl.DynamicDim("size", 4, 8))}
    request = request_of(Fixed(), call_of(torch.ones(1, 1, 8)), dynamic_shapes=shapes)
    with pytest.raises(TuningError, match=r"exported size of `x` axis 2 \(size\) is 8, but calls have 4\.\.8"):
        TorchInductorAotBackend().build(request)
    request = request_of(Large(), call_of(torch.ones(1, 1, 8)), dynamic_shapes=shapes)
    with pytest.raises(TuningError, match=r"axis 2 \(size\) is \[6, .*\], but calls have 4\.\.8"):
        TorchInductorAotBackend().build(request)


def test_an_argument_that_cannot_be_looked_into_is_not_applicable(request_of):
    class Opaque:
        value = 2

    class Taking(nn.Module):
        def forward(self, x, setting):
            return x * setting.value

    graph = request_of(Taking(), call_of(torch.ones(2), Opaque())).graph
    assert "`setting` is a" in TorchInductorAotBackend().why_not_for_graph(graph)
    assert "register_input_type" in TorchInductorAotBackend().why_not_for_graph(graph)


def test_an_archive_without_the_file_is_told(request_of):
    request = request_of(Mlp(), call_of(torch.randn(2, 8)))
    with pytest.raises(TuningError, match="there is no finished build"):
        TorchInductorAotBackend().build(request, is_saved=True)


class Everything(nn.Module):
    """Nested arguments, one that it changes, one that it returns, and one with two entries for each sample."""

    def __init__(self):
        super().__init__()
        self.nested = Nested()

    def forward(self, x, total, twice, options, scale=1.0):
        total += 1
        result = self.nested(x, options, scale)
        return {**result, "total": total, "twice": twice * 2 + result["hidden"].repeat(2, 1)[:, :1]}


def everything_call(batch):
    (x,), kwargs = nested_call(batch)
    return call_of(x, torch.zeros(batch, 2), torch.randn(2 * batch, 1), **kwargs)


@pytest.mark.slow
def test_calls_are_served_as_the_module_does(request_of):
    request = request_of(Everything(), everything_call(2), everything_call(4), batch_sizes=(2, 4))
    request.graph.extend_max_batch_size(8)
    built = TorchInductorAotBackend(inductor_configs={"max_autotune": False}).build(request)
    assert_right(built, request)
    assert built.owns_weights
    assert built.details["file_bytes"] > 0
    for size in (2, 3, 8):
        args, kwargs = everything_call(size)
        total = args[1].clone()
        result = built.call(*args, **kwargs)
        expected = request.forward(args[0], total, args[2], **kwargs)
        torch.testing.assert_close(result["twice"], expected["twice"])
        assert result["total"] is args[1]
        assert torch.equal(args[1], torch.ones(size, 2))
        assert result["parts"][1] is kwargs["options"]["mask"]
    # Layouts that were not compiled for; what is changed in place is changed in the caller's tensor.
    (x, _, twice), kwargs = everything_call(3)
    total = torch.zeros(2, 3).t()
    turned = built.call(x.t().contiguous().t(), total, twice, **kwargs)
    torch.testing.assert_close(turned["hidden"], request.forward(x, torch.zeros(3, 2), twice, **kwargs)["hidden"])
    assert torch.equal(total, torch.ones(3, 2))
    with pytest.raises(InputError, match="`x` is on meta"):
        built.call(x.to("meta"), total, twice, **kwargs)
    # The file alone serves calls too, and learns the form of results from the first one.
    again = TorchInductorAotBackend().build(
        make_request(request.folder, Everything(), everything_call(2)), is_saved=True
    )
    torch.testing.assert_close(again.call(x, torch.zeros(3, 2), twice, **kwargs)["hidden"], turned["hidden"])


@pytest.mark.slow
def test_a_saved_module_needs_trust_and_no_compiler(tmp_path, monkeypatch):
    def fresh(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()

    shapes = {"input": (pl.BatchDim("batch", 1, 4), 3, pl.DynamicDim("height", 8, 32), 16)}
    strategy = pl.OneBackendStrategy(TorchInductorAotBackend()).enable_performance_validation(False)
    wrapper = pl.Module(fresh(0), strategy=strategy, dynamic_shapes=shapes)
    report = pl.tune(wrapper, list(torch.randn(2, 3, 16, 16)))
    assert report.modules[0].error is None, report.describe()
    record = control_of(wrapper).chosen[0].record.candidates[0]
    assert record.details["dynamic_axes"] == {"batch": [1, 4], "height": [8, 32]}
    assert record.build_s < record.details["compile_s"], "what the trial had compiled was loaded"
    pl.save(wrapper, tmp_path / "mlp.ait")
    with pytest.raises(ArchiveError, match="trust=True"):
        pl.load(fresh(1), tmp_path / "mlp.ait")
    monkeypatch.setattr("perfladder._torch_private.compile_to_package", None)
    monkeypatch.setattr("perfladder.backend.inductor_jit.has_cpp_compiler", lambda: False)
    assert "needs a C++ compiler" in TorchInductorAotBackend().why_not(torch.device("cpu"))
    other = pl.load(fresh(1), tmp_path / "mlp.ait", trust=True)
    x = torch.randn(3, 3, 20, 16)
    assert torch.equal(other(x), wrapper(x))
    assert not other.num_unseen_calls
    monkeypatch.setattr("perfladder.tuning.checkpoint_load.device_name", lambda _: "another device")
    with pytest.raises(ArchiveError, match="was built for another environment"):
        pl.load(fresh(1), tmp_path / "mlp.ait", trust=True)
