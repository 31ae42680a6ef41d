"""Modules, calls of them and requests to build, for tests of backends that export."""

import torch
from torch import nn

from perfladder.backend import BuildRequest
from perfladder.tuning.correctness import Case, check, expectations
from perfladder.tuning.graphs import GraphTable
from perfladder.tuning.samples import Sample
from perfladder.tuning.tree import parameter_names

CPU = torch.device("cpu")


def call_of(*args, **kwargs):
    return args, kwargs


def make_request(folder, module, *calls, batch_sizes=(), dynamic_shapes=None, strict=True):
    """What a backend is asked to build: a module, called like this; calls tell their batch sizes, or None."""
    module.eval()
    table = GraphTable(parameter_names(module.forward), strict=strict, limit=8, dynamic_shapes=dynamic_shapes)
    sizes = [*batch_sizes, *[None] * (len(calls) - len(batch_sizes))]
    samples = [Sample.of(args, kwargs, size) for (args, kwargs), size in zip(calls, sizes, strict=True)]
    for sample in samples:
        graph = table.observe(sample.args, sample.kwargs, sample.batch_size)
        args, kwargs = sample.fresh()
        with torch.no_grad():
            table.observe_output(graph, module(*args, **kwargs), sample.batch_size)
    assert len(table.graphs) == 1
    return BuildRequest(module, module.forward, graph, samples, CPU, folder)


def assert_right(built, request):
    """Alike on all samples, and at the least, preferred and largest sizes."""
    cases = [Case("sample", sample.fresh) for sample in request.samples]
    for which in ("min", "opt", "max") if request.graph.has_dynamic_axis else ():
        cases.append(Case(which, lambda w=which: request.graph.at_shapes(*request.samples[0].fresh(), w)))
    found = check(built.call, expectations(request.forward, cases, CPU), CPU, None)
    assert found.reason is None
    assert found.num_cases == len(cases)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, image):
        return self.up(torch.relu(self.down(image)))


class Nested(nn.Module):
    """Takes tensors inside a dict, by keyword, and settings; returns a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(10, 8)

    def forward(self, x, options, scale=1.0):
        hidden = self.linear(x) * scale + self.table(options["tokens"]["ids"])
        hidden = hidden.masked_fill(options["mask"][:, None], 0.0)
        return {"hidden": hidden, "again": hidden, "parts": (hidden.sum(1), options["mask"]), "scale": scale}


def nested_call(batch, *, scale=2.0):
    ids, mask = torch.arange(batch) % 10, torch.arange(batch) % 2 == 0
    return call_of(torch.randn(batch, 8), options={"tokens": {"ids": ids}, "mask": mask}, scale=scale)
