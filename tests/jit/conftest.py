"""What tests of just-in-time tuning share: settings, a cache and a finder that are as new, and torch as it was."""

import pytest
import toys
from torch import nn

import perfladder as pl
from perfladder import jit
from perfladder.jit.finder import finder


@pytest.fixture(autouse=True)
def _as_new(tmp_path):
    plain_call = nn.Module.__call__
    jit.jit_config.cache_dir = tmp_path / "jit-cache"
    toys.calls.clear()
    toys.builds.clear()
    yield
    jit.disable()
    finder.forget()
    jit.jit_config.reset_to_defaults()
    pl.config.reset_to_defaults()
    assert nn.Module.__call__ is plain_call


@pytest.fixture
def faster():
    """Serve toys by a backend that counts its calls and builds in `toys`; nothing is timed."""
    jit.jit_config.strategy = pl.OneBackendStrategy(toys.Faster()).enable_performance_validation(False)


@pytest.fixture
def states():
    """Name and state of each module that was found."""

    def read():
        return {module.name: module.state for module in finder.report().modules}

    return read


@pytest.fixture
def next_process():
    """Forget what this process knows, as a new one would that has the same modules and cache."""

    def forget():
        finder.forget()
        toys.calls.clear()
        toys.builds.clear()

    return forget
