"""What tests of kernel providers share: a clock that toys move, and registries and settings as before."""

import kernel_toys
import pytest

import perfladder as pl
from perfladder.kernels import KernelOptimizer, registry


@pytest.fixture(autouse=True)
def _as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(registry._providers, "_registered", dict(registry._providers._registered))
    pl.config.cache_dir = tmp_path / "tuning-cache"
    kernel_toys.calls.clear()
    yield
    pl.config.reset_to_defaults()


@pytest.fixture
def plan_of():
    """A plan for the toy network, or another one, by the toys' clock."""

    def make(*providers, net=None, data=None, **options):
        import torch

        measuring = pl.NumStepsMeasuringStopStrategy(num_steps=10, warmup_samples=1)
        optimizer = KernelOptimizer(
            providers, clock=kernel_toys.clock, min_time_share=0, measuring=measuring, **options
        )
        data = [((torch.linspace(-1, 1, 12).view(3, 4),), {})] if data is None else data
        return optimizer.make_plan(net or kernel_toys.Net(), data)

    return make
