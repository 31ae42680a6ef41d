"""Sizes that a user states are those of every build ahead of time: right up to both ends, and never served beyond."""

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.backend import ONNXRuntimeBackend, TorchInductorAotBackend
from perfladder.errors import TuningError, UnseenGraphWarning
from perfladder.tuning.module import control_of

CHANNELS, WIDTH = 4, 6

onnxruntime = pytest.param(ONNXRuntimeBackend(), id="onnxruntime-dynamo")
onnxruntime_trace = pytest.param(ONNXRuntimeBackend(use_dynamo=False), id="onnxruntime-trace")
inductor_aot = pytest.param(TorchInductorAotBackend(), id="inductor_aot", marks=pytest.mark.slow)
BACKENDS = pytest.mark.parametrize("backend", [inductor_aot, onnxruntime, onnxruntime_trace])


class Guided(nn.Module):
    """Takes two prompts for each sample, as classifier-free guidance does, and images whose height varies."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.project = nn.Linear(5, CHANNELS)

    def forward(self, latents, prompt):
        scale = self.project(prompt)[:, :, None, None]
        return self.conv(torch.cat([latents, latents])) * scale


def call(batch, height, *, num_prompts=None):
    generator = torch.Generator().manual_seed(batch * 100 + height)
    latents = torch.randn(batch, CHANNELS, height, WIDTH, generator=generator)
    return latents, torch.randn(num_prompts or 2 * batch, 5, generator=generator)


STATED = {
    "latents": (pl.BatchDim("batch", 1, 5, 2), CHANNELS, pl.DynamicDim("height", 4, 12, 8), WIDTH),
    "prompt": (pl.BatchDim("prompts", 2, 10, 4), 5),
}


def tuned(backend, *, searches=False, **options):
    """Recorded at one height, and at batches of 1 and 2."""
    pl.config.isolate_builds = False
    strategy = pl.OneBackendStrategy(backend).enable_performance_validation(False)
    strategy.enable_find_max_batch_size(searches)
    wrapper = pl.Module(Guided().eval(), strategy=strategy, **options)

    def function(latents):
        return wrapper(latents, call(len(latents), 8)[1])

    report = pl.tune(function, list(torch.randn(4, CHANNELS, 8, WIDTH)), batch_sizes=[1, 2])
    assert report.modules[0].error is None, report.describe()
    return wrapper


@BACKENDS
def test_stated_ranges_are_served_up_to_both_ends_and_not_beyond(backend, tmp_path):
    if backend.name == "onnxruntime":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    wrapper = tuned(backend, searches=True, dynamic_shapes=STATED)
    record = control_of(wrapper).chosen[0].record.candidates[0]
    assert record.details["dynamic_axes"] == {"batch": [1, 5], "height": [4, 12], "prompts": [2, 10]}
    num_cases = pl.config.max_num_samples_stored + 3
    assert record.correctness.num_cases == num_cases, "samples, and the least, preferred and largest sizes"
    plain = control_of(wrapper).plain
    for batch, height in ((1, 4), (1, 12), (2, 8), (3, 7), (5, 4), (5, 12)):
        args = call(batch, height)
        torch.testing.assert_close(wrapper(*args), plain(*args), rtol=1e-4, atol=1e-4)
    assert not wrapper.num_unseen_calls, "all of them took the tuned path"

    beyond = [
        (call(6, 8), r"size 6 of `latents` axis 0 is outside 1\.\.5"),
        (call(1, 3), r"size 3 of `latents` axis 2 is outside 4\.\.12"),
        (call(1, 13), r"size 13 of `latents` axis 2 is outside 4\.\.12"),
    ]
    for args, reason in beyond:
        with pytest.warns(UnseenGraphWarning, match=reason):
            found = wrapper(*args)
        assert torch.equal(found, plain(*args)), "the plain module serves it"
    assert sum(wrapper.num_unseen_calls.values()) == len(beyond)

    pl.save(wrapper, tmp_path / "guided.ait")
    pl.config.unseen_graph = "error"
    loaded = pl.load(Guided(), tmp_path / "guided.ait", trust=True)
    torch.testing.assert_close(loaded(*call(5, 12)), plain(*call(5, 12)), rtol=1e-4, atol=1e-4)
    for args, reason in beyond:
        with pytest.raises(TuningError, match=reason):
            loaded(*args)


@pytest.mark.parametrize("backend", [onnxruntime, onnxruntime_trace])
def test_prompts_that_are_not_twice_the_batch_are_never_served(backend):
    pytest.importorskip("onnxscript")
    wrapper = tuned(backend, dynamic_shapes={"latents": STATED["latents"]})
    plain = control_of(wrapper).plain
    graph = wrapper.graph_specs[0]
    assert graph.get_max_batch_size() == 2, "prompts are not stated, and two samples were seen"
    args = call(2, 12)
    torch.testing.assert_close(wrapper(*args), plain(*args), rtol=1e-4, atol=1e-4)
    assert not wrapper.num_unseen_calls
    with (
        pytest.warns(UnseenGraphWarning, match="does not fit the batch of `latents`"),
        pytest.raises(RuntimeError, match="must match the size"),
    ):
        wrapper(*call(2, 8, num_prompts=2))


num_rows = []


class Rows(nn.Module):
    """Tells how many rows it is called with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        if not torch.compiler.is_exporting():
            num_rows.append(x.shape[0])
        return self.linear(x)


@pytest.fixture
def rows():
    num_rows.clear()
    return Rows().eval()


def test_without_a_batch_axis_nothing_larger_than_stated_is_tried(clock, rows):
    """An axis that the user calls another name than the batch is none, though calls have the batch size there."""
    pytest.importorskip("onnxscript")
    pl.config.isolate_builds = False
    strategy = pl.OneBackendStrategy(ONNXRuntimeBackend()).enable_performance_validation(False)
    strategy.enable_find_max_batch_size()
    wrapper = pl.Module(rows, strategy=strategy, dynamic_shapes={"x": (pl.DynamicDim("rows", 2, 6), 8)})
    report = pl.tune(lambda x: wrapper(x.repeat(2, 1)), list(torch.randn(3, 8)), clock=clock, batch_sizes=[1, 2])
    assert report.modules[0].error is None, report.describe()
    assert max(num_rows) == 6
    assert not wrapper.graph_specs[0].has_batch_axis
    assert control_of(wrapper).chosen[0].record.candidates[0].details["dynamic_axes"] == {"rows": [2, 6]}
    x = torch.randn(6, 8)
    torch.testing.assert_close(wrapper(x), rows(x))
    assert not wrapper.num_unseen_calls


def test_a_stated_batch_is_not_searched_beyond(clock, rows):
    pytest.importorskip("onnxscript")
    pl.config.isolate_builds = False
    strategy = pl.OneBackendStrategy(ONNXRuntimeBackend()).enable_performance_validation(False)
    strategy.enable_find_max_batch_size()
    wrapper = pl.Module(rows, strategy=strategy, dynamic_shapes={"x": (pl.BatchDim("batch", 1, 6), 8)})
    report = pl.tune(wrapper, list(torch.randn(3, 8)), clock=clock, batch_sizes=[1, 2])
    assert report.modules[0].error is None, report.describe()
    assert max(num_rows) == 6
    graph = wrapper.graph_specs[0]
    assert graph.get_max_batch_size() == 6
    assert graph.outputs[0].max_shape[0] <= 6
