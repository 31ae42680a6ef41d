"""What a module keeps between its calls is as it was before trials, and candidates that change more are found out."""

import random
from collections import Counter

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.tuning.state import ModuleState


class Counting(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.num_calls = 0
        self.notes = []
        self.eval()

    def forward(self, x):
        self.count += 1
        self.num_calls += 1
        self.notes.append(len(x))
        self.last = x.sum()
        return self.inner(x) + self.count


class Same(pl.backend.Backend):
    name = "test_same"
    is_isolated = False

    def compile(self, request):
        return request.forward


class Altering(Same):
    """Leaves something behind in the module that it builds from."""

    name = "test_altering"

    def __init__(self, alter):
        super().__init__()
        self.alter = alter

    def compile(self, request):
        self.alter(request.module)
        return request.forward


def tuned(module, backend, **options):
    strategy = pl.OneBackendStrategy(backend).enable_performance_validation(False)
    wrapper = pl.Module(module, strategy=strategy)
    report = pl.tune(wrapper, toys.samples(), **options)
    return wrapper, report.modules[0].graphs[0]


def candidate_of(graph):
    return (graph.decision.candidates if graph.decision else graph.candidates)[0]


def test_state_is_set_back_in_place():
    module = Counting()
    module.options = {"scale": 1}
    state, buffer, notes = ModuleState(module), module.count, module.notes
    module(torch.ones(2, 4))
    module.options["scale"] = 2
    module.train()
    state.restore()
    assert (float(module.count), module.num_calls, module.notes, module.options) == (0, 0, [], {"scale": 1})
    assert module.count is buffer
    assert module.notes is notes
    assert not module.training
    assert not module.inner.training
    assert not hasattr(module, "last")


def test_trials_leave_a_module_as_its_recorded_calls_left_it():
    module = Counting()
    wrapper, graph = tuned(module, Same())
    assert candidate_of(graph).status == "kept"
    assert wrapper.state == "tuned"
    num_recorded = 3
    assert (float(module.count), module.num_calls, len(module.notes)) == (num_recorded,) * 3


class Drawing(nn.Module):
    def forward(self, x):
        return x + random.random()  # not torch's, so that no seed of torch sets it


def test_a_module_whose_output_differs_by_itself_is_no_fault_of_a_candidate():
    _, graph = tuned(Drawing().eval(), Same())
    found = candidate_of(graph)
    assert found.status == "rejected"
    assert found.reason.startswith("the plain module itself gives another output than before (sample 0: output: ")


@pytest.mark.parametrize(
    "alter",
    [
        lambda module: module[0].register_forward_hook(lambda *_: _[-1] * 2),
        lambda module: module[0].weight.data.mul_(2),
    ],
    ids=["hook", "weight"],
)
def test_a_backend_that_changes_the_module_is_found_out(alter):
    module = nn.Sequential(nn.Linear(4, 4)).eval()
    _, graph = tuned(module, Altering(alter))
    found = candidate_of(graph)
    assert found.status == "rejected"
    assert "or this backend changed it" in found.reason


def test_a_backend_that_leaves_the_module_in_training_mode_does_not():
    module = nn.Sequential(nn.Linear(4, 4)).eval()
    wrapper, _ = tuned(module, Altering(lambda module: module.train()))
    assert not module.training
    wrapper(torch.ones(1, 4))
    assert wrapper.num_unseen_calls == Counter()


class Exits(Same):
    name = "test_exits"

    def compile(self, request):
        raise SystemExit(3)


class ExitsWhenCalled(Same):
    name = "test_exits_when_called"

    def compile(self, request):
        def call(x):
            raise SystemExit(3)

        return call


@pytest.mark.parametrize("backend", [Exits, ExitsWhenCalled])
def test_a_backend_that_exits_has_failed(backend):
    wrapper, graph = tuned(nn.Linear(4, 4).eval(), backend())
    found = candidate_of(graph)
    assert (found.status, found.reason) == ("failed", "SystemExit: 3")
    assert wrapper.state == "passthrough"
